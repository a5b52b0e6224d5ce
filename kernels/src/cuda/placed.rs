//! A step's rows on the device.

use super::device::Device;
use super::memory::Memory;
use crate::batch::Batch;

/// Positions, slots and block tables of a step, in one piece of device memory.
#[derive(Debug)]
pub struct Placed {
    /// The same on the host.
    pub(crate) batch: Batch,
    pub(crate) rows: usize,
    /// Positions of the longest sequence in this step.
    pub(crate) longest: usize,
    /// Entries of a line of the block tables.
    pub(crate) table_stride: usize,
    memory: Memory,
    tables_at: usize,
}

impl Placed {
    pub(crate) fn new(device: &Device, batch: &Batch) -> Self {
        let rows = batch.rows();
        let longest = batch.segments.iter().map(|s| s.start + s.rows).max().unwrap_or(0);
        let table_stride = longest.div_ceil(batch.block_size.max(1)).max(1);
        // Three numbers a row: its position, the slot it writes and its line of the block tables; -1 for padding.
        let mut numbers = vec![-1_i32; 3 * rows + batch.segments.len() * table_stride];
        let mut row = 0;
        for (line, segment) in batch.segments.iter().enumerate() {
            for position in segment.start..segment.start + segment.rows {
                numbers[row] = position as i32;
                numbers[rows + row] = segment.slot(position, batch.block_size) as i32;
                numbers[2 * rows + row] = line as i32;
                row += 1;
            }
            let table = &mut numbers[3 * rows + line * table_stride..][..table_stride];
            table.iter_mut().zip(&segment.blocks).for_each(|(to, block)| *to = *block as i32);
        }
        let bytes: &[u8] = bytemuck::cast_slice(&numbers);
        let memory = Memory::part(device, "a step's block tables", bytes.len());
        if memory.len() == bytes.len() {
            memory.write(device, 0, bytes);
        }
        Self { batch: batch.clone(), rows, longest, table_stride, memory, tables_at: 12 * rows }
    }

    /// int32 `[rows]`, -1 for padding.
    pub(crate) fn positions(&self) -> u64 {
        self.memory.at(0)
    }

    /// int32 `[rows]`: where each row writes, -1 for padding.
    pub(crate) fn slots(&self) -> u64 {
        self.memory.at(4 * self.rows)
    }

    /// int32 `[rows]`: each row's line of the block tables, -1 for padding.
    pub(crate) fn sequence(&self) -> u64 {
        self.memory.at(8 * self.rows)
    }

    /// int32 `[sequences][table_stride]`.
    pub(crate) fn tables(&self) -> u64 {
        self.memory.at(self.tables_at)
    }
}
