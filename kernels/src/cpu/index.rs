//! The indexer: scores of every earlier position and the rows that come of them.

use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::cache::IndexCache;
use super::gemm::{Left, PARALLEL_WORK, Product, Right};
use super::simd::dispatch;
use super::tensor::{LANES, Tensor};
use super::topk::top_k;
use crate::backend::IndexParams;
use crate::batch::{Batch, Segment};

/// Positions every row of a step attends to.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    pub(crate) topk: usize,
    pub(crate) rows: Vec<Chosen>,
}

/// Positions one row attends to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Chosen {
    /// None: a padding row.
    Nothing,
    /// The first so many positions.
    First(usize),
    /// These, ascending.
    These(Vec<u32>),
}

impl Chosen {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::First(n) => *n,
            Self::These(list) => list.len(),
        }
    }
}

impl Selection {
    /// `[rows.len(), topk]`, -1 after the last.
    pub(crate) fn export(&self, rows: &[usize]) -> Vec<i32> {
        let mut out = vec![-1; rows.len() * self.topk];
        for (out, row) in out.chunks_exact_mut(self.topk.max(1)).zip(rows) {
            match &self.rows[*row] {
                Chosen::Nothing => {}
                Chosen::First(n) => {
                    out.iter_mut().zip(0..*n as i32).for_each(|(out, p)| *out = p);
                }
                Chosen::These(list) => {
                    out.iter_mut().zip(list).for_each(|(out, p)| *out = *p as i32);
                }
            }
        }
        out
    }

    /// Rows of `batch` from those of its long rows.
    pub(crate) fn import(batch: &Batch, topk: usize, long_rows: &[i32]) -> Self {
        let mut lists = long_rows.chunks_exact(topk.max(1));
        let mut rows = Vec::with_capacity(batch.rows());
        for (_, position) in batch.positions() {
            rows.push(if position < topk {
                Chosen::First(position + 1)
            } else {
                let list = lists.next().unwrap_or_default();
                Chosen::These(list.iter().map_while(|p| u32::try_from(*p).ok()).collect())
            });
        }
        rows.resize(batch.rows(), Chosen::Nothing);
        Self { topk, rows }
    }
}

/// Scores and chooses for every row of a step.
pub(crate) fn select(
    pool: &rayon::ThreadPool,
    nan: &AtomicU64,
    cache: &IndexCache,
    batch: &Batch,
    queries: &Tensor,
    weights: &Tensor,
    params: &IndexParams,
) -> Selection {
    let mut work = 0;
    let real: Vec<(&Segment, usize)> = batch.positions().collect();
    for (_, position) in &real {
        if *position >= params.topk {
            work += (position + 1) * params.heads * params.head_dim;
        }
    }
    let choose = |(row, (segment, position)): (usize, &(&Segment, usize))| {
        if *position < params.topk {
            return Chosen::First(position + 1);
        }
        let mut scores = Vec::with_capacity(position + 1);
        let q = queries.row(row);
        score(cache, batch, segment, *position, q, weights.row(row), params, &mut scores);
        let bad = scores.iter().filter(|s| s.is_nan()).count();
        if bad > 0 {
            nan.fetch_add(bad as u64, Ordering::Relaxed);
        }
        let mut list = Vec::with_capacity(params.topk);
        top_k(&scores, params.topk, &mut Vec::new(), &mut list);
        Chosen::These(list)
    };
    let mut rows: Vec<Chosen> = if real.len() < 2 || work < PARALLEL_WORK {
        real.iter().enumerate().map(choose).collect()
    } else {
        pool.install(|| real.par_iter().enumerate().map(choose).collect())
    };
    rows.resize(batch.rows(), Chosen::Nothing);
    Selection { topk: params.topk, rows }
}

#[allow(clippy::too_many_arguments)]
fn score(
    cache: &IndexCache,
    batch: &Batch,
    segment: &Segment,
    position: usize,
    query: &[f32],
    weights: &[f32],
    params: &IndexParams,
    scores: &mut Vec<f32>,
) {
    let (dim, panels) = (params.head_dim, params.heads.div_ceil(LANES));
    let scale = 1.0 / (dim as f32).sqrt();
    let spread = 1.0 / (params.heads as f32).sqrt();
    let packed = pack_heads(query, params.heads, dim, dim);
    let mut factors = vec![0.0; panels * LANES];
    factors.iter_mut().zip(weights).for_each(|(f, w)| *f = w * spread);
    let mut dots = vec![0.0; batch.block_size * panels * LANES];
    let mut first = 0;
    while first <= position {
        let count = batch.block_size.min(position + 1 - first);
        let slot = segment.slot(first, batch.block_size);
        dispatch(Product {
            left: Left { data: &cache.data[slot * dim..], row: dim, step: 1 },
            right: Right { data: &packed, panel: dim * LANES, step: LANES },
            rows: count,
            inner: dim,
            cols: panels * LANES,
            out: &mut dots,
            stride: panels * LANES,
            resume: false,
        });
        for dots in dots.chunks_exact(panels * LANES).take(count) {
            let mut lanes = [0.0_f32; LANES];
            for (dots, factors) in dots.chunks_exact(LANES).zip(factors.chunks_exact(LANES)) {
                for ((lane, dot), factor) in lanes.iter_mut().zip(dots).zip(factors) {
                    let dot = dot * scale;
                    // Not `max`, which would hide a NaN.
                    *lane += factor * if dot < 0.0 { 0.0 } else { dot };
                }
            }
            scores.push(lanes.iter().sum());
        }
        first += count;
    }
}

/// Heads of one row as panels `[ceil(heads / 16)][take][16]`, from the first `take` of every `width` values.
pub(crate) fn pack_heads(query: &[f32], heads: usize, width: usize, take: usize) -> Vec<f32> {
    let mut packed = vec![0.0; heads.div_ceil(LANES) * take * LANES];
    for (head, values) in query.chunks_exact(width).enumerate().take(heads) {
        let base = head / LANES * take * LANES + head % LANES;
        for (k, value) in values[..take].iter().enumerate() {
            packed[base + k * LANES] = *value;
        }
    }
    packed
}
