//! Random values, matrices in every stored type, and the measure of an error.

use half::{bf16, f16};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::backend::{Dtype, MatrixData, MatrixView};

/// A reproducible source of numbers.
pub(super) struct Values(ChaCha8Rng);

impl Values {
    pub(super) fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// `n` values in (-1, 1).
    pub(super) fn take(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.0.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    /// `n` numbers below `limit`.
    pub(super) fn below(&mut self, n: usize, limit: u32) -> Vec<u32> {
        (0..n).map(|_| self.0.next_u32() % limit).collect()
    }

    /// A matrix as a checkpoint would store it, about `1 / sqrt(cols)` in size.
    pub(super) fn matrix(&mut self, rows: usize, cols: usize, stored: Stored) -> Matrix {
        let size = 1.0 / (cols as f32).sqrt();
        let values = self.take(rows * cols);
        let scaled = values.iter().map(|v| v * size);
        let (data, scales) = match stored {
            Stored::F32 => (scaled.flat_map(f32::to_le_bytes).collect(), Vec::new()),
            Stored::Bf16 => {
                (scaled.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(), Vec::new())
            }
            Stored::F16 => {
                (scaled.flat_map(|v| f16::from_f32(v).to_le_bytes()).collect(), Vec::new())
            }
            Stored::Fp8(block) => {
                // Signs, exponents around one and any mantissa; never the code of a NaN.
                let code = |v: &f32| {
                    (v.to_bits() & 0x87) as u8 | (((v.to_bits() >> 8) % 6 + 2) as u8) << 3
                };
                let grid = rows.div_ceil(block) * cols.div_ceil(block);
                let scales =
                    self.take(grid).iter().flat_map(|v| ((v + 1.5) * size).to_le_bytes()).collect();
                (values.iter().map(code).collect(), scales)
            }
        };
        Matrix { rows, cols, stored, data, scales }
    }
}

/// How a test matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    F32,
    Bf16,
    F16,
    /// Square blocks of this size.
    Fp8(usize),
}

/// A matrix that owns its bytes.
pub(super) struct Matrix {
    rows: usize,
    cols: usize,
    stored: Stored,
    data: Vec<u8>,
    scales: Vec<u8>,
}

impl Matrix {
    /// Makes a row of a two-byte matrix equal to an earlier one.
    pub(super) fn repeat_row(&mut self, from: usize, to: usize) {
        let width = 2 * self.cols;
        self.data.copy_within(from * width..(from + 1) * width, to * width);
    }

    pub(super) fn view(&self) -> MatrixView<'_> {
        let data = match self.stored {
            Stored::F32 => MatrixData::F32(&self.data),
            Stored::Bf16 => MatrixData::Bf16(&self.data),
            Stored::F16 => MatrixData::F16(&self.data),
            Stored::Fp8(block) => MatrixData::Fp8Block {
                codes: &self.data,
                scales: &self.scales,
                block_rows: block,
                block_cols: block,
            },
        };
        MatrixView { rows: self.rows, cols: self.cols, data }
    }
}

pub(super) fn bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
    }
}

pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// `|found - expected| / |expected|`; infinite when lengths differ.
pub(super) fn relative(found: &[f32], expected: &[f32]) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let square = |v: f64| v * v;
    let difference: f64 =
        found.iter().zip(expected).map(|(f, e)| square(f64::from(*f) - f64::from(*e))).sum();
    let size: f64 = expected.iter().map(|e| square(f64::from(*e))).sum();
    if size == 0.0 { difference.sqrt() } else { (difference / size).sqrt() }
}
