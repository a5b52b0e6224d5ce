//! What is seen of a pipeline while it runs, and the fault of stock engines.

use std::collections::BTreeMap;

use baton_kernels::{Backend, Batch};
use baton_model::Observer;

/// What one pipeline did in one step.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Layer -> digest of the residual stream after it.
    pub(crate) hidden: BTreeMap<usize, u128>,
    /// Full layer -> the index rows it chose, of rows past `index_topk`.
    pub(crate) chosen: BTreeMap<usize, Vec<i32>>,
    /// Stage -> the index rows it began with, of the same rows.
    pub(crate) entered: BTreeMap<usize, Vec<i32>>,
    /// Rows of the step past `index_topk`.
    pub(crate) long: usize,
}

/// Watches one stage in one step.
pub(crate) struct Watch<'a> {
    pub(crate) stage: usize,
    pub(crate) topk: usize,
    /// Whether the stage begins with rows of an earlier stage.
    pub(crate) receives: bool,
    pub(crate) full_layers: &'a [usize],
    /// The stage's own index buffer, where stock behaviour is reproduced.
    pub(crate) stale: Option<&'a mut StockBuffer>,
    /// Rows of the step and which of them are past `index_topk`.
    pub(crate) long: Vec<usize>,
    pub(crate) seen: &'a mut Seen,
}

/// An index buffer as stock engines have it: one per stage, written by the stage's own full layers, never refreshed at
/// the cut. Rows of a step overwrite the first rows; the rest stays as earlier steps left it.
#[derive(Debug)]
pub(crate) struct StockBuffer {
    topk: usize,
    rows: Vec<i32>,
}

impl StockBuffer {
    /// A buffer that nothing has been written to.
    pub(crate) fn new(rows: usize, topk: usize) -> Self {
        Self { topk, rows: vec![0; rows * topk] }
    }

    fn write(&mut self, rows: &[i32]) {
        self.rows[..rows.len()].copy_from_slice(rows);
    }

    /// What a row at `position` finds: entries past its context attend to nothing, and one position counts once.
    fn read(&self, row: usize, position: usize) -> Vec<i32> {
        let mut found: Vec<i32> = self.rows[row * self.topk..][..self.topk]
            .iter()
            .copied()
            .filter(|&entry| entry >= 0 && entry as usize <= position)
            .collect();
        found.sort_unstable();
        found.dedup();
        found.resize(self.topk, -1);
        found
    }
}

impl<B: Backend> Observer<B> for Watch<'_> {
    fn enter(
        &mut self,
        backend: &B,
        batch: &Batch,
        placed: &B::Placed,
        selection: &mut Option<B::Selection>,
    ) {
        if !self.receives {
            return;
        }
        if let Some(buffer) = &self.stale {
            let rows: Vec<i32> = batch
                .positions()
                .enumerate()
                .filter(|(_, (_, position))| *position >= self.topk)
                .flat_map(|(row, (_, position))| buffer.read(row, position))
                .collect();
            *selection = Some(backend.import_selection(placed, self.topk, &rows));
        }
        if let Some(selection) = selection {
            let rows = backend.export_selection(selection, &self.long);
            self.seen.entered.insert(self.stage, rows);
        }
    }

    fn leave(&mut self, backend: &B, layer: usize, hidden: &B::Tensor, selection: &B::Selection) {
        let bytes = backend.export(hidden, baton_kernels::Dtype::F32);
        self.seen.hidden.insert(layer, xxhash_rust::xxh3::xxh3_128(&bytes));
        if !self.full_layers.contains(&layer) {
            return;
        }
        self.seen.chosen.insert(layer, backend.export_selection(selection, &self.long));
        if let Some(buffer) = &mut self.stale {
            let (rows, _) = backend.shape(hidden);
            let all: Vec<usize> = (0..rows).collect();
            buffer.write(&backend.export_selection(selection, &all));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stock_buffer_keeps_what_earlier_steps_left() {
        let mut buffer = StockBuffer::new(3, 4);
        assert_eq!(buffer.read(2, 9), [0, -1, -1, -1], "nothing was written");
        buffer.write(&[1, 2, 5, 7, 0, 3, -1, -1]);
        assert_eq!(buffer.read(0, 9), [1, 2, 5, 7]);
        assert_eq!(buffer.read(0, 5), [1, 2, 5, -1], "positions past the context");
        assert_eq!(buffer.read(1, 9), [0, 3, -1, -1]);
        buffer.write(&[4, 6, 8, 9]);
        assert_eq!(buffer.read(0, 9), [4, 6, 8, 9]);
        assert_eq!(buffer.read(1, 9), [0, 3, -1, -1], "a shorter step leaves later rows");
    }
}
