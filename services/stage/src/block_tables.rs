//! Which blocks hold which sequence, kept from the deltas that steps bring.

use std::collections::HashMap;

use baton_kernels::Segment;
use baton_proto::v1;

/// Block tables of all live sequences.
#[derive(Debug, Default)]
pub(crate) struct BlockTables {
    tables: HashMap<u64, Vec<u32>>,
    kv_blocks: u32,
    block_size: usize,
}

impl BlockTables {
    pub(crate) fn new(kv_blocks: u32, block_size: usize) -> Self {
        Self { tables: HashMap::new(), kv_blocks, block_size }
    }

    /// Blocks in all tables; one that several sequences share counts for each.
    pub(crate) fn held(&self) -> u64 {
        self.tables.values().map(|table| table.len() as u64).sum()
    }

    /// Forgets released sequences, applies the deltas and gives the step's segments.
    pub(crate) fn apply(&mut self, step: &v1::Step) -> Result<Vec<Segment>, String> {
        for sequence in &step.released_sequences {
            self.tables.remove(sequence);
        }
        let mut first_row = 0;
        let mut segments = Vec::with_capacity(step.segments.len());
        for delta in &step.segments {
            let id = delta.sequence_id;
            let table = self.tables.entry(id).or_default();
            if table.len() != delta.known_blocks as usize {
                return Err(format!(
                    "sequence {id}: the step builds on {} blocks, this stage knows {}",
                    delta.known_blocks,
                    table.len()
                ));
            }
            if let Some(block) = delta.new_blocks.iter().find(|&&b| b >= self.kv_blocks) {
                return Err(format!(
                    "sequence {id}: block {block}, expected one below {}",
                    self.kv_blocks
                ));
            }
            table.extend_from_slice(&delta.new_blocks);
            let (start, rows) = (delta.start_position as usize, delta.token_ids.len());
            let covered = table.len() * self.block_size;
            if start + rows > covered {
                return Err(format!(
                    "sequence {id}: positions up to {} in blocks for {covered}",
                    start + rows
                ));
            }
            segments.push(Segment { first_row, rows, start, blocks: table.clone() });
            first_row += rows;
        }
        Ok(segments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(id: u64, start: u32, rows: usize, known: u32, new: &[u32]) -> v1::Step {
        let segment = v1::Segment {
            sequence_id: id,
            start_position: start,
            token_ids: vec![1; rows],
            known_blocks: known,
            new_blocks: new.to_vec(),
            ..Default::default()
        };
        v1::Step { segments: vec![segment], ..Default::default() }
    }

    #[test]
    fn deltas_add_up_and_releases_forget() {
        let mut tables = BlockTables::new(8, 4);
        assert_eq!(tables.apply(&step(1, 0, 4, 0, &[3])).unwrap()[0].blocks, [3]);
        assert_eq!(tables.apply(&step(1, 4, 1, 1, &[5])).unwrap()[0].blocks, [3, 5]);
        let mut again = step(1, 0, 1, 0, &[2]);
        again.released_sequences = vec![1];
        assert_eq!(tables.apply(&again).unwrap()[0].blocks, [2]);
        assert_eq!(tables.held(), 1);
        let end = v1::Step { released_sequences: vec![1], ..Default::default() };
        tables.apply(&end).unwrap();
        assert_eq!(tables.held(), 0);
    }

    #[test]
    fn wrong_deltas_are_refused_with_the_numbers() {
        let mut tables = BlockTables::new(8, 4);
        let error = tables.apply(&step(1, 0, 1, 2, &[])).unwrap_err();
        assert!(error.contains("2 blocks") && error.contains("knows 0"), "{error}");
        let error = tables.apply(&step(2, 0, 1, 0, &[8])).unwrap_err();
        assert!(error.contains("block 8") && error.contains("below 8"), "{error}");
        let error = tables.apply(&step(3, 0, 5, 0, &[1])).unwrap_err();
        assert!(error.contains("up to 5") && error.contains("for 4"), "{error}");
    }
}
