//! Matrix products. Every output element is one chain of fused multiply-adds over the inner dimension in ascending
//! order, whatever the number of rows, the tiling or the threads.

use half::f16;
use rayon::prelude::*;

use super::simd::{Kernel, Lane, dispatch, exp};
use super::team::Team;
use super::tensor::{E4M3, LANES, Panels, Tensor, Weight};

/// Inner steps decoded at a time; eight panels of them fit the first-level cache.
const DECODE: usize = 64;
/// Panels decoded at a time.
const WIDE: usize = 8;

/// `[panels]` of sixteen f32 per inner step: panel `p`, step `k` lies at `p * panel + k * step`.
#[derive(Clone, Copy)]
pub(crate) struct Right<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) panel: usize,
    pub(crate) step: usize,
}

/// The other operand: row `r`, step `k` lies at `r * row + k * step`.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) row: usize,
    pub(crate) step: usize,
}

/// `out[r * stride + c] (+)= sum_k left[r, k] * right[k, c]` for `c < cols`.
pub(crate) struct Product<'a> {
    pub(crate) left: Left<'a>,
    pub(crate) right: Right<'a>,
    pub(crate) rows: usize,
    pub(crate) inner: usize,
    pub(crate) cols: usize,
    pub(crate) out: &'a mut [f32],
    pub(crate) stride: usize,
    /// Continue the chains from what `out` holds.
    pub(crate) resume: bool,
}

impl Kernel for Product<'_> {
    #[inline(always)]
    fn run<L: Lane>(mut self) {
        let mut row = 0;
        while self.rows - row >= 8 {
            let done = sweep::<L, 8, 2>(&mut self, row, 0);
            sweep::<L, 8, 1>(&mut self, row, done);
            row += 8;
        }
        if self.rows - row >= 4 {
            let done = sweep::<L, 4, 4>(&mut self, row, 0);
            let done = sweep::<L, 4, 2>(&mut self, row, done);
            sweep::<L, 4, 1>(&mut self, row, done);
            row += 4;
        }
        if self.rows - row >= 2 {
            let done = sweep::<L, 2, 4>(&mut self, row, 0);
            let done = sweep::<L, 2, 2>(&mut self, row, done);
            sweep::<L, 2, 1>(&mut self, row, done);
            row += 2;
        }
        if row < self.rows {
            let done = sweep::<L, 1, 8>(&mut self, row, 0);
            let done = sweep::<L, 1, 4>(&mut self, row, done);
            let done = sweep::<L, 1, 2>(&mut self, row, done);
            sweep::<L, 1, 1>(&mut self, row, done);
        }
    }
}

/// Rows `row .. row + R` against panels `panel ..`, `P` at a time; the first panel that is left over.
#[inline(always)]
fn sweep<L: Lane, const R: usize, const P: usize>(
    product: &mut Product<'_>,
    row: usize,
    mut panel: usize,
) -> usize {
    let panels = product.cols.div_ceil(LANES);
    while panels - panel >= P {
        tile::<L, R, P>(product, row, panel);
        panel += P;
    }
    panel
}

#[inline(always)]
fn tile<L: Lane, const R: usize, const P: usize>(p: &mut Product<'_>, row: usize, panel: usize) {
    let mut acc = [[L::splat(0.0); P]; R];
    if p.resume {
        for (r, acc) in acc.iter_mut().enumerate() {
            for (j, acc) in acc.iter_mut().enumerate() {
                let col = (panel + j) * LANES;
                let width = LANES.min(p.cols - col);
                let at = (row + r) * p.stride + col;
                let mut lanes = [0.0; LANES];
                lanes[..width].copy_from_slice(&p.out[at..at + width]);
                *acc = L::load(&lanes);
            }
        }
    }
    if p.inner > 0 {
        // Slices of exactly the length the loop reads: the bounds are checked here, not in the loop. Lanes are
        // handled in plain loops, because a closure is compiled without the instructions they need.
        let reach = (p.inner - 1) * p.left.step + 1;
        let mut left = [p.left.data; R];
        for (r, left) in left.iter_mut().enumerate() {
            *left = &left[(row + r) * p.left.row..][..reach];
        }
        let reach = (p.inner - 1) * p.right.step + LANES;
        let mut right = [p.right.data; P];
        for (j, right) in right.iter_mut().enumerate() {
            *right = &right[(panel + j) * p.right.panel..][..reach];
        }
        for k in 0..p.inner {
            let mut b = [L::splat(0.0); P];
            for (b, right) in b.iter_mut().zip(right) {
                *b = L::load(lanes(right, k * p.right.step));
            }
            for (acc, left) in acc.iter_mut().zip(left) {
                let a = L::splat(left[k * p.left.step]);
                for (acc, b) in acc.iter_mut().zip(b) {
                    *acc = acc.fma(a, b);
                }
            }
        }
    }
    for (r, acc) in acc.iter().enumerate() {
        for (j, acc) in acc.iter().enumerate() {
            let col = (panel + j) * LANES;
            let at = (row + r) * p.stride + col;
            let mut full = [0.0; LANES];
            acc.store(&mut full);
            let width = LANES.min(p.cols - col);
            p.out[at..at + width].copy_from_slice(&full[..width]);
        }
    }
}

