//! Tests of the backend through its trait: against f64 references, and of a row alone against a row among others.

mod attention;
mod feed_forward;
mod products;
mod selection;

use half::{bf16, f16};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::*;
use crate::backend::MatrixData;
use crate::batch::Segment;

/// Values in `[-1, 1)` that a seed fixes.
struct Values(ChaCha8Rng);

impl Values {
    fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    fn next(&mut self) -> f32 {
        (self.0.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    fn take(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }

    fn tensor(&mut self, rows: usize, width: usize) -> Tensor {
        Tensor { rows, width, data: self.take(rows * width) }
    }
}

fn cpu(threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(threads) }).unwrap()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn weight(backend: &CpuBackend, values: &[f32], rows: usize, cols: usize) -> Weight {
    let data = bytes(values);
    backend.weight(MatrixView { rows, cols, data: MatrixData::F32(&data) }).unwrap()
}

fn close(found: f32, expected: f64, tolerance: f64) {
    let error = (f64::from(found) - expected).abs();
    assert!(error <= tolerance * (1.0 + expected.abs()), "{found} instead of {expected}");
}

/// One segment whose blocks are not in order, and the batch it alone makes.
fn sequence(start: usize, rows: usize, block_size: usize, first_block: u32) -> Batch {
    let blocks = (start + rows).div_ceil(block_size) as u32;
    // Reversed, so that a position's slot is never the position.
    let blocks = (0..blocks).rev().map(|b| first_block + b).collect();
    let segment = Segment { first_row: 0, rows, start, blocks };
    Batch { segments: vec![segment], padding: 0, block_size }
}

/// The step that holds the given steps' rows and `padding` more.
fn join(parts: &[&Batch], padding: usize) -> Batch {
    let mut segments = Vec::new();
    let mut first_row = 0;
    for segment in parts.iter().flat_map(|b| &b.segments) {
        segments.push(Segment { first_row, ..segment.clone() });
        first_row += segment.rows;
    }
    Batch { segments, padding, block_size: parts[0].block_size }
}

fn table(pairs: usize) -> RopeTable {
    let inv_freq = (0..pairs).map(|i| 1e4_f32.powf(-(i as f32) / pairs as f32)).collect();
    RopeTable { inv_freq, magnitude: 1.0 }
}
