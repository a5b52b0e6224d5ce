//! The [`Backend`] trait and the plain types that cross it.
//!
//! Shapes are written `[rows, width]`, row-major. A *row* is one token of a step. Section numbers refer to the model
//! description in `docs/model.md`.

use thiserror::Error;

use crate::batch::Batch;
use crate::sampling::{SampleRequest, Sampled, ScoreRequest, Scored};

/// Storage type of a tensor on disk or on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

/// A matrix `[rows, cols]` as a checkpoint stores it, in the bytes of the file.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView<'a> {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// The stored values.
    pub data: MatrixData<'a>,
}

/// Stored values of a [`MatrixView`], row-major, little-endian, not necessarily aligned.
#[derive(Clone, Copy, Debug)]
pub enum MatrixData<'a> {
    /// 4 bytes each.
    F32(&'a [u8]),
    /// 2 bytes each.
    Bf16(&'a [u8]),
    /// 2 bytes each.
    F16(&'a [u8]),
    /// `e4m3` codes; value = code x scale of its block. Scales are little-endian f32,
    /// `[ceil(rows / block_rows), ceil(cols / block_cols)]`.
    Fp8Block {
        /// One byte each.
        codes: &'a [u8],
        /// 4 bytes each.
        scales: &'a [u8],
        /// Rows a scale covers.
        block_rows: usize,
        /// Columns a scale covers.
        block_cols: usize,
    },
    /// No stored values: the backend draws its own, about `1 / sqrt(cols)` in size, for measurements.
    MadeUp {
        /// The same seed gives the same values on one backend.
        seed: u64,
        /// Rows and columns of FP8 blocks; bf16 when absent.
        blocks: Option<(usize, usize)>,
    },
}

/// One expert's matrices: `gate` and `up` are `[width, hidden]`, `down` is `[hidden, width]`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertMatrices<'a> {
    /// The gated half.
    pub gate: MatrixView<'a>,
    /// The other half.
    pub up: MatrixView<'a>,
    /// The projection back.
    pub down: MatrixView<'a>,
}

/// How a rotated vector's pairs are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// Pairs are `(v[2i], v[2i + 1])`.
    Interleaved,
    /// Pairs are `(v[i], v[i + n / 2])`.
    HalfSplit,
}

/// Rotary frequencies of a model; the angle of pair `i` at position `p` is `p * inv_freq[i]`, in f32.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// One per pair.
    pub inv_freq: Vec<f32>,
    /// Factor on cos and sin (1 except for some yarn settings).
    pub magnitude: f32,
}

/// Sizes of the indexer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexParams {
    /// Index heads.
    pub heads: usize,
    /// Width of one.
    pub head_dim: usize,
    /// Positions a row may select.
    pub topk: usize,
}

/// How the router turns scores into experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterParams {
    /// Experts chosen per row.
    pub experts_per_token: usize,
    /// Groups the experts are split into.
    pub groups: usize,
    /// Groups that may be chosen from.
    pub topk_groups: usize,
    /// Divide the chosen scores by their sum.
    pub normalise: bool,
    /// Factor on the weights.
    pub scaling: f32,
}

/// What a backend can fail with. Shapes are checked when weights are made; steps do not fail on them.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A tensor does not have the size its place in the model needs.
    #[error("{what}: expected {expected}, found {found}")]
    Shape {
        /// The operand.
        what: &'static str,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// The device cannot hold it.
    #[error("{what} needs {needed} bytes, {available} are free")]
    OutOfMemory {
        /// What was to be allocated.
        what: &'static str,
        /// Bytes asked for.
        needed: u64,
        /// Bytes there were.
        available: u64,
    },
    /// The device reported an error.
    #[error("{device}: {message}")]
    Device {
        /// The device's name.
        device: String,
        /// What it said.
        message: String,
    },
}

