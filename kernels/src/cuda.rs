//! The CUDA backend: one GPU, one stream, weights as the checkpoint stores them.
//!
//! Every operation queues kernels and returns; nothing waits for the device but what brings values to the host. Tensors of
//! a step come from an arena that was allocated at the start. Kernels lie in `kernels/cuda/`, one family a file, compiled
//! by `build.rs`; the head of each file says what a launch needs.

mod arena;
mod attention;
mod blas;
mod cubins {
    include!(concat!(env!("OUT_DIR"), "/cubins.rs"));
}
mod device;
mod experts;
mod memory;
mod placed;
mod profile;
mod selection;
mod tensor;
#[allow(dead_code, reason = "the kernels that take one follow")]
mod tensor_map;
mod upload;
mod weight;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

pub use attention::{Absorbed, LatentCache};
use blas::{Operands, Places, Product};
use device::{Device, launch};
pub use experts::{Experts, Routes};
use memory::Memory;
pub use placed::Placed;
pub use profile::KernelTime;
pub use selection::{IndexCache, Selection};
pub use tensor::{Element, Tensor};
use weight::Kind;
pub use weight::{Vector, Weight};

use crate::backend::{
    Backend, Dtype, ExpertMatrices, IndexParams, KernelError, MatrixView, RopeLayout, RopeTable,
    RouterParams,
};
use crate::batch::Batch;
use crate::sampling::{self, SampleRequest, Sampled, ScoreRequest, Scored};

/// How the CUDA backend runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// Which GPU.
    pub ordinal: usize,
    /// Compute type of activations; the hand-off has the same.
    pub activations: Element,
    /// Bytes for the tensors of a step.
    pub workspace: u64,
}

/// GPUs of this machine.
///
/// # Errors
/// When there is no driver.
pub fn device_count() -> Result<usize, KernelError> {
    device::count()
}

/// How latents and index keys are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvStorage {
    /// Single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// Latents as e4m3 with a scale for every 128 and the rotated key in bf16; index keys as e4m3 with one scale.
    Fp8,
}

/// The [`Backend`] of one GPU.
pub struct CudaBackend {
    device: Arc<Device>,
    element: Element,
    /// u64: scores that were not a number.
    nan: Memory,
    /// Rotary frequencies on the device; a model has one table.
    ropes: Mutex<Vec<(Vec<f32>, Arc<Memory>)>>,
}

impl CudaBackend {
    /// Opens the GPU and allocates the workspace.
    ///
    /// # Errors
    /// When there is no driver, no such GPU, no kernel for it, or too little memory.
    pub fn new(options: CudaOptions) -> Result<Self, KernelError> {
        let device = Device::open(options.ordinal, options.workspace)?;
        let nan = Memory::own(&device, "counters", 8)?;
        nan.fill(&device, 0);
        Ok(Self { device, element: options.activations, nan, ropes: Mutex::default() })
    }

    /// The GPU's name.
    #[must_use]
    pub fn device_name(&self) -> &str {
        &self.device.name
    }

    /// The GPU's identity, the same in every process.
    #[must_use]
    pub fn device_uuid(&self) -> &str {
        &self.device.uuid
    }

    /// Free and total bytes of the device's memory.
    ///
    /// # Errors
    /// When the driver does not say.
    pub fn memory(&self) -> Result<(u64, u64), KernelError> {
        self.device.memory()
    }

    /// How this backend stores cached values.
    #[must_use]
    pub fn kv_layout(&self) -> KvStorage {
        match self.element {
            Element::F32 => KvStorage::F32,
            Element::Bf16 => KvStorage::Bf16,
        }
    }

    /// Waits for everything that was queued.
    pub fn synchronise(&self) {
        self.device.synchronise();
    }

    /// Times every kernel from now on, until [`CudaBackend::stop_profile`].
    pub fn start_profile(&self) {
        self.device.profile.start();
    }

