//! KV blocks: ids common to all stages, with reference counts and a cache of prefixes.
//!
//! A block is *free*, *used* by one or more sequences, or *idle*: nobody uses it, but its content is known by hash and a
//! later sequence may take it up. Idle blocks count as free; the least recently used one is given away first.

use std::collections::{BTreeMap, HashMap};

use crate::prefix::BlockHash;

#[derive(Clone, Debug, Default)]
struct Block {
    users: u32,
    /// What it holds, once all stages have computed it.
    hash: Option<BlockHash>,
    /// When it became idle.
    idle_since: u64,
}

/// The blocks of the pipeline.
#[derive(Debug)]
pub(crate) struct BlockManager {
    blocks: Vec<Block>,
    free: Vec<u32>,
    /// Least recently used first.
    idle: BTreeMap<u64, u32>,
    by_hash: HashMap<BlockHash, u32>,
    clock: u64,
    block_size: usize,
}

impl BlockManager {
    pub(crate) fn new(total: u32, block_size: usize) -> Self {
        Self {
            blocks: vec![Block::default(); total as usize],
            free: (0..total).rev().collect(),
            idle: BTreeMap::new(),
            by_hash: HashMap::new(),
            clock: 0,
            block_size,
        }
    }

    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks that `tokens` positions need.
    pub(crate) fn needed(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Blocks in all.
    pub(crate) fn total(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Positions that all blocks together hold.
    pub(crate) fn capacity(&self) -> usize {
        self.blocks.len() * self.block_size
    }

    /// Blocks that no sequence uses.
    pub(crate) fn free(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Blocks whose content is known by hash.
    pub(crate) fn cached(&self) -> usize {
        self.by_hash.len()
    }

    /// Takes up the longest known beginning of these hashes.
    pub(crate) fn take_prefix(&mut self, hashes: &[BlockHash]) -> Vec<u32> {
        let known = hashes.iter().map_while(|hash| self.by_hash.get(hash).copied());
        let table: Vec<u32> = known.collect();
        for &id in &table {
            let block = &mut self.blocks[id as usize];
            if block.users == 0 {
                self.idle.remove(&block.idle_since);
            }
            block.users += 1;
        }
        table
    }

    /// Extends `table` to cover `tokens` positions; leaves it as it is and says no when there are too few free blocks.
    pub(crate) fn extend(&mut self, table: &mut Vec<u32>, tokens: usize) -> bool {
        let missing = self.needed(tokens).saturating_sub(table.len());
        if missing > self.free() {
            return false;
        }
        for _ in 0..missing {
            let Some(id) = self.free.pop().or_else(|| self.evict()) else { return false };
            self.blocks[id as usize].users = 1;
            table.push(id);
        }
        true
    }

    fn evict(&mut self) -> Option<u32> {
        let (_, id) = self.idle.pop_first()?;
        if let Some(hash) = self.blocks[id as usize].hash.take() {
            self.by_hash.remove(&hash);
        }
        Some(id)
    }

    /// Makes a block known that holds this content, on all stages. The first block of a content stays the known one.
    pub(crate) fn publish(&mut self, id: u32, hash: BlockHash) {
        let block = &mut self.blocks[id as usize];
        if block.hash.is_none() && !self.by_hash.contains_key(&hash) {
            block.hash = Some(hash);
            self.by_hash.insert(hash, id);
        }
    }

    /// Takes the blocks of a sequence back.
    ///
    /// They may be given to a later step at once: stages run steps in order, so everything that earlier steps write to them
    /// is written before.
    pub(crate) fn release(&mut self, table: &mut Vec<u32>) {
        // The end first: of a prefix, its end is evicted before its beginning, without which it is of no use.
        while let Some(id) = table.pop() {
            let block = &mut self.blocks[id as usize];
            debug_assert!(block.users > 0, "block {id} was freed twice");
            block.users = block.users.saturating_sub(1);
            if block.users > 0 {
                continue;
            }
            if block.hash.is_some() {
                self.clock += 1;
                block.idle_since = self.clock;
                self.idle.insert(self.clock, id);
            } else {
                self.free.push(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u8) -> BlockHash {
        [n; 32]
    }

    #[test]
    fn a_prefix_is_shared_and_outlives_its_users() {
        let mut manager = BlockManager::new(4, 2);
        let mut first = Vec::new();
        assert!(manager.extend(&mut first, 5));
        manager.publish(first[0], hash(1));
        manager.publish(first[1], hash(2));
        let mut second = manager.take_prefix(&[hash(1), hash(2), hash(3)]);
        assert_eq!(second, first[..2]);
        manager.release(&mut first);
        assert_eq!(manager.free(), 2, "two blocks are still used");
        manager.release(&mut second);
        assert_eq!((manager.free(), manager.cached()), (4, 2));
        assert_eq!(manager.take_prefix(&[hash(2)]).len(), 1, "content is found by hash alone");
    }

    #[test]
    fn the_least_recently_used_end_is_evicted_first() {
        let mut manager = BlockManager::new(3, 1);
        let mut table = Vec::new();
        assert!(manager.extend(&mut table, 3));
        for (n, id) in table.clone().into_iter().enumerate() {
            manager.publish(id, hash(n as u8));
        }
        manager.release(&mut table);
        let mut newcomer = Vec::new();
        assert!(manager.extend(&mut newcomer, 1));
        assert_eq!(manager.take_prefix(&[hash(0), hash(1), hash(2)]).len(), 2);
        assert!(!manager.extend(&mut newcomer, 2), "all three are used");
        assert_eq!(newcomer.len(), 1);
    }

    #[test]
    fn a_second_block_of_the_same_content_is_not_known() {
        let mut manager = BlockManager::new(2, 1);
        let mut table = Vec::new();
        assert!(manager.extend(&mut table, 2));
        manager.publish(table[0], hash(1));
        manager.publish(table[1], hash(1));
        let known = table[0];
        manager.release(&mut table);
        assert_eq!((manager.take_prefix(&[hash(1)]), manager.free()), (vec![known], 1));
    }
}
