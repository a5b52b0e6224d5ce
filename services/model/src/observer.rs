//! A look inside a slice while it runs, for tools that compare pipelines.

use baton_kernels::{Backend, Batch};

/// Sees a step from inside a slice. `()` sees nothing.
pub trait Observer<B: Backend>: Send {
    /// Before the first layer: the index rows that came with the hand-off. Whoever replaces them gets wrong answers, which
    /// can be the point.
    fn enter(
        &mut self,
        _backend: &B,
        _batch: &Batch,
        _placed: &B::Placed,
        _selection: &mut Option<B::Selection>,
    ) {
    }

    /// After a layer: the residual stream, and the index rows that the layer used.
    fn leave(
        &mut self,
        _backend: &B,
        _layer: usize,
        _hidden: &B::Tensor,
        _selection: &B::Selection,
    ) {
    }
}

impl<B: Backend> Observer<B> for () {}
