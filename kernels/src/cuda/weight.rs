//! Stored matrices on the device, as the checkpoint has them.

use super::device::{Device, launch};
use super::memory::Memory;
use crate::backend::{KernelError, MatrixData, MatrixView};

/// A stored matrix as kernels see it; mirrors `Matrix` of `plain.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) data: u64,
    pub(crate) scales: u64,
    pub(crate) rows: i32,
    pub(crate) cols: i32,
    pub(crate) kind: i32,
    pub(crate) block_rows: i32,
    pub(crate) block_cols: i32,
    pub(crate) scale_cols: i32,
}

/// Stored type of a matrix, with the numbers that kernels know it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    F32,
    Bf16,
    F16,
    Fp8 { block_rows: usize, block_cols: usize },
}

/// `count` matrices `[rows, cols]` of one stored type, one after the other; a linear weight is one, experts are many.
#[derive(Debug)]
pub struct Weight {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) kind: Kind,
    pub(crate) data: Memory,
    /// FP8: `[count][ceil(rows / block_rows)][ceil(cols / block_cols)]` f32.
    pub(crate) scales: Memory,
}

/// A vector of f32 on the device.
#[derive(Debug)]
pub struct Vector(pub(crate) Memory);

impl Kind {
    fn of(data: &MatrixData<'_>) -> Self {
        match data {
            MatrixData::F32(_) => Self::F32,
            MatrixData::Bf16(_) => Self::Bf16,
            MatrixData::F16(_) => Self::F16,
            MatrixData::Fp8Block { block_rows, block_cols, .. } => {
                Self::Fp8 { block_rows: *block_rows, block_cols: *block_cols }
            }
            MatrixData::MadeUp { blocks: None, .. } => Self::Bf16,
            MatrixData::MadeUp { blocks: Some((block_rows, block_cols)), .. } => {
                Self::Fp8 { block_rows: *block_rows, block_cols: *block_cols }
            }
        }
    }

    /// Bytes of a value.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::Fp8 { .. } => 1,
        }
    }

    /// Scales of one matrix: rows and columns of their grid.
    pub(crate) fn grid(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            Self::Fp8 { block_rows, block_cols } => {
                (rows.div_ceil(block_rows), cols.div_ceil(block_cols))
            }
            _ => (0, 0),
        }
    }
}

impl Weight {
    /// Takes one matrix over.
    pub(crate) fn upload(device: &Device, matrix: MatrixView<'_>) -> Result<Self, KernelError> {
        Self::stack(device, "a weight", matrix.rows, matrix.cols, &[matrix])
    }

    /// Takes matrices of one shape and stored type over.
    ///
    /// # Errors
    /// When one of them differs, its bytes do not fill its shape, or the device has too little memory.
    pub(crate) fn stack(
        device: &Device,
        what: &'static str,
        rows: usize,
        cols: usize,
        matrices: &[MatrixView<'_>],
    ) -> Result<Self, KernelError> {
        let kind = matrices.first().map_or(Kind::F32, |m| Kind::of(&m.data));
        if let Kind::Fp8 { block_rows: 0, .. } | Kind::Fp8 { block_cols: 0, .. } = kind {
            return Err(mismatch(
                "fp8 scale block",
                "at least 1 x 1".to_owned(),
                format!("{kind:?}"),
            ));
        }
        let (high, wide) = kind.grid(rows, cols);
        let (bytes, scale_bytes) = (rows * cols * kind.size(), high * wide * 4);
        let data = Memory::own(device, what, bytes * matrices.len())?;
        let scales = Memory::own(device, what, scale_bytes * matrices.len())?;
        for (at, matrix) in matrices.iter().enumerate() {
            if (matrix.rows, matrix.cols) != (rows, cols) {
                let found = format!("{} x {}", matrix.rows, matrix.cols);
                return Err(mismatch(what, format!("{rows} x {cols}"), found));
            }
            if Kind::of(&matrix.data) != kind {
                return Err(mismatch(
                    what,
                    format!("{kind:?}"),
                    format!("{:?}", Kind::of(&matrix.data)),
                ));
            }
            let values = match matrix.data {
                MatrixData::F32(values) | MatrixData::Bf16(values) | MatrixData::F16(values) => {
                    values
                }
                MatrixData::Fp8Block { codes, scales: stored, .. } => {
                    if stored.len() != scale_bytes {
                        return Err(mismatch(
                            "fp8 scales",
                            format!("{scale_bytes} bytes"),
                            stored.len().to_string(),
                        ));
                    }
                    scales.write(device, at * scale_bytes, stored);
                    codes
                }
                MatrixData::MadeUp { seed, .. } => {
                    make_up(device, &data, at * bytes, kind, rows * cols, cols, seed);
                    let size = 0.5 * (3.0 / cols.max(1) as f32).sqrt();
                    launch!(device, "fill_f32", (scale_bytes / 4).div_ceil(256), 256, 0;
                        scales.at(at * scale_bytes), (scale_bytes / 4) as i64, size);
                    continue;
                }
            };
            if values.len() != bytes {
                return Err(mismatch(what, format!("{bytes} bytes"), values.len().to_string()));
            }
            data.write(device, at * bytes, values);
        }
        device.take_failure()?;
        Ok(Self { rows, cols, kind, data, scales })
    }

    /// As kernels see it.
    pub(crate) fn matrix(&self) -> Matrix {
        let (kind, block_rows, block_cols) = match self.kind {
            Kind::F32 => (0, 1, 1),
            Kind::Bf16 => (1, 1, 1),
            Kind::F16 => (2, 1, 1),
            Kind::Fp8 { block_rows, block_cols } => (3, block_rows as i32, block_cols as i32),
        };
        let (_, wide) = self.kind.grid(self.rows, self.cols);
        Matrix {
            data: self.data.at(0),
            scales: self.scales.at(0),
            rows: self.rows as i32,
            cols: self.cols as i32,
            kind,
            block_rows,
            block_cols,
            scale_cols: wide as i32,
        }
    }
}

/// Draws `values` of a matrix.
fn make_up(
    device: &Device,
    data: &Memory,
    at: usize,
    kind: Kind,
    values: usize,
    cols: usize,
    seed: u64,
) {
    let blocks = values.div_ceil(256).min(1 << 16);
    match kind {
        Kind::Fp8 { .. } => {
            launch!(device, "random_codes", blocks, 256, 0; data.at(at), values as i64, seed);
        }
        _ => {
            let amplitude = (3.0 / cols.max(1) as f32).sqrt();
            launch!(device, "random_bf16", blocks, 256, 0; data.at(at), values as i64, seed, amplitude);
        }
    }
}

pub(crate) fn mismatch(what: &'static str, expected: String, found: String) -> KernelError {
    KernelError::Shape { what, expected, found }
}
