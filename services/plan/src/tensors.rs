//! The tensors of a checkpoint: names, shapes and sizes. Everything that counts bytes or looks names up asks here.

mod layer;
mod storage;

use std::ops::Range;

pub use layer::{layer_tensors, mtp_tensors};
pub use storage::Storage;

use crate::config::ModelConfig;

/// How checkpoints store a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// In the checkpoint's own type, or as FP8 blocks with scales beside it where the checkpoint is FP8.
    Quantisable,
    /// In the checkpoint's own type, in FP8 checkpoints as well.
    Model,
    /// In single precision, whatever the rest is stored in.
    Single,
}

/// One tensor as a checkpoint names it, in the spelling with one tensor per expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Full name.
    pub name: String,
    /// Output width of a matrix, length of a vector.
    pub rows: usize,
    /// Input width of a matrix; none for a vector.
    pub cols: Option<usize>,
    /// What it may be stored as.
    pub precision: Precision,
}

impl TensorSpec {
    /// Shape as the file's header has it.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        std::iter::once(self.rows).chain(self.cols).collect()
    }

    /// Number of values.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.rows as u64 * self.cols.unwrap_or(1) as u64
    }

    /// Bytes in a checkpoint of this kind, the scales of FP8 blocks included.
    #[must_use]
    pub fn bytes(&self, storage: Storage) -> u64 {
        storage.bytes(self)
    }

    /// The scales that stand beside the tensor in a checkpoint of this kind, if it has any.
    #[must_use]
    pub fn scales(&self, storage: Storage) -> Option<Self> {
        storage.scales(self)
    }
}

/// What only the first stage holds: the embedding table.
#[must_use]
pub fn first_stage_tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    vec![table("model.embed_tokens.weight", config)]
}

/// What only the last stage holds: the final norm and the head.
#[must_use]
pub fn last_stage_tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    let norm = TensorSpec {
        name: "model.norm.weight".into(),
        rows: config.hidden_size,
        cols: None,
        precision: Precision::Model,
    };
    vec![norm, table("lm_head.weight", config)]
}

/// Everything that a slice holds: its layers, and what belongs to the first and last layer of the model.
///
/// # Panics
/// When the model has no such layers.
#[must_use]
pub fn slice_tensors(config: &ModelConfig, layers: Range<usize>) -> Vec<TensorSpec> {
    let mut tensors = Vec::new();
    if layers.start == 0 {
        tensors.extend(first_stage_tensors(config));
    }
    for layer in layers.clone() {
        tensors.extend(layer_tensors(config, layer));
    }
    if layers.end == config.num_layers {
        tensors.extend(last_stage_tensors(config));
    }
    tensors
}

/// Bytes of some tensors in a checkpoint of this kind.
#[must_use]
pub fn total_bytes(tensors: &[TensorSpec], storage: Storage) -> u64 {
    tensors.iter().map(|tensor| tensor.bytes(storage)).sum()
}

fn table(name: &str, config: &ModelConfig) -> TensorSpec {
    TensorSpec {
        name: name.into(),
        rows: config.vocab_size,
        cols: Some(config.hidden_size),
        precision: Precision::Model,
    }
}

#[cfg(test)]
mod tests;