#[inline(always)]
fn lanes(data: &[f32], at: usize) -> &[f32; LANES] {
    data[at..at + LANES].try_into().expect("the slice has sixteen values")
}

/// Panels `first ..` of `weight` against `rows` rows of `x`, written to `out` as `[rows, stride]` from column 0.
struct Linear<'a> {
    weight: &'a Weight,
    x: Left<'a>,
    rows: usize,
    first: usize,
    cols: usize,
    out: &'a mut [f32],
    stride: usize,
}

impl Kernel for Linear<'_> {
    #[inline(always)]
    fn run<L: Lane>(self) {
        let inner = self.weight.cols;
        if let Panels::F32(data) = &self.weight.panels {
            let data = &data[self.first * inner * LANES..];
            return Product {
                left: self.x,
                right: Right { data, panel: inner * LANES, step: LANES },
                rows: self.rows,
                inner,
                cols: self.cols,
                out: self.out,
                stride: self.stride,
                resume: false,
            }
            .run::<L>();
        }
        let mut decoded = [0.0; WIDE * DECODE * LANES];
        let panels = self.cols.div_ceil(LANES);
        for group in (0..panels).step_by(WIDE) {
            let wide = WIDE.min(panels - group);
            for start in (0..inner).step_by(DECODE) {
                let steps = DECODE.min(inner - start);
                for j in 0..wide {
                    let to = &mut decoded[j * DECODE * LANES..][..steps * LANES];
                    decode(self.weight, self.first + group + j, start, to);
                }
                Product {
                    left: Left { data: &self.x.data[start * self.x.step..], ..self.x },
                    right: Right { data: &decoded, panel: DECODE * LANES, step: LANES },
                    rows: self.rows,
                    inner: steps,
                    cols: (wide * LANES).min(self.cols - group * LANES),
                    out: &mut self.out[group * LANES..],
                    stride: self.stride,
                    resume: start > 0,
                }
                .run::<L>();
            }
        }
    }
}

/// Values of a panel from inner step `start` on.
#[inline(always)]
fn decode(weight: &Weight, panel: usize, start: usize, to: &mut [f32]) {
    let from = (panel * weight.cols + start) * LANES;
    match &weight.panels {
        Panels::F32(data) => to.copy_from_slice(&data[from..from + to.len()]),
        Panels::Bf16(data) => {
            for (to, bits) in to.iter_mut().zip(&data[from..]) {
                *to = f32::from_bits(u32::from(*bits) << 16);
            }
        }
        Panels::F16(data) => {
            for (to, bits) in to.iter_mut().zip(&data[from..]) {
                *to = f16::from_bits(*bits).to_f32();
            }
        }
        Panels::Fp8 { codes, scales, block_cols } => {
            let blocks = weight.cols.div_ceil(*block_cols);
            for (k, to) in to.chunks_exact_mut(LANES).enumerate() {
                let block = (start + k) / block_cols;
                let scales = lanes(scales, (panel * blocks + block) * LANES);
                let codes = &codes[from + k * LANES..][..LANES];
                for ((to, code), scale) in to.iter_mut().zip(codes).zip(scales) {
                    *to = E4M3[*code as usize] * scale;
                }
            }
        }
    }
}

