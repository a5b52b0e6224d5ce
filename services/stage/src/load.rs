//! Loading a slice onto the device of this stage.

use baton_kernels::{Backend, CpuBackend, CpuOptions};
use baton_model::Slice;
use baton_plan::{HiddenDtype, KvLayout, StageContract};
use baton_proto::v1;
use tokio::sync::mpsc;
use tonic::Status;

use crate::BackendKind;
use crate::engine::Engine;
use crate::service::Model;

/// KV blocks when nothing else bounds them: tokens of this many longest contexts.
const DEFAULT_CONTEXTS: usize = 8;
/// As above, where memory is the processor's and has other users.
const DEFAULT_TOKENS: usize = 65_536;
/// Share of a GPU's free memory that a stage takes when it is not told how much.
#[cfg(feature = "cuda")]
const DEVICE_SHARE: f64 = 0.92;

/// KV blocks of the delay backend, which keeps none.
pub(crate) fn default_blocks(block_size: usize) -> u32 {
    (DEFAULT_TOKENS / block_size) as u32
}

/// What to load, and where.
pub(crate) struct Load<'a> {
    pub(crate) model: &'a Model,
    pub(crate) backend: BackendKind,
    pub(crate) threads: Option<usize>,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) contract: &'a StageContract,
    pub(crate) request: &'a v1::LoadRequest,
    /// Bytes of the checkpoint that an earlier load is answerable for.
    pub(crate) before: u64,
    pub(crate) progress: &'a mpsc::Sender<Result<v1::LoadEvent, Status>>,
}

impl Load<'_> {
    /// Checks that the directory is the coordinator's, opens the device and loads.
    pub(crate) fn run(&self) -> Result<(Box<dyn Engine>, v1::LoadDone), String> {
        let checkpoint = &self.model.checkpoint;
        if self.request.checkpoint_digest != checkpoint.digest() {
            return Err(format!(
                "checkpoint digests differ: this stage's directory has {}, the coordinator's {}",
                checkpoint.digest(),
                self.request.checkpoint_digest
            ));
        }
        match self.backend {
            BackendKind::Cpu => {
                let options = CpuOptions { threads: self.threads };
                let backend = CpuBackend::new(options).map_err(|e| e.to_string())?;
                let device = match backend.threads() {
                    1 => "1 thread".to_owned(),
                    threads => format!("{threads} threads"),
                };
                let longest = self.model.config.max_positions;
                let tokens = longest.saturating_mul(DEFAULT_CONTEXTS).min(DEFAULT_TOKENS);
                let tokens = tokens.max(longest.min(DEFAULT_TOKENS));
                // Pages on the processor are f32.
                let layout = KvLayout::Plain(HiddenDtype::F32);
                self.slice(backend, device, layout, tokens, self.memory_bytes)
            }
            #[cfg(feature = "cuda")]
            BackendKind::Cuda { ordinal } => self.cuda(ordinal),
            #[cfg(not(feature = "cuda"))]
            BackendKind::Cuda { .. } => {
                Err("this binary was built without the feature `cuda`".into())
            }
            BackendKind::Delay(_) => Err("the delay backend loads no model".into()),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, ordinal: usize) -> Result<(Box<dyn Engine>, v1::LoadDone), String> {
        use baton_kernels::cuda::{CudaBackend, CudaOptions, Element, KvStorage};
        let (config, contract) = (&self.model.config, self.contract);
        let activations = match contract.hidden_dtype {
            HiddenDtype::F32 => Element::F32,
            HiddenDtype::Bf16 => Element::Bf16,
        };
        let workspace = baton_model::slice::workspace_bytes(config, contract);
        let options = CudaOptions { ordinal, activations, workspace };
        let backend = CudaBackend::new(options).map_err(|e| e.to_string())?;
        let device = format!("{} (GPU {ordinal})", backend.device_name());
        let (free, _) = backend.memory().map_err(|e| e.to_string())?;
        let share = (free as f64 * DEVICE_SHARE) as u64;
        let memory =
            self.memory_bytes.map_or(share, |limit| limit.saturating_sub(workspace).min(free));
        let tokens = config.max_positions.saturating_mul(DEFAULT_CONTEXTS);
        let layout = match backend.kv_layout() {
            KvStorage::F32 => KvLayout::Plain(HiddenDtype::F32),
            KvStorage::Bf16 => KvLayout::Plain(HiddenDtype::Bf16),
            KvStorage::Fp8 => KvLayout::Fp8,
        };
        self.slice(backend, device, layout, tokens, Some(memory))
    }

    fn slice<B: Backend>(
        &self,
        backend: B,
        device: String,
        layout: KvLayout,
        most_tokens: usize,
        memory: Option<u64>,
    ) -> Result<(Box<dyn Engine>, v1::LoadDone), String> {
        let Model { config, checkpoint } = self.model;
        let weights_before = checkpoint.tensor_bytes_read();
        let needed = baton_model::slice::bytes_needed(config, self.contract);
        let kv_blocks = self.kv_blocks(layout, most_tokens, memory, needed)?;
        let before = self.before;
        let mut report = |loaded: baton_model::LoadProgress| {
            let event = v1::LoadEvent {
                event: Some(v1::load_event::Event::Progress(v1::LoadProgress {
                    bytes_done: loaded.bytes_read - before,
                    bytes_total: needed.max(loaded.bytes_read - before),
                    tensor: format!("{} of {} parts", loaded.done, loaded.total),
                })),
            };
            // Progress that nobody waits for may be lost; the end of the load is what counts.
            let _ = self.progress.try_send(Ok(event));
        };
        let slice = Slice::load(
            backend,
            config,
            checkpoint,
            self.contract.clone(),
            kv_blocks as usize,
            &mut report,
        )
        .map_err(|e| e.to_string())?;
        let done = v1::LoadDone {
            bytes_read: checkpoint.bytes_read() - before,
            bytes_needed: needed,
            weight_bytes: checkpoint.tensor_bytes_read() - weights_before,
            kv_blocks,
            device,
            ..v1::LoadDone::default()
        };
        Ok((Box::new(slice), done))
    }

    fn kv_blocks(
        &self,
        layout: KvLayout,
        most_tokens: usize,
        memory: Option<u64>,
        weight_bytes: u64,
    ) -> Result<u32, String> {
        let mut blocks = most_tokens.div_ceil(self.contract.block_size) as u64;
        if let Some(memory) = memory {
            let config = &self.model.config;
            let block =
                baton_model::slice::kv_bytes_per_block(config, self.contract, layout).max(1);
            blocks = blocks.min(memory.saturating_sub(weight_bytes) / block);
            if blocks == 0 {
                return Err(format!(
                    "{memory} bytes of memory do not hold {weight_bytes} bytes of weights and one \
                     KV block of {block} bytes"
                ));
            }
        }
        if self.request.max_kv_blocks > 0 {
            blocks = blocks.min(u64::from(self.request.max_kv_blocks));
        }
        Ok(u32::try_from(blocks).unwrap_or(u32::MAX))
    }
}