    /// Waits for what was queued and gives the time of every kernel since the profile was started.
    pub fn stop_profile(&self) -> BTreeMap<&'static str, KernelTime> {
        self.device.synchronise();
        self.device.profile.stop()
    }

    fn upload_f32(&self, values: &[f32]) -> Result<Memory, KernelError> {
        let memory = Memory::own(&self.device, "a vector", values.len() * 4)?;
        memory.write(&self.device, 0, bytemuck::cast_slice(values));
        Ok(memory)
    }

    /// Fills a cache with values in (-1, 1).
    fn make_up(&self, cache: &Memory, seed: u64) {
        let values = cache.len() / self.element.size();
        let kernel = self.element.pick("random_f32", "random_bf16");
        launch!(self.device, kernel, values.div_ceil(256).min(1 << 16), 256, 0; cache.at(0), values as i64, seed, 1.0_f32);
    }

    /// The rotary frequencies where a kernel reads them.
    fn frequencies(&self, rope: &RopeTable) -> Arc<Memory> {
        let mut ropes = self.ropes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = ropes.iter().find(|(table, _)| *table == rope.inv_freq) {
            return Arc::clone(known);
        }
        let memory = self.upload_f32(&rope.inv_freq).unwrap_or_else(|e| {
            self.device.fail(e);
            Memory::none()
        });
        let memory = Arc::new(memory);
        ropes.push((rope.inv_freq.clone(), Arc::clone(&memory)));
        memory
    }

    fn linear_into(&self, weight: &Weight, x: &Tensor, result: Element) -> Tensor {
        let out = Tensor::new(&self.device, x.rows, weight.rows, result);
        // cuBLASLt wants rows that start at multiples of 16 bytes.
        let aligned = weight.rows.is_multiple_of(16) && weight.cols.is_multiple_of(16);
        if (x.element, weight.kind) == (Element::Bf16, Kind::Bf16) && aligned {
            let product = Product::plain(x.rows, weight.rows, weight.cols, Operands::Bf16, result);
            let places =
                Places { x: x.at(), x_scales: 0, w: weight.data.at(0), w_scales: 0, y: out.at() };
            self.device.blas.multiply(&self.device, &product, &places);
            return out;
        }
        let kernel = match (x.element, result) {
            (Element::F32, _) => "linear_f32",
            (Element::Bf16, Element::Bf16) => "linear_bf16",
            (Element::Bf16, Element::F32) => "linear_bf16_f32",
        };
        launch!(self.device, kernel, (weight.rows.div_ceil(4), x.rows.div_ceil(8)), 128, 0;
            weight.matrix(), x.at(), out.at(), x.rows as i32);
        out
    }

    fn logits_on_host(&self, logits: &Tensor) -> Vec<f32> {
        let bytes = logits.export(&self.device, Dtype::F32);
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }
}

impl Backend for CudaBackend {
    type Tensor = Tensor;
    type Weight = Weight;
    type Vector = Vector;
    type Absorbed = Absorbed;
    type Experts = Experts;
    type Routes = Routes;
    type LatentCache = LatentCache;
    type IndexCache = IndexCache;
    type Selection = Selection;
    type Placed = Placed;

