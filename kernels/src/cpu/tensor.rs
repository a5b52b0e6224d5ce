//! Activations, vectors and stored matrices of the CPU backend.

use half::{bf16, f16};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::backend::{Dtype, KernelError, MatrixData, MatrixView};

/// Output features a panel covers.
pub(crate) const LANES: usize = 16;

/// Activations `[rows, width]`, row-major f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) data: Vec<f32>,
}

impl Tensor {
    pub(crate) fn zeros(rows: usize, width: usize) -> Self {
        Self { rows, width, data: vec![0.0; rows * width] }
    }

    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.width..(row + 1) * self.width]
    }

    /// The values in `dtype`, little-endian.
    pub(crate) fn to_bytes(&self, dtype: Dtype) -> Vec<u8> {
        let values = self.data.iter();
        match dtype {
            Dtype::F32 => values.flat_map(|v| v.to_le_bytes()).collect(),
            Dtype::Bf16 => values.flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            Dtype::F16 => values.flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        }
    }

    /// Reads `rows * width` little-endian values of `dtype`.
    pub(crate) fn from_bytes(bytes: &[u8], rows: usize, width: usize, dtype: Dtype) -> Self {
        let data: Vec<f32> = match dtype {
            Dtype::F32 => words(bytes).map(f32::from_le_bytes).collect(),
            Dtype::Bf16 => words(bytes).map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
            Dtype::F16 => words(bytes).map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        };
        debug_assert_eq!(data.len(), rows * width, "bytes hold rows * width values");
        Self { rows, width, data }
    }

    /// Rounds every value to `dtype`.
    pub(crate) fn round(&mut self, dtype: Dtype) {
        match dtype {
            Dtype::F32 => {}
            Dtype::Bf16 => self.data.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32()),
            Dtype::F16 => self.data.iter_mut().for_each(|v| *v = f16::from_f32(*v).to_f32()),
        }
    }
}

/// A vector of f32.
#[derive(Clone, Debug)]
pub struct Vector(pub(crate) Vec<f32>);

/// A matrix `[out, cols]` in panels: `[ceil(out / 16)][cols][16]`, the lanes past `out` zero.
#[derive(Clone, Debug)]
pub struct Weight {
    pub(crate) out: usize,
    pub(crate) cols: usize,
    pub(crate) panels: Panels,
}

/// Panel values in the type the checkpoint stores.
#[derive(Clone, Debug)]
pub(crate) enum Panels {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    F16(Vec<u16>),
    Fp8 {
        codes: Vec<u8>,
        /// `[panel][column block][lane]`: the scale of every lane, so that a block of rows may end inside a panel.
        scales: Vec<f32>,
        block_cols: usize,
    },
}

impl Weight {
    /// Packs a stored matrix.
    pub(crate) fn pack(matrix: MatrixView<'_>) -> Result<Self, KernelError> {
        let (out, cols) = (matrix.rows, matrix.cols);
        if let MatrixData::MadeUp { seed, blocks } = matrix.data {
            return Self::made_up(out, cols, seed, blocks);
        }
        let panels = match matrix.data {
            MatrixData::F32(bytes) => {
                check("f32 matrix", out, cols, 4, bytes.len())?;
                Panels::F32(panel(bytes, out, cols, f32::from_le_bytes))
            }
            MatrixData::Bf16(bytes) => {
                check("bf16 matrix", out, cols, 2, bytes.len())?;
                Panels::Bf16(panel(bytes, out, cols, u16::from_le_bytes))
            }
            MatrixData::F16(bytes) => {
                check("f16 matrix", out, cols, 2, bytes.len())?;
                Panels::F16(panel(bytes, out, cols, u16::from_le_bytes))
            }
            MatrixData::MadeUp { .. } => unreachable!("made up above"),
            MatrixData::Fp8Block { codes, scales, block_rows, block_cols } => {
                check("fp8 matrix", out, cols, 1, codes.len())?;
                if block_rows == 0 || block_cols == 0 {
                    return Err(KernelError::Shape {
                        what: "fp8 scale block",
                        expected: "at least 1 x 1".to_owned(),
                        found: format!("{block_rows} x {block_cols}"),
                    });
                }
                let (high, wide) = (out.div_ceil(block_rows), cols.div_ceil(block_cols));
                check("fp8 scales", high, wide, 4, scales.len())?;
                let grid: Vec<f32> = words(scales).map(f32::from_le_bytes).collect();
                let mut spread = vec![0.0; out.div_ceil(LANES) * wide * LANES];
                for row in 0..out {
                    for block in 0..wide {
                        let at = (row / LANES * wide + block) * LANES + row % LANES;
                        spread[at] = grid[row / block_rows * wide + block];
                    }
                }
                Panels::Fp8 {
                    codes: panel(codes, out, cols, |[b]: [u8; 1]| b),
                    scales: spread,
                    block_cols,
                }
            }
        };
        Ok(Self { out, cols, panels })
    }