/// `x W^T` of `rows` rows at stride `x_stride` on the calling thread, written at stride `stride`.
pub(crate) fn linear_into(
    weight: &Weight,
    x: &[f32],
    x_stride: usize,
    rows: usize,
    out: &mut [f32],
    stride: usize,
) {
    if rows == 0 {
        return; // A step without rows still passes through every stage.
    }
    let x = Left { data: x, row: x_stride, step: 1 };
    dispatch(Linear { weight, x, rows, first: 0, cols: weight.out, out, stride });
}

/// `x W^T`, on all threads when it is worth it.
pub(crate) fn linear(team: &Team, weight: &Weight, x: &Tensor) -> Tensor {
    assert_eq!(x.width, weight.cols, "the input is as wide as the weight's columns");
    let out_width = weight.out;
    let mut out = Tensor::zeros(x.rows, out_width);
    let threads = team.parts(x.rows * weight.cols * out_width);
    if threads == 1 {
        linear_into(weight, &x.data, x.width, x.rows, &mut out.data, out_width);
    } else if x.rows >= 16 * threads {
        let rows = x.rows.div_ceil(threads * 2).next_multiple_of(8);
        team.install(|| {
            out.data
                .par_chunks_mut(rows * out_width)
                .zip(x.data.par_chunks(rows * x.width))
                .for_each(|(out, x)| {
                    linear_into(weight, x, weight.cols, x.len() / weight.cols, out, out_width);
                });
        });
    } else {
        let share = out_width.div_ceil(LANES).div_ceil(threads) * LANES;
        let left = Left { data: &x.data, row: x.width, step: 1 };
        let part = |at: usize, cols: usize, out: &mut [f32]| {
            let first = at * share / LANES;
            dispatch(Linear { weight, x: left, rows: x.rows, first, cols, out, stride: cols });
        };
        if x.rows == 1 {
            team.install(|| {
                let shares = out.data.par_chunks_mut(share).enumerate();
                shares.for_each(|(at, out)| part(at, out.len(), out));
            });
            return out;
        }
        let shares = out_width.div_ceil(share);
        let parts: Vec<Vec<f32>> = team.install(|| {
            let one = |at: usize| {
                let cols = share.min(out_width - at * share);
                let mut out = vec![0.0; x.rows * cols];
                part(at, cols, &mut out);
                out
            };
            (0..shares).into_par_iter().map(one).collect()
        });
        for (row, out) in out.data.chunks_exact_mut(out_width).enumerate() {
            for (out, part) in out.chunks_mut(share).zip(&parts) {
                let cols = out.len();
                out.copy_from_slice(&part[row * cols..][..cols]);
            }
        }
    }
    out
}

/// `silu(gate x) * up x`. Of few rows, both projections are cut at the same columns and computed in one go.
pub(crate) fn gated(team: &Team, gate: &Weight, up: &Weight, x: &Tensor) -> Tensor {
    let threads = team.parts(2 * x.rows * gate.cols * gate.out);
    if threads == 1 || x.rows > 1 {
        let mut inner = linear(team, gate, x);
        let up = linear(team, up, x);
        dispatch(SiluMul { gate: &mut inner.data, up: &up.data });
        return inner;
    }
    let mut inner = Tensor::zeros(1, gate.out);
    let share = gate.out.div_ceil(LANES).div_ceil(threads) * LANES;
    let x = Left { data: &x.data, row: x.width, step: 1 };
    team.install(|| {
        inner.data.par_chunks_mut(share).enumerate().for_each(|(at, out)| {
            let (first, cols) = (at * share / LANES, out.len());
            let mut other = vec![0.0; cols];
            let part = |weight, out| Linear { weight, x, rows: 1, first, cols, out, stride: cols };
            dispatch(part(gate, out));
            dispatch(part(up, &mut other));
            dispatch(SiluMul { gate: out, up: &other });
        });
    });
    inner
}

/// `gate = silu(gate) * up`.
pub(crate) struct SiluMul<'a> {
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    #[inline(always)]
    fn run<L: Lane>(self) {
        for (gate, up) in self.gate.iter_mut().zip(self.up) {
            *gate = *gate / (1.0 + exp(-*gate)) * up;
        }
    }
}