    fn name(&self) -> &'static str {
        "cuda"
    }

    fn place(&self, batch: &Batch) -> Placed {
        Placed::new(&self.device, batch)
    }

    fn check(&self) -> Result<(), KernelError> {
        self.device.take_failure()
    }

    fn weight(&self, matrix: MatrixView<'_>) -> Result<Weight, KernelError> {
        Weight::upload(&self.device, matrix)
    }

    fn vector(&self, values: &[f32]) -> Result<Vector, KernelError> {
        self.upload_f32(values).map(Vector)
    }

    fn absorbed(
        &self,
        kv_b: MatrixView<'_>,
        heads: usize,
        nope: usize,
        value: usize,
    ) -> Result<Absorbed, KernelError> {
        Absorbed::new(&self.device, self.element, kv_b, heads, nope, value)
    }

    fn experts(&self, experts: &[ExpertMatrices<'_>]) -> Result<Experts, KernelError> {
        Experts::new(&self.device, experts)
    }

    fn latent_cache(
        &self,
        blocks: usize,
        block_size: usize,
        latent: usize,
        rope: usize,
    ) -> Result<LatentCache, KernelError> {
        let width = latent + rope;
        let data = selection::slots(
            &self.device,
            "latent cache",
            blocks,
            block_size,
            width,
            self.element,
        )?;
        Ok(LatentCache { latent, rope, data })
    }

    fn index_cache(
        &self,
        blocks: usize,
        block_size: usize,
        head_dim: usize,
    ) -> Result<IndexCache, KernelError> {
        let data = selection::slots(
            &self.device,
            "index cache",
            blocks,
            block_size,
            head_dim,
            self.element,
        )?;
        Ok(IndexCache { width: head_dim, data })
    }

    fn loaded(&self) {
        self.device.end_of_load();
    }

    fn make_up_latents(&self, cache: &mut LatentCache, seed: u64) {
        self.make_up(&cache.data, seed);
    }

    fn make_up_index_keys(&self, cache: &mut IndexCache, seed: u64) {
        self.make_up(&cache.data, seed);
    }

    fn embed(&self, table: &Weight, ids: &[u32], padding: usize) -> Tensor {
        let mut numbers: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        numbers.resize(ids.len() + padding, -1);
        let device = &self.device;
        let list = Memory::part(device, "token ids", numbers.len() * 4);
        list.write(device, 0, bytemuck::cast_slice(&numbers));
        let out = Tensor::new(device, numbers.len(), table.cols, self.element);
        launch!(device, self.element.pick("embed_f32", "embed_bf16"), out.rows, 128, 0;
            table.matrix(), list.at(0), out.at());
        out
    }

    fn rms_norm(&self, x: &Tensor, weight: &Vector, eps: f32) -> Tensor {
        let out = Tensor::new(&self.device, x.rows, x.width, x.element);
        launch!(self.device, x.element.pick("rms_norm_f32", "rms_norm_bf16"), x.rows, 256, 0;
            x.at(), weight.0.at(0), out.at(), x.width as i32, eps);
        out
    }

    fn add(&self, hidden: &mut Tensor, delta: &Tensor, _: Dtype) {
        // The compute type is the hand-off's: what is stored is already rounded to it.
        self.accumulate(hidden, delta);
    }

    fn linear(&self, weight: &Weight, x: &Tensor) -> Tensor {
        self.linear_into(weight, x, x.element)
    }

    fn linear_f32(&self, weight: &Weight, x: &Tensor) -> Tensor {
        self.linear_into(weight, x, Element::F32)
    }

    fn rope(
        &self,
        x: &mut Tensor,
        batch: &Placed,
        rope: &RopeTable,
        layout: RopeLayout,
        heads: usize,
        head_dim: usize,
        offset: usize,
    ) {
        let table = self.frequencies(rope);
        launch!(self.device, x.element.pick("rope_f32", "rope_bf16"), x.rows, 128, 0;
            x.at(), batch.positions(), table.at(0), rope.inv_freq.len() as i32, rope.magnitude, interleaved(layout),
            heads as i32, head_dim as i32, offset as i32, x.width as i32);
    }

    fn write_latent(
        &self,
        cache: &mut LatentCache,
        batch: &Placed,
        kv: &Tensor,
        norm: &Vector,
        eps: f32,
        rope: &RopeTable,
    ) {
        let table = self.frequencies(rope);
        launch!(self.device, kv.element.pick("write_latent_f32", "write_latent_bf16"), kv.rows, 128, 0;
            cache.data.at(0), kv.at(), norm.0.at(0), batch.positions(), batch.slots(), cache.latent as i32,
            rope.inv_freq.len() as i32, eps, table.at(0), rope.magnitude);
    }

    fn write_index_key(
        &self,
        cache: &mut IndexCache,
        batch: &Placed,
        keys: &Tensor,
        norm_weight: &Vector,
        norm_bias: &Vector,
        eps: f32,
        rope: &RopeTable,
        layout: RopeLayout,
    ) {
        let table = self.frequencies(rope);
        launch!(self.device, keys.element.pick("write_index_key_f32", "write_index_key_bf16"), keys.rows, 128, cache.width * 4;
            cache.data.at(0), keys.at(), norm_weight.0.at(0), norm_bias.0.at(0), batch.positions(), batch.slots(),
            cache.width as i32, rope.inv_freq.len() as i32, interleaved(layout), eps, table.at(0), rope.magnitude);
    }

    fn select(
        &self,
        cache: &IndexCache,
        batch: &Placed,
        queries: &Tensor,
        weights: &Tensor,
        params: &IndexParams,
    ) -> Selection {
        Selection::choose(&self.device, &self.nan, cache, batch, queries, weights, params)
    }

    fn sparse_attention(
        &self,
        cache: &LatentCache,
        batch: &Placed,
        queries: &Tensor,
        absorbed: &Absorbed,
        selection: &Selection,
        scale: f32,
    ) -> Tensor {
        attention::attend(&self.device, cache, batch, queries, absorbed, selection, scale)
    }

    fn swiglu(&self, gate: &Weight, up: &Weight, down: &Weight, x: &Tensor) -> Tensor {
        let (g, u) = (self.linear(gate, x), self.linear(up, x));
        let mid = Tensor::new(&self.device, x.rows, gate.rows, x.element);
        launch!(self.device, x.element.pick("gated_f32", "gated_bf16"), mid.values().div_ceil(256), 256, 0;
            g.at(), u.at(), mid.at(), mid.values() as i64);
        self.linear(down, &mid)
    }

    fn route(&self, gate: &Weight, bias: &Vector, x: &Tensor, params: &RouterParams) -> Routes {
        experts::route(&self.device, &self.linear_f32(gate, x), bias, params)
    }

    fn run_experts(&self, experts: &Experts, routes: &Routes, x: &Tensor) -> Tensor {
        experts.run(&self.device, routes, x)
    }

    fn accumulate(&self, a: &mut Tensor, b: &Tensor) {
        launch!(self.device, a.element.pick("add_f32", "add_bf16"), a.values().div_ceil(256), 256, 0;
            a.at(), b.at(), a.values() as i64);
    }

    fn gather(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        let device = &self.device;
        let numbers: Vec<i32> = rows.iter().map(|row| *row as i32).collect();
        let list = Memory::part(device, "rows to gather", numbers.len() * 4);
        list.write(device, 0, bytemuck::cast_slice(&numbers));
        let out = Tensor::new(device, rows.len(), x.width, x.element);
        launch!(device, "gather_rows", rows.len(), 128, 0;
            x.at(), list.at(0), out.at(), (x.width * x.element.size() / 2) as i32);
        out
    }

    fn sample(&self, logits: &Tensor, requests: &[SampleRequest]) -> Vec<Sampled> {
        if requests.iter().enumerate().all(|(at, r)| r.row == at && r.is_plain_greedy()) {
            return self.greedy(logits, requests.len());
        }
        let values = self.logits_on_host(logits);
        let row = |r: usize| &values[r * logits.width..(r + 1) * logits.width];
        requests.iter().map(|r| sampling::sample(row(r.row), r)).collect()
    }

    fn score(&self, logits: &Tensor, requests: &[ScoreRequest]) -> Vec<Scored> {
        let values = self.logits_on_host(logits);
        let row = |r: usize| &values[r * logits.width..(r + 1) * logits.width];
        requests.iter().map(|r| sampling::score(row(r.row), r)).collect()
    }

    fn shape(&self, x: &Tensor) -> (usize, usize) {
        (x.rows, x.width)
    }

    fn export(&self, x: &Tensor, dtype: Dtype) -> Vec<u8> {
        x.export(&self.device, dtype)
    }

    fn import(&self, bytes: &[u8], rows: usize, width: usize, dtype: Dtype) -> Tensor {
        Tensor::import(&self.device, bytes, rows, width, dtype, self.element)
    }

    fn export_selection(&self, selection: &Selection, rows: &[usize]) -> Vec<i32> {
        selection.export(&self.device, rows)
    }

    fn import_selection(&self, batch: &Placed, topk: usize, long_rows: &[i32]) -> Selection {
        Selection::import(&self.device, batch, topk, long_rows)
    }

    fn nan_scores(&self) -> u64 {
        let mut bytes = [0; 8];
        self.nan.read(&self.device, &mut bytes);
        u64::from_le_bytes(bytes)
    }
}

impl CudaBackend {
    /// The most likely token of the first `rows` rows.
    fn greedy(&self, logits: &Tensor, rows: usize) -> Vec<Sampled> {
        let device = &self.device;
        let answer = Memory::part(device, "sampled tokens", rows * 8);
        launch!(device, "greedy", rows, 1024, 0;
            logits.at(), logits.width as i32, answer.at(0), answer.at(rows * 4));
        let mut bytes = vec![0; rows * 8];
        answer.read(device, &mut bytes);
        let word =
            |at: usize| [bytes[at * 4], bytes[at * 4 + 1], bytes[at * 4 + 2], bytes[at * 4 + 3]];
        (0..rows)
            .map(|row| Sampled {
                token: u32::from_le_bytes(word(row)),
                logprob: f32::from_le_bytes(word(rows + row)),
                top: Vec::new(),
            })
            .collect()
    }
}

impl std::fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaBackend").field("device", &self.device).finish_non_exhaustive()
    }
}

fn interleaved(layout: RopeLayout) -> i32 {
    i32::from(layout == RopeLayout::Interleaved)
}
