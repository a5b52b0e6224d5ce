//! Absorbed multi-query attention over selected slots.

use rayon::prelude::*;

use super::cache::LatentCache;
use super::gemm::{Left, Product, Right, linear_into};
use super::index::{Chosen, Selection, pack_heads};
use super::simd::{Kernel, Lane, dispatch, exp};
use super::team::Team;
use super::tensor::{LANES, Tensor, Weight};
use crate::batch::{Batch, Segment};

/// `kv_b_proj` split per head.
#[derive(Clone, Debug)]
pub struct Absorbed {
    pub(crate) nope: usize,
    pub(crate) value: usize,
    pub(crate) latent: usize,
    /// Per head `[latent, nope]`: the query's way into the latent space.
    pub(crate) into: Vec<Weight>,
    /// Per head `[value, latent]`: the way out.
    pub(crate) out: Vec<Weight>,
}

/// Working memory of one thread.
#[derive(Default)]
struct Scratch {
    /// Selected slots' values, `[selected, width]`, and room for a last panel to read past the end.
    rows: Vec<f32>,
    /// Segment whose first `held` positions `rows` holds.
    held: usize,
    segment: Option<usize>,
    probs: Vec<f32>,
}

/// Attention of every row of a step.
pub(crate) fn attend(
    team: &Team,
    cache: &LatentCache,
    batch: &Batch,
    queries: &Tensor,
    absorbed: &Absorbed,
    selection: &Selection,
    scale: f32,
) -> Tensor {
    let heads = absorbed.into.len();
    let mut out = Tensor::zeros(queries.rows, heads * absorbed.value);
    let places: Vec<(usize, &Segment)> = batch
        .segments
        .iter()
        .enumerate()
        .flat_map(|(at, s)| std::iter::repeat_n((at, s), s.rows))
        .collect();
    if places.is_empty() || out.width == 0 {
        return out;
    }
    let selected: usize = selection.rows.iter().map(Chosen::len).sum();
    let per_row = absorbed.latent * (absorbed.nope + absorbed.value);
    let work = heads * (2 * selected * cache.width + queries.rows * per_row);
    let threads = team.parts(work);
    let task = |(first, out): (usize, &mut [f32])| {
        let chunk = Chunk { cache, batch, queries, absorbed, selection, scale };
        chunk.run(first, &places, out);
    };
    let width = out.width;
    if threads == 1 || places.len() < 2 {
        task((0, &mut out.data));
    } else {
        // Later rows of a segment attend to more, so there are more chunks than threads.
        let rows = places.len().div_ceil(threads * 4).max(1);
        team.install(|| {
            out.data
                .par_chunks_mut(rows * width)
                .enumerate()
                .for_each(|(at, out)| task((at * rows, out)));
        });
    }
    out
}

struct Chunk<'a> {
    cache: &'a LatentCache,
    batch: &'a Batch,
    queries: &'a Tensor,
    absorbed: &'a Absorbed,
    selection: &'a Selection,
    scale: f32,
}

