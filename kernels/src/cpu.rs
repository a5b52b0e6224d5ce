//! The CPU backend: f32 activations, weights in their stored type, one fixed order of every sum.
//!
//! Operations fan out over an own pool of threads only when there is enough work to pay for waking it.

mod attention;
mod cache;
mod ceiling;
mod experts;
mod gemm;
mod index;
mod norms;
mod rope;
mod router;
mod simd;
mod team;
mod tensor;
#[cfg(test)]
mod tests;
mod topk;

use std::sync::atomic::{AtomicU64, Ordering};

pub use attention::Absorbed;
pub use cache::{IndexCache, LatentCache};
pub use ceiling::Ceiling;
pub use experts::Experts;
pub use index::Selection;
pub use router::Routes;
use team::Team;
pub use tensor::{Tensor, Vector, Weight};

use crate::backend::{
    Backend, Dtype, ExpertMatrices, IndexParams, KernelError, MatrixView, RopeLayout, RopeTable,
    RouterParams,
};
use crate::batch::Batch;
use crate::sampling::{self, SampleRequest, Sampled, ScoreRequest, Scored};

/// How the CPU backend runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads of the pool; the processors this process may use when absent.
    pub threads: Option<usize>,
}

/// The [`Backend`] of the CPU.
#[derive(Debug)]
pub struct CpuBackend {
    team: Team,
    nan: AtomicU64,
}

impl CpuBackend {
    /// Starts the threads.
    ///
    /// # Errors
    /// When `threads` is 0 or the threads cannot be started.
    pub fn new(options: CpuOptions) -> Result<Self, KernelError> {
        Ok(Self { team: Team::new(options.threads)?, nan: AtomicU64::new(0) })
    }

    /// Threads of the pool.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.team.threads()
    }
}

fn expect_shape(
    what: &'static str,
    matrix: &MatrixView<'_>,
    rows: usize,
    cols: usize,
) -> Result<(), KernelError> {
    if (matrix.rows, matrix.cols) == (rows, cols) {
        return Ok(());
    }
    Err(KernelError::Shape {
        what,
        expected: format!("{rows} x {cols}"),
        found: format!("{} x {}", matrix.rows, matrix.cols),
    })
}

