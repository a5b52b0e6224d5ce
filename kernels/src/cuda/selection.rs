//! The indexer on the device, and selections that come from a hand-off.

use super::device::{Device, launch};
use super::memory::Memory;
use super::placed::Placed;
use super::tensor::{Element, Tensor};
use crate::backend::IndexParams;

/// Bytes of scores that exist at once; more rows take several rounds.
const SCORE_BYTES: usize = 256 << 20;

/// Chosen positions of every row, and the slots they have on this stage.
#[derive(Debug)]
pub struct Selection {
    pub(crate) topk: usize,
    pub(crate) rows: usize,
    /// int32 `[rows][topk]`, ascending, -1 after the last.
    chosen: Memory,
    /// int32 `[rows]`.
    counts: Memory,
    /// int32 `[rows][topk]`, -1 after the last.
    slots: Memory,
}

/// Paged index keys of one layer: `[slots][width]` in the compute type.
#[derive(Debug)]
pub struct IndexCache {
    pub(crate) width: usize,
    pub(crate) data: Memory,
}

impl Selection {
    fn new(device: &Device, rows: usize, topk: usize) -> Self {
        let part = |bytes| Memory::part(device, "a step's index rows", bytes);
        Self {
            topk,
            rows,
            chosen: part(rows * topk * 4),
            counts: part(rows * 4),
            slots: part(rows * topk * 4),
        }
    }

    pub(crate) fn slots(&self) -> u64 {
        self.slots.at(0)
    }

    pub(crate) fn counts(&self) -> u64 {
        self.counts.at(0)
    }

    fn find_slots(&self, device: &Device, placed: &Placed) {
        launch!(device, "selection_slots", self.rows, 256, 0;
            self.chosen.at(0), placed.sequence(), placed.tables(), placed.table_stride as i32,
            placed.batch.block_size as i32, self.topk as i32, self.slots.at(0));
    }

    /// Scores every earlier position and chooses.
    pub(crate) fn choose(
        device: &Device,
        nan: &Memory,
        cache: &IndexCache,
        placed: &Placed,
        queries: &Tensor,
        weights: &Tensor,
        params: &IndexParams,
    ) -> Self {
        let rows = placed.rows;
        let selection = Self::new(device, rows, params.topk);
        let stride = placed.longest.next_multiple_of(4).max(4);
        let scored = placed.longest > params.topk;
        let at_once =
            if scored { (SCORE_BYTES / (stride * 4)).clamp(1, rows.max(1)) } else { rows.max(1) };
        let scores =
            Memory::part(device, "index scores", if scored { at_once * stride * 4 } else { 4 });
        let kernel = queries.element.pick("index_scores_f32", "index_scores_bf16");
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            if scored {
                let shared = params.heads * (params.head_dim + 1) * 4;
                launch!(device, kernel, (placed.longest.div_ceil(32), count), 256, shared;
                    cache.data.at(0), queries.at(), weights.at(), placed.positions(), placed.sequence(), placed.tables(),
                    placed.table_stride as i32, placed.batch.block_size as i32, scores.at(0), stride as i64, first as i32,
                    params.heads as i32, params.head_dim as i32, params.topk as i32);
            }
            launch!(device, "select_topk", count, 256, 0;
                scores.at(0), stride as i64, placed.positions(), first as i32, params.topk as i32, selection.chosen.at(0),
                selection.counts.at(0), nan.at(0));
        }
        selection.find_slots(device, placed);
        selection
    }

    /// From the index rows of the step's long rows.
    pub(crate) fn import(device: &Device, placed: &Placed, topk: usize, long_rows: &[i32]) -> Self {
        let selection = Self::new(device, placed.rows, topk);
        let mut lines = 0..;
        let mut long: Vec<i32> = placed
            .batch
            .positions()
            .map(|(_, position)| if position >= topk { lines.next().unwrap_or(-1) } else { -1 })
            .collect();
        long.resize(placed.rows, -1);
        let upload = |numbers: &[i32]| {
            let memory = Memory::part(device, "a hand-off's index rows", numbers.len().max(1) * 4);
            memory.write(device, 0, bytemuck::cast_slice(numbers));
            memory
        };
        let (carried, long) = (upload(long_rows), upload(&long));
        launch!(device, "import_selection", placed.rows, 256, 0;
            carried.at(0), long.at(0), placed.positions(), topk as i32, selection.chosen.at(0), selection.counts.at(0));
        selection.find_slots(device, placed);
        selection
    }

    /// The given rows on the host.
    pub(crate) fn export(&self, device: &Device, rows: &[usize]) -> Vec<i32> {
        let mut out = vec![-1_i32; rows.len() * self.topk];
        if out.is_empty() {
            return out;
        }
        let wanted: Vec<i32> = rows.iter().map(|row| *row as i32).collect();
        let lines = Memory::part(device, "rows of a hand-off", wanted.len() * 4);
        lines.write(device, 0, bytemuck::cast_slice(&wanted));
        let packed = Memory::part(device, "a hand-off's index rows", out.len() * 4);
        launch!(device, "export_selection", rows.len(), 256, 0;
            self.chosen.at(0), lines.at(0), self.topk as i32, packed.at(0));
        packed.read(device, bytemuck::cast_slice_mut(&mut out));
        out
    }
}

/// Element type of a cache.
pub(crate) fn slots(
    device: &Device,
    what: &'static str,
    blocks: usize,
    block_size: usize,
    width: usize,
    element: Element,
) -> Result<Memory, crate::backend::KernelError> {
    let bytes = blocks
        .checked_mul(block_size)
        .and_then(|slots| slots.checked_mul(width))
        .and_then(|values| values.checked_mul(element.size()))
        .ok_or(crate::backend::KernelError::OutOfMemory { what, needed: u64::MAX, available: 0 })?;
    let memory = Memory::own(device, what, bytes)?;
    // Slots that were never written are never selected, but a tool that reads one should see zeros.
    memory.fill(device, 0);
    Ok(memory)
}