    /// Draws values about `1 / sqrt(cols)` in size.
    fn made_up(
        rows: usize,
        cols: usize,
        seed: u64,
        blocks: Option<(usize, usize)>,
    ) -> Result<Self, KernelError> {
        let mut values = vec![0.0; rows * cols];
        made_up(seed, &mut values);
        let size = (3.0 / cols.max(1) as f32).sqrt();
        let view = |data| Self::pack(MatrixView { rows, cols, data });
        let Some((block_rows, block_cols)) = blocks else {
            let bytes: Vec<u8> =
                values.iter().flat_map(|v| bf16::from_f32(v * size).to_le_bytes()).collect();
            return view(MatrixData::Bf16(&bytes));
        };
        // Sign and mantissa of the value, an exponent near that of one: never the code of a NaN.
        let code = |v: &f32| (v.to_bits() >> 24 & 0x80 | 6 << 3 | v.to_bits() >> 20 & 7) as u8;
        let codes: Vec<u8> = values.iter().map(code).collect();
        let grid = rows.div_ceil(block_rows.max(1)) * cols.div_ceil(block_cols.max(1));
        let scales: Vec<u8> = size.to_le_bytes().repeat(grid);
        view(MatrixData::Fp8Block { codes: &codes, scales: &scales, block_rows, block_cols })
    }

    /// Packs f32 values given by `(row, column)`.
    pub(crate) fn from_fn(out: usize, cols: usize, value: impl Fn(usize, usize) -> f32) -> Self {
        let mut data = vec![0.0; out.div_ceil(LANES) * cols * LANES];
        for row in 0..out {
            for col in 0..cols {
                data[index(row, col, cols)] = value(row, col);
            }
        }
        Self { out, cols, panels: Panels::F32(data) }
    }

    /// One value.
    pub(crate) fn get(&self, row: usize, col: usize) -> f32 {
        let at = index(row, col, self.cols);
        match &self.panels {
            Panels::F32(v) => v[at],
            Panels::Bf16(v) => bf16::from_bits(v[at]).to_f32(),
            Panels::F16(v) => f16::from_bits(v[at]).to_f32(),
            Panels::Fp8 { codes, scales, block_cols } => {
                let wide = self.cols.div_ceil(*block_cols);
                let scale = scales[(row / LANES * wide + col / block_cols) * LANES + row % LANES];
                E4M3[codes[at] as usize] * scale
            }
        }
    }
}

/// Draws values in (-1, 1).
pub(crate) fn made_up(seed: u64, values: &mut [f32]) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    for value in values {
        *value = (random.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0;
    }
}

/// Value of every `e4m3` code (finite variant: no infinities, `0x7f` and `0xff` are NaN).
pub(crate) static E4M3: [f32; 256] = e4m3_table();

const fn e4m3_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3) & 15, (code & 7) as f32);
        let mut value = if exponent == 0 { mantissa / 8.0 } else { 1.0 + mantissa / 8.0 };
        // 2^(exponent - 7), the subnormals sharing the exponent of the smallest normals.
        let power = if exponent == 0 { -6 } else { exponent as i32 - 7 };
        let mut step = 0;
        while step < power.unsigned_abs() {
            value = if power < 0 { value / 2.0 } else { value * 2.0 };
            step += 1;
        }
        if code & 127 == 127 {
            value = f32::NAN;
        }
        table[code] = if code >= 128 { -value } else { value };
        code += 1;
    }
    table
}

fn index(row: usize, col: usize, cols: usize) -> usize {
    (row / LANES * cols + col) * LANES + row % LANES
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.chunks_exact(N).map(|c| {
        let mut word = [0; N];
        word.copy_from_slice(c);
        word
    })
}

fn panel<const N: usize, T: Copy + Default>(
    bytes: &[u8],
    out: usize,
    cols: usize,
    read: impl Fn([u8; N]) -> T,
) -> Vec<T> {
    let mut data = vec![T::default(); out.div_ceil(LANES) * cols * LANES];
    for (at, word) in words(bytes).enumerate() {
        data[index(at / cols, at % cols, cols)] = read(word);
    }
    data
}

/// Checks that `found` bytes hold a `[rows, cols]` matrix of `size`-byte values.
pub(crate) fn check(
    what: &'static str,
    rows: usize,
    cols: usize,
    size: usize,
    found: usize,
) -> Result<(), KernelError> {
    if rows.checked_mul(cols).and_then(|n| n.checked_mul(size)) == Some(found) {
        return Ok(());
    }
    Err(KernelError::Shape {
        what,
        expected: format!("{rows} x {cols} values of {size} bytes"),
        found: format!("{found} bytes"),
    })
}
