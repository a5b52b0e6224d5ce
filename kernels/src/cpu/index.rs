//! The indexer: scores of every earlier position and the rows that come of them.

use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::cache::IndexCache;
use super::simd::{Kernel, Lane, dispatch};
use super::team::Team;
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
    team: &Team,
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
    let spread = 1.0 / (params.heads as f32).sqrt();
    let choose = |(row, (segment, position)): (usize, &(&Segment, usize))| {
        if *position < params.topk {
            return Chosen::First(position + 1);
        }
        let mut scores = Vec::with_capacity(position + 1);
        let mut factors = vec![0.0; params.heads.next_multiple_of(LANES)];
        factors.iter_mut().zip(weights.row(row)).for_each(|(f, w)| *f = w * spread);
        dispatch(Score {
            cache,
            segment,
            block_size: batch.block_size,
            position: *position,
            queries: &pack_heads(queries.row(row), params.heads, cache.width, cache.width),
            factors: &factors,
            scores: &mut scores,
        });
        let bad = scores.iter().filter(|s| s.is_nan()).count();
        if bad > 0 {
            nan.fetch_add(bad as u64, Ordering::Relaxed);
        }
        let mut list = Vec::with_capacity(params.topk);
        top_k(&scores, params.topk, &mut Vec::new(), &mut list);
        Chosen::These(list)
    };
    let mut rows: Vec<Chosen> = if real.len() < 2 || team.parts(work) == 1 {
        real.iter().enumerate().map(choose).collect()
    } else {
        team.install(|| real.par_iter().enumerate().map(choose).collect())
    };
    rows.resize(batch.rows(), Chosen::Nothing);
    Selection { topk: params.topk, rows }
}

/// Positions scored side by side: enough chains to hide the latency of one.
const TOGETHER: usize = 8;

/// One row's scores of positions `0 ..= position`.
struct Score<'a> {
    cache: &'a IndexCache,
    segment: &'a Segment,
    block_size: usize,
    position: usize,
    /// Panels `[ceil(heads / 16)][dim][16]`.
    queries: &'a [f32],
    /// Head weights over the square root of the heads, zero past the last.
    factors: &'a [f32],
    scores: &'a mut Vec<f32>,
}

impl Kernel for Score<'_> {
    #[inline(always)]
    fn run<L: Lane>(self) {
        let dim = self.cache.width;
        let mut first = 0;
        while first <= self.position {
            let count = self.block_size.min(self.position + 1 - first);
            let slot = self.segment.slot(first, self.block_size);
            let keys = &self.cache.data[slot * dim..][..count * dim];
            let mut groups = keys.chunks_exact(TOGETHER * dim);
            for keys in &mut groups {
                self.scores.extend(score::<L, TOGETHER>(keys, dim, self.queries, self.factors));
            }
            for key in groups.remainder().chunks_exact(dim) {
                self.scores.extend(score::<L, 1>(key, dim, self.queries, self.factors));
            }
            first += count;
        }
    }
}

/// Scores of `N` keys `[N, dim]`.
#[inline(always)]
fn score<L: Lane, const N: usize>(
    keys: &[f32],
    dim: usize,
    queries: &[f32],
    factors: &[f32],
) -> [f32; N] {
    let scale = L::splat(1.0 / (dim as f32).sqrt());
    let mut sums = [L::splat(0.0); N];
    let panels = queries.chunks_exact(dim * LANES).zip(factors.as_chunks::<LANES>().0);
    for (queries, factors) in panels {
        let mut dots = [L::splat(0.0); N];
        for (k, query) in queries.as_chunks::<LANES>().0.iter().enumerate() {
            let query = L::load(query);
            for (n, dot) in dots.iter_mut().enumerate() {
                *dot = dot.fma(L::splat(keys[n * dim + k]), query);
            }
        }
        let factors = L::load(factors);
        for (sum, dot) in sums.iter_mut().zip(dots) {
            *sum = sum.fma(factors, dot.mul(scale).relu());
        }
    }
    let mut scores = [0.0; N];
    for (score, sum) in scores.iter_mut().zip(sums) {
        *score = sum.sum();
    }
    scores
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
