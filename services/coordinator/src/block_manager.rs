//! KV blocks: ids common to all stages.

/// Free blocks of the pipeline.
#[derive(Debug)]
pub(crate) struct BlockManager {
    free: Vec<u32>,
    total: u32,
    block_size: usize,
}

impl BlockManager {
    pub(crate) fn new(total: u32, block_size: usize) -> Self {
        Self { free: (0..total).rev().collect(), total, block_size }
    }

    /// Blocks that `tokens` positions need.
    pub(crate) fn needed(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Positions that all blocks together hold.
    pub(crate) fn capacity(&self) -> usize {
        self.total as usize * self.block_size
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Extends `table` to cover `tokens` positions; leaves it as it is and says no when there are too few free blocks.
    pub(crate) fn extend(&mut self, table: &mut Vec<u32>, tokens: usize) -> bool {
        let missing = self.needed(tokens).saturating_sub(table.len());
        if missing > self.free.len() {
            return false;
        }
        table.extend(self.free.split_off(self.free.len() - missing));
        true
    }

    /// Takes the blocks of a sequence back.
    ///
    /// They may be given to a later step at once: stages run steps in order, so everything that earlier steps write to them
    /// is written before.
    pub(crate) fn release(&mut self, table: &mut Vec<u32>) {
        self.free.append(table);
        debug_assert!(self.free.len() <= self.total as usize, "a block was freed twice");
    }
}