impl Backend for CpuBackend {
    type Tensor = Tensor;
    type Weight = Weight;
    type Vector = Vector;
    type Absorbed = Absorbed;
    type Experts = Experts;
    type Routes = Routes;
    type LatentCache = LatentCache;
    type IndexCache = IndexCache;
    type Selection = Selection;
    type Placed = Batch;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn within<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.team.awake(work)
    }

    fn place(&self, batch: &Batch) -> Batch {
        batch.clone()
    }

    fn weight(&self, matrix: MatrixView<'_>) -> Result<Weight, KernelError> {
        Weight::pack(matrix)
    }

    fn vector(&self, values: &[f32]) -> Result<Vector, KernelError> {
        Ok(Vector(values.to_vec()))
    }

    fn absorbed(
        &self,
        kv_b: MatrixView<'_>,
        heads: usize,
        nope: usize,
        value: usize,
    ) -> Result<Absorbed, KernelError> {
        let per_head = nope + value;
        expect_shape("kv_b_proj", &kv_b, heads * per_head, kv_b.cols)?;
        let latent = kv_b.cols;
        let whole = Weight::pack(kv_b)?;
        let into = |h: usize| Weight::from_fn(latent, nope, |l, n| whole.get(h * per_head + n, l));
        let out =
            |h: usize| Weight::from_fn(value, latent, |v, l| whole.get(h * per_head + nope + v, l));
        Ok(Absorbed {
            nope,
            value,
            latent,
            into: (0..heads).map(into).collect(),
            out: (0..heads).map(out).collect(),
        })
    }

    fn experts(&self, experts: &[ExpertMatrices<'_>]) -> Result<Experts, KernelError> {
        let Some(first) = experts.first() else { return Ok(Experts(Vec::new())) };
        let (width, hidden) = (first.gate.rows, first.gate.cols);
        let pack = |e: &ExpertMatrices<'_>| {
            expect_shape("expert gate_proj", &e.gate, width, hidden)?;
            expect_shape("expert up_proj", &e.up, width, hidden)?;
            expect_shape("expert down_proj", &e.down, hidden, width)?;
            Ok(experts::Expert {
                gate: Weight::pack(e.gate)?,
                up: Weight::pack(e.up)?,
                down: Weight::pack(e.down)?,
            })
        };
        experts.iter().map(pack).collect::<Result<_, _>>().map(Experts)
    }

    fn latent_cache(
        &self,
        blocks: usize,
        block_size: usize,
        latent: usize,
        rope: usize,
    ) -> Result<LatentCache, KernelError> {
        let width = latent + rope;
        let data = cache::slots("latent cache", blocks, block_size, width)?;
        Ok(LatentCache { latent, width, data })
    }

    fn index_cache(
        &self,
        blocks: usize,
        block_size: usize,
        head_dim: usize,
    ) -> Result<IndexCache, KernelError> {
        let data = cache::slots("index cache", blocks, block_size, head_dim)?;
        Ok(IndexCache { width: head_dim, data })
    }

    fn make_up_latents(&self, cache: &mut LatentCache, seed: u64) {
        tensor::made_up(seed, &mut cache.data);
    }

    fn make_up_index_keys(&self, cache: &mut IndexCache, seed: u64) {
        tensor::made_up(seed, &mut cache.data);
    }

    fn embed(&self, table: &Weight, ids: &[u32], padding: usize) -> Tensor {
        let mut out = Tensor::zeros(ids.len() + padding, table.cols);
        for (row, id) in out.data.chunks_exact_mut(table.cols.max(1)).zip(ids) {
            for (col, value) in row.iter_mut().enumerate() {
                *value = table.get(*id as usize, col);
            }
        }
        out
    }

    fn rms_norm(&self, x: &Tensor, weight: &Vector, eps: f32) -> Tensor {
        let mut out = Tensor::zeros(x.rows, x.width);
        for (row, to) in out.data.chunks_exact_mut(x.width.max(1)).enumerate() {
            norms::rms(x.row(row), &weight.0, eps, to);
        }
        out
    }

    fn add(&self, hidden: &mut Tensor, delta: &Tensor, dtype: Dtype) {
        self.accumulate(hidden, delta);
        hidden.round(dtype);
    }

    fn linear(&self, weight: &Weight, x: &Tensor) -> Tensor {
        gemm::linear(&self.team, weight, x)
    }

    fn linear_f32(&self, weight: &Weight, x: &Tensor) -> Tensor {
        self.linear(weight, x)
    }

    fn rope(
        &self,
        x: &mut Tensor,
        batch: &Batch,
        rope: &RopeTable,
        layout: RopeLayout,
        heads: usize,
        head_dim: usize,
        offset: usize,
    ) {
        if x.width == 0 {
            return;
        }
        for ((_, position), row) in batch.positions().zip(x.data.chunks_exact_mut(x.width)) {
            let angles = rope::Angles::new(rope, position);
            for head in row.chunks_exact_mut(head_dim).take(heads) {
                angles.rotate(&mut head[offset..], layout);
            }
        }
    }

    fn write_latent(
        &self,
        cache: &mut LatentCache,
        batch: &Batch,
        kv: &Tensor,
        norm: &Vector,
        eps: f32,
        rope: &RopeTable,
    ) {
        let (latent, width) = (cache.latent, cache.width);
        for (row, (segment, position)) in batch.positions().enumerate() {
            let slot = segment.slot(position, batch.block_size);
            let to = &mut cache.data[slot * width..(slot + 1) * width];
            let (c, key) = to.split_at_mut(latent);
            let (raw, raw_key) = kv.row(row).split_at(latent);
            norms::rms(raw, &norm.0, eps, c);
            key.copy_from_slice(raw_key);
            rope::Angles::new(rope, position).rotate(key, RopeLayout::Interleaved);
        }
    }

    fn write_index_key(
        &self,
        cache: &mut IndexCache,
        batch: &Batch,
        keys: &Tensor,
        norm_weight: &Vector,
        norm_bias: &Vector,
        eps: f32,
        rope: &RopeTable,
        layout: RopeLayout,
    ) {
        let width = cache.width;
        for (row, (segment, position)) in batch.positions().enumerate() {
            let slot = segment.slot(position, batch.block_size);
            let to = &mut cache.data[slot * width..(slot + 1) * width];
            norms::layer(keys.row(row), &norm_weight.0, &norm_bias.0, eps, to);
            rope::Angles::new(rope, position).rotate(to, layout);
        }
    }

    fn select(
        &self,
        cache: &IndexCache,
        batch: &Batch,
        queries: &Tensor,
        weights: &Tensor,
        params: &IndexParams,
    ) -> Selection {
        index::select(&self.team, &self.nan, cache, batch, queries, weights, params)
    }

    fn sparse_attention(
        &self,
        cache: &LatentCache,
        batch: &Batch,
        queries: &Tensor,
        absorbed: &Absorbed,
        selection: &Selection,
        scale: f32,
    ) -> Tensor {
        attention::attend(&self.team, cache, batch, queries, absorbed, selection, scale)
    }

    fn swiglu(&self, gate: &Weight, up: &Weight, down: &Weight, x: &Tensor) -> Tensor {
        self.linear(down, &gemm::gated(&self.team, gate, up, x))
    }

    fn route(&self, gate: &Weight, bias: &Vector, x: &Tensor, params: &RouterParams) -> Routes {
        router::route(&self.linear(gate, x), &bias.0, params)
    }

    fn run_experts(&self, experts: &Experts, routes: &Routes, x: &Tensor) -> Tensor {
        experts::run(&self.team, experts, routes, x)
    }

    fn accumulate(&self, a: &mut Tensor, b: &Tensor) {
        a.data.iter_mut().zip(&b.data).for_each(|(a, b)| *a += b);
    }

    fn gather(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        let data = rows.iter().flat_map(|r| x.row(*r)).copied().collect();
        Tensor { rows: rows.len(), width: x.width, data }
    }

    fn sample(&self, logits: &Tensor, requests: &[SampleRequest]) -> Vec<Sampled> {
        requests.iter().map(|r| sampling::sample(logits.row(r.row), r)).collect()
    }

    fn score(&self, logits: &Tensor, requests: &[ScoreRequest]) -> Vec<Scored> {
        requests.iter().map(|r| sampling::score(logits.row(r.row), r)).collect()
    }

    fn shape(&self, x: &Tensor) -> (usize, usize) {
        (x.rows, x.width)
    }

    fn export(&self, x: &Tensor, dtype: Dtype) -> Vec<u8> {
        x.to_bytes(dtype)
    }

    fn import(&self, bytes: &[u8], rows: usize, width: usize, dtype: Dtype) -> Tensor {
        Tensor::from_bytes(bytes, rows, width, dtype)
    }

    fn export_selection(&self, selection: &Selection, rows: &[usize]) -> Vec<i32> {
        selection.export(rows)
    }

    fn import_selection(&self, batch: &Batch, topk: usize, long_rows: &[i32]) -> Selection {
        Selection::import(batch, topk, long_rows)
    }

    fn nan_scores(&self) -> u64 {
        self.nan.load(Ordering::Relaxed)
    }
}