/// The operations of the model on one device.
///
/// Every operation is *batch invariant* on the CPU: a row's result depends on that row, its sequence's cache and the
/// weights, never on which other rows share the step.
pub trait Backend: Send + Sync + Sized + 'static {
    /// Activations `[rows, width]` in the compute type.
    type Tensor: Send;
    /// A linear weight `[out, in]` in its stored form.
    type Weight: Send + Sync;
    /// A vector of f32 (norms, biases).
    type Vector: Send + Sync;
    /// Up- and down-projections of the latent, `kv_b_proj` split per head.
    type Absorbed: Send + Sync;
    /// All routed experts of a layer.
    type Experts: Send + Sync;
    /// Chosen experts and their weights, one set per row.
    type Routes: Send;
    /// Paged latent cache of one layer.
    type LatentCache: Send;
    /// Paged index-key cache of one full layer.
    type IndexCache: Send;
    /// Index rows of one step: for every row the positions it attends to, ascending.
    type Selection: Send;
    /// A step's rows where the operations need them: positions, slots and block tables on the device.
    type Placed: Send + Sync;

    /// Short name for logs and status: "cpu", "cuda".
    fn name(&self) -> &'static str;

    /// Runs the operations of one step. A backend of threads keeps them awake meanwhile; what `work` computes does not
    /// depend on being run here.
    fn within<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        work()
    }

    /// Brings a step's rows to the device, once for all layers.
    fn place(&self, batch: &Batch) -> Self::Placed;

    /// The first failure of an operation since the last call. Operations after a failure do nothing, so that a step is
    /// checked once, at its end; its results are not to be used when this fails.
    fn check(&self) -> Result<(), KernelError> {
        Ok(())
    }

    // ----- loading ---------------------------------------------------------------------------------------------------

    /// Takes over a matrix in its stored form.
    fn weight(&self, matrix: MatrixView<'_>) -> Result<Self::Weight, KernelError>;
    /// Takes over a vector.
    fn vector(&self, values: &[f32]) -> Result<Self::Vector, KernelError>;
    /// Splits `kv_b_proj` (`[heads * (nope + value), latent]`) per head. FP8 is dequantised before the split, because
    /// head boundaries need not fall on scale blocks.
    fn absorbed(
        &self,
        kv_b: MatrixView<'_>,
        heads: usize,
        nope: usize,
        value: usize,
    ) -> Result<Self::Absorbed, KernelError>;
    /// Takes over a layer's routed experts.
    fn experts(&self, experts: &[ExpertMatrices<'_>]) -> Result<Self::Experts, KernelError>;
    /// An empty latent cache of `blocks * block_size` slots of `latent + rope` values.
    fn latent_cache(
        &self,
        blocks: usize,
        block_size: usize,
        latent: usize,
        rope: usize,
    ) -> Result<Self::LatentCache, KernelError>;
    /// An empty index-key cache of `blocks * block_size` slots of `head_dim` values.
    fn index_cache(
        &self,
        blocks: usize,
        block_size: usize,
        head_dim: usize,
    ) -> Result<Self::IndexCache, KernelError>;

    /// Called once all weights are there: frees what only loading needs.
    fn loaded(&self) {}

    /// Fills a cache with made-up values, for measurements.
    fn make_up_latents(&self, cache: &mut Self::LatentCache, seed: u64);
    /// Fills a cache with made-up values, for measurements.
    fn make_up_index_keys(&self, cache: &mut Self::IndexCache, seed: u64);

    // ----- the residual stream ---------------------------------------------------------------------------------------

    /// Rows of the embedding table, `[ids, hidden]`; padding rows are zero.
    fn embed(&self, table: &Self::Weight, ids: &[u32], padding: usize) -> Self::Tensor;
    /// `x / sqrt(mean(x^2) + eps) * weight` over the last axis, in f32.
    fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Vector, eps: f32) -> Self::Tensor;
    /// `hidden += delta`, then rounds `hidden` to `dtype`. Rounding happens after every addition, so that the value that
    /// crosses a cut is the value an uncut model goes on with.
    fn add(&self, hidden: &mut Self::Tensor, delta: &Self::Tensor, dtype: Dtype);
    /// `x W^T`, `[rows, in] -> [rows, out]`.
    fn linear(&self, weight: &Self::Weight, x: &Self::Tensor) -> Self::Tensor;
    /// As [`Backend::linear`], with a result in f32 whatever the compute type: logits and index head weights, whose order
    /// a rounding would change.
    fn linear_f32(&self, weight: &Self::Weight, x: &Self::Tensor) -> Self::Tensor;

    // ----- attention -------------------------------------------------------------------------------------------------

    /// Rotates in place, at each row's position, `rope.inv_freq.len() * 2` values that start at `offset` in each of the
    /// `heads` heads of width `head_dim`.
    #[allow(clippy::too_many_arguments)]
    fn rope(
        &self,
        x: &mut Self::Tensor,
        batch: &Self::Placed,
        rope: &RopeTable,
        layout: RopeLayout,
        heads: usize,
        head_dim: usize,
        offset: usize,
    );
    /// `kv` is the raw output of `kv_a_proj_with_mqa`, `[rows, latent + rope]`. Normalises the latent, rotates the rope
    /// key (interleaved) and writes both to each row's slot.
    fn write_latent(
        &self,
        cache: &mut Self::LatentCache,
        batch: &Self::Placed,
        kv: &Self::Tensor,
        norm: &Self::Vector,
        eps: f32,
        rope: &RopeTable,
    );
    /// `keys` is the raw output of `indexer.wk`, `[rows, head_dim]`. LayerNorm (weight, bias, `eps`), rotation of the
    /// first `2 * inv_freq.len()` values, write to each row's slot.
    #[allow(clippy::too_many_arguments)]
    fn write_index_key(
        &self,
        cache: &mut Self::IndexCache,
        batch: &Self::Placed,
        keys: &Self::Tensor,
        norm_weight: &Self::Vector,
        norm_bias: &Self::Vector,
        eps: f32,
        rope: &RopeTable,
        layout: RopeLayout,
    );
    /// The indexer's choice: `score(t, s) = sum_h w[t,h] * relu(q[t,h] . k[s] * head_dim^-1/2)`, f32, for `s <= t`; the
    /// `topk` best by (higher score, then lower position), NaN last and -0 equal to +0. `queries` is
    /// `[rows, heads * head_dim]`, rotated; `weights` is `[rows, heads]`, not yet scaled by `heads^-1/2`.
    /// A row at position < `topk` selects everything without scoring; a padding row selects nothing.
    fn select(
        &self,
        cache: &Self::IndexCache,
        batch: &Self::Placed,
        queries: &Self::Tensor,
        weights: &Self::Tensor,
        params: &IndexParams,
    ) -> Self::Selection;
    /// Absorbed multi-query attention over the selected slots: `queries` `[rows, heads * (nope + rope)]` with the rope
    /// part rotated, result `[rows, heads * value]`. A row that selects nothing yields zeros.
    fn sparse_attention(
        &self,
        cache: &Self::LatentCache,
        batch: &Self::Placed,
        queries: &Self::Tensor,
        absorbed: &Self::Absorbed,
        selection: &Self::Selection,
        scale: f32,
    ) -> Self::Tensor;

    // ----- feed-forward ----------------------------------------------------------------------------------------------

    /// `down(silu(gate x) * up x)`.
    fn swiglu(
        &self,
        gate: &Self::Weight,
        up: &Self::Weight,
        down: &Self::Weight,
        x: &Self::Tensor,
    ) -> Self::Tensor;
    /// Sigmoid scores in f32; `bias` moves the choice, never the weights; ties go to the lower expert.
    fn route(
        &self,
        gate: &Self::Weight,
        bias: &Self::Vector,
        x: &Self::Tensor,
        params: &RouterParams,
    ) -> Self::Routes;
    /// `sum_j weight_j * expert_j(x)` per row, accumulated in f32 in ascending expert id, rows grouped by expert.
    fn run_experts(
        &self,
        experts: &Self::Experts,
        routes: &Self::Routes,
        x: &Self::Tensor,
    ) -> Self::Tensor;
    /// `a += b` without rounding (shared expert beside routed ones).
    fn accumulate(&self, a: &mut Self::Tensor, b: &Self::Tensor);

    // ----- the ends --------------------------------------------------------------------------------------------------

    /// `[rows.len(), width]`: the given rows of `x`.
    fn gather(&self, x: &Self::Tensor, rows: &[usize]) -> Self::Tensor;
    /// One token per request from row `request.row` of `logits` (`[rows, vocab]`).
    fn sample(&self, logits: &Self::Tensor, requests: &[SampleRequest]) -> Vec<Sampled>;
    /// Log-probabilities of given tokens, row by row.
    fn score(&self, logits: &Self::Tensor, requests: &[ScoreRequest]) -> Vec<Scored>;

    // ----- the hand-off ----------------------------------------------------------------------------------------------

    /// Rows and width of a tensor.
    fn shape(&self, x: &Self::Tensor) -> (usize, usize);
    /// The tensor's values in `dtype`, little-endian, row-major.
    fn export(&self, x: &Self::Tensor, dtype: Dtype) -> Vec<u8>;
    /// The inverse of [`Backend::export`]; `bytes` holds `rows * width` values.
    fn import(&self, bytes: &[u8], rows: usize, width: usize, dtype: Dtype) -> Self::Tensor;
    /// The index rows of the given step rows, `[rows.len(), topk]`, ascending, -1 after the last.
    fn export_selection(&self, selection: &Self::Selection, rows: &[usize]) -> Vec<i32>;
    /// A selection for `batch` from the index rows of its *long* rows (position >= `topk`), in row order; short rows
    /// select everything and padding rows nothing.
    fn import_selection(
        &self,
        batch: &Self::Placed,
        topk: usize,
        long_rows: &[i32],
    ) -> Self::Selection;
    /// Scores that were not a number since the backend was made.
    fn nan_scores(&self) -> u64;
}
