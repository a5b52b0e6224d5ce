//! Which rows of a step belong to which sequence, and where that sequence's KV lives.

/// Consecutive tokens of one sequence inside a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First row of the step that belongs to this segment.
    pub first_row: usize,
    /// Rows in this segment.
    pub rows: usize,
    /// Position of its first token in the sequence (0-based).
    pub start: usize,
    /// The sequence's block table: block `p / block_size` holds position `p`. Covers every position up to `start + rows`.
    pub blocks: Vec<u32>,
}

/// One step's rows: the segments in row order, then padding rows that belong to no sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Segments in row order, without gaps.
    pub segments: Vec<Segment>,
    /// Rows after the last segment: they select nothing, write nothing, and their outputs are zero or unspecified.
    pub padding: usize,
    /// Tokens per KV block.
    pub block_size: usize,
}

impl Batch {
    /// Rows that belong to a sequence.
    #[must_use]
    pub fn real_rows(&self) -> usize {
        self.segments.iter().map(|s| s.rows).sum()
    }

    /// All rows, padding included: the row count of every activation of the step.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.real_rows() + self.padding
    }

    /// `(segment, position)` of every real row, in row order.
    pub fn positions(&self) -> impl Iterator<Item = (&Segment, usize)> {
        self.segments.iter().flat_map(|s| (s.start..s.start + s.rows).map(move |p| (s, p)))
    }
}

impl Segment {
    /// Cache slot of a position: its block's first slot plus the offset in the block.
    ///
    /// # Panics
    /// When the block table does not cover the position; the stage checks that when it receives the step.
    #[must_use]
    pub fn slot(&self, position: usize, block_size: usize) -> usize {
        self.blocks[position / block_size] as usize * block_size + position % block_size
    }
}