impl Chunk<'_> {
    /// Rows `first ..` as far as `out` reaches.
    fn run(&self, first: usize, places: &[(usize, &Segment)], out: &mut [f32]) {
        let a = self.absorbed;
        let heads = a.into.len();
        let (width, latent) = (self.cache.width, a.latent);
        let rope = width - latent;
        let head = a.nope + rope;
        let out_width = heads * a.value;
        let rows = (out.len() / out_width).min(places.len().saturating_sub(first));
        if rows == 0 {
            return;
        }
        // Every head's query in the latent space beside its rotated part.
        let mut q = vec![0.0; rows * heads * width];
        let stride = heads * width;
        for (h, into) in a.into.iter().enumerate() {
            let from = &self.queries.data[first * self.queries.width + h * head..];
            linear_into(into, from, self.queries.width, rows, &mut q[h * width..], stride);
        }
        for r in 0..rows {
            let from = self.queries.row(first + r);
            for h in 0..heads {
                q[r * stride + h * width + latent..][..rope]
                    .copy_from_slice(&from[h * head + a.nope..][..rope]);
            }
        }
        let mut mixed = vec![0.0; rows * heads * latent];
        let mut scratch = Scratch::default();
        for r in 0..rows {
            let (at, segment) = places[first + r];
            let count = self.gather(&mut scratch, at, segment, &self.selection.rows[first + r]);
            let mixed = &mut mixed[r * heads * latent..][..heads * latent];
            self.mix(&mut scratch, count, &q[r * stride..][..stride], mixed);
        }
        for (h, weight) in a.out.iter().enumerate() {
            let from = &mixed[h * latent..];
            linear_into(weight, from, heads * latent, rows, &mut out[h * a.value..], out_width);
        }
    }

    /// Fills `scratch.rows` with the chosen slots' values; returns how many there are.
    fn gather(
        &self,
        scratch: &mut Scratch,
        at: usize,
        segment: &Segment,
        chosen: &Chosen,
    ) -> usize {
        let width = self.cache.width;
        let copy = |rows: &mut Vec<f32>, to: usize, position: usize| {
            let slot = segment.slot(position, self.batch.block_size);
            rows[to * width..(to + 1) * width]
                .copy_from_slice(&self.cache.data[slot * width..(slot + 1) * width]);
        };
        let count = chosen.len();
        if scratch.rows.len() < count * width + LANES {
            scratch.rows.resize((count * width + LANES).next_power_of_two(), 0.0);
        }
        match chosen {
            Chosen::Nothing => {}
            Chosen::First(n) => {
                // The next row of a segment needs one position more than the last.
                let held = if scratch.segment == Some(at) { scratch.held } else { 0 };
                for position in held..*n {
                    copy(&mut scratch.rows, position, position);
                }
                scratch.segment = Some(at);
                scratch.held = held.max(*n);
            }
            Chosen::These(list) => {
                scratch.segment = None;
                for (to, position) in list.iter().enumerate() {
                    copy(&mut scratch.rows, to, *position as usize);
                }
            }
        }
        count
    }

    /// Softmax-weighted sums of the gathered latents, `[heads, latent]`.
    fn mix(&self, scratch: &mut Scratch, count: usize, q: &[f32], mixed: &mut [f32]) {
        if count == 0 {
            return;
        }
        let (width, latent) = (self.cache.width, self.absorbed.latent);
        let heads = self.absorbed.into.len();
        let lanes = heads.next_multiple_of(LANES);
        let packed = pack_heads(q, heads, width, width);
        scratch.probs.resize(count * lanes, 0.0);
        dispatch(Product {
            left: Left { data: &scratch.rows, row: width, step: 1 },
            right: Right { data: &packed, panel: width * LANES, step: LANES },
            rows: count,
            inner: width,
            cols: lanes,
            out: &mut scratch.probs,
            stride: lanes,
            resume: false,
        });
        dispatch(Softmax { logits: &mut scratch.probs, heads: lanes, scale: self.scale });
        dispatch(Product {
            left: Left { data: &scratch.probs, row: 1, step: lanes },
            right: Right { data: &scratch.rows, panel: LANES, step: width },
            rows: heads,
            inner: count,
            cols: latent,
            out: mixed,
            stride: latent,
            resume: false,
        });
    }
}

/// Softmax over the rows of `[selected, heads]`, one column at a time, sixteen columns side by side.
struct Softmax<'a> {
    logits: &'a mut [f32],
    heads: usize,
    scale: f32,
}

impl Kernel for Softmax<'_> {
    #[inline(always)]
    fn run<L: Lane>(self) {
        for panel in (0..self.heads).step_by(LANES) {
            let mut max = [f32::NEG_INFINITY; LANES];
            for row in self.logits.chunks_exact_mut(self.heads) {
                for (max, logit) in max.iter_mut().zip(&mut row[panel..panel + LANES]) {
                    *logit *= self.scale;
                    *max = if *logit > *max { *logit } else { *max };
                }
            }
            let mut sum = [0.0_f32; LANES];
            for row in self.logits.chunks_exact_mut(self.heads) {
                let row = &mut row[panel..panel + LANES];
                for ((sum, logit), max) in sum.iter_mut().zip(row).zip(max) {
                    *logit = exp(*logit - max);
                    *sum += *logit;
                }
            }
            let inverse = sum.map(|s| 1.0 / s);
            for row in self.logits.chunks_exact_mut(self.heads) {
                for (prob, inverse) in row[panel..panel + LANES].iter_mut().zip(inverse) {
                    *prob *= inverse;
                }
            }
        }
    }
}
