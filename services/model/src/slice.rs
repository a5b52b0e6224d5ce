//! The consecutive layers of one stage.

use std::sync::Arc;

use baton_kernels::sampling::Scored;
use baton_kernels::{
    Backend, Dtype, IndexParams, KernelError, RopeLayout, RopeTable, RouterParams,
};
use baton_plan::tensors::slice_tensors;
use baton_plan::{HiddenDtype, ModelConfig, StageContract};
use baton_transport::{HandOff, SentCarry};
use thiserror::Error;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::layer::{Layer, Shape};
use crate::observer::Observer;
use crate::step::{StepInput, StepOutput, StepRequest};
use crate::weights::{MadeUp, Weights};

/// Rows of prompt scoring whose logits exist at once; a long prompt's would not fit in memory.
const SCORED_AT_ONCE: usize = 64;

/// Scores of a chunk of rows, and what else does not grow with a step.
const SCORE_BYTES: u64 = 320 << 20;

/// How far loading has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Layers and ends loaded.
    pub done: usize,
    /// Layers and ends of the slice.
    pub total: usize,
    /// Bytes read so far.
    pub bytes_read: u64,
}

/// A slice that cannot be loaded, or a step that it cannot run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SliceError {
    /// The checkpoint does not fit the config.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The device cannot hold or run it.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The directory and the contract describe different models.
    #[error("config digests differ: this stage's directory has {ours}, the contract {theirs}")]
    ConfigDigest {
        /// Of this stage's directory.
        ours: String,
        /// Of the contract.
        theirs: String,
    },
    /// A shared layer without index rows of this step.
    #[error(
        "layer {layer} reuses index rows, and neither a layer before it nor the hand-off gave any"
    )]
    NoSelection {
        /// The layer.
        layer: usize,
    },
    /// Input of the wrong kind for this stage.
    #[error("stage {stage} takes {expected}, and was given {found}")]
    Input {
        /// The stage.
        stage: usize,
        /// What it takes.
        expected: &'static str,
        /// What it was given.
        found: &'static str,
    },
    /// Rows and token ids do not match, or there are too many.
    #[error("step {step_id}: {found} {what}, expected {expected}")]
    Count {
        /// The step.
        step_id: u64,
        /// What is counted.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: String,
    },
}

/// Layers `contract.layers` on a backend, with their KV pages.
pub struct Slice<B: Backend> {
    backend: Arc<B>,
    contract: StageContract,
    shape: Shape,
    vocab_size: usize,
    max_positions: usize,
    layers: Vec<Layer<B>>,
    /// First stage.
    embedding: Option<B::Weight>,
    /// Last stage: final norm and head.
    head: Option<(B::Vector, B::Weight)>,
    bytes_read: u64,
}

impl<B: Backend> Slice<B> {
    /// Loads the slice of `contract`, with room for `kv_blocks` blocks.
    ///
    /// # Errors
    /// When the checkpoint does not fit, or the device has too little memory.
    pub fn load(
        backend: B,
        config: &ModelConfig,
        checkpoint: &Checkpoint,
        contract: StageContract,
        kv_blocks: usize,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, SliceError> {
        let ours = config.digest();
        if ours != contract.config_digest {
            return Err(SliceError::ConfigDigest { ours, theirs: contract.config_digest });
        }
        checkpoint.check_names(config, contract.layers.clone())?;
        Self::from_weights(
            backend,
            config,
            &Weights::Checkpoint(checkpoint),
            contract,
            kv_blocks,
            progress,
        )
    }

    /// A slice for measurements, without a checkpoint: weights and the caches' contents are drawn by the backend, in the
    /// types that the config says.
    ///
    /// # Errors
    /// When the device has too little memory.
    pub fn made_up(
        backend: B,
        config: &ModelConfig,
        contract: StageContract,
        kv_blocks: usize,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, SliceError> {
        let weights = Weights::MadeUp(MadeUp::new(config, contract.layers.clone()));
        let mut slice =
            Self::from_weights(backend, config, &weights, contract, kv_blocks, progress)?;
        for layer in &mut slice.layers {
            layer.make_up_context(&slice.backend);
        }
        slice.backend.check()?;
        Ok(slice)
    }

    fn from_weights(
        backend: B,
        config: &ModelConfig,
        weights: &Weights<'_>,
        contract: StageContract,
        kv_blocks: usize,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, SliceError> {
        let total = contract.layers.len()
            + usize::from(contract.is_first())
            + usize::from(contract.is_last());
        let mut done = 0;
        let mut advance = || {
            done += 1;
            progress(LoadProgress { done, total, bytes_read: weights.bytes_read() });
        };
        let table = |name| weights.matrix(name, config.vocab_size, config.hidden_size, config.fp8);
        let embedding = if contract.is_first() {
            let embedding = backend.weight(table("model.embed_tokens.weight")?)?;
            advance();
            Some(embedding)
        } else {
            None
        };
        let mut layers = Vec::with_capacity(contract.layers.len());
        for number in contract.layers.clone() {
            layers.push(Layer::load(
                &backend,
                config,
                weights,
                number,
                kv_blocks,
                contract.block_size,
            )?);
            advance();
        }
        let head = if contract.is_last() {
            let norm = weights.vector("model.norm.weight", config.hidden_size)?;
            let head = backend.weight(table("lm_head.weight")?)?;
            advance();
            Some((backend.vector(&norm)?, head))
        } else {
            None
        };
        backend.loaded();
        Ok(Self {
            shape: shape(config, contract.hidden_dtype),
            backend: Arc::new(backend),
            contract,
            vocab_size: config.vocab_size,
            max_positions: config.max_positions,
            layers,
            embedding,
            head,
            bytes_read: weights.bytes_read(),
        })
    }

    /// The contract it was loaded under.
    pub fn contract(&self) -> &StageContract {
        &self.contract
    }

    /// The device it runs on.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Bytes of the checkpoint that were read for it.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// Runs one step.
    ///
    /// # Errors
    /// When the input does not fit the stage or the step; nothing is computed from a wrong one.
    pub fn forward(
        &mut self,
        request: &StepRequest,
        input: StepInput<'_>,
    ) -> Result<StepOutput, SliceError> {
        self.forward_observed(request, input, &mut ())
    }

    /// As [`Slice::forward`], with a look inside.
    ///
    /// # Errors
    /// As [`Slice::forward`].
    pub fn forward_observed(
        &mut self,
        request: &StepRequest,
        input: StepInput<'_>,
        observer: &mut impl Observer<B>,
    ) -> Result<StepOutput, SliceError> {
        self.check(request)?;
        let backend = Arc::clone(&self.backend);
        backend.within(|| self.step(request, input, observer))
    }

    fn step(
        &mut self,
        request: &StepRequest,
        input: StepInput<'_>,
        observer: &mut impl Observer<B>,
    ) -> Result<StepOutput, SliceError> {
        let batch = &request.batch;
        let placed = self.backend.place(batch);
        // Index rows live in this call alone: those of a received hand-off first, then each full layer's.
        let (mut hidden, mut selection, carry) = match (input, &self.embedding) {
            (StepInput::Tokens(ids), Some(table)) => {
                self.check_tokens(request, ids)?;
                (self.backend.embed(table, ids, batch.padding), None, None)
            }
            (StepInput::HandOff(accepted), None) => {
                let dtype = self.shape.hidden_dtype;
                let import = |bytes| {
                    self.backend.import(bytes, batch.rows(), self.contract.hidden_size, dtype)
                };
                let mut hidden = import(accepted.hidden());
                if let Some(residual) = accepted.residual() {
                    self.backend.add(&mut hidden, &import(residual), dtype);
                }
                let selection = accepted.carry().map(|carry| {
                    let topk = self.contract.index_topk;
                    self.backend.import_selection(&placed, topk, carry.indices())
                });
                let relayed = accepted.carry().map(baton_transport::Carry::relay);
                (hidden, selection, relayed)
            }
            (StepInput::Tokens(_), None) => return Err(self.wrong_input("a hand-off", "tokens")),
            (StepInput::HandOff(_), Some(_)) => {
                return Err(self.wrong_input("tokens", "a hand-off"));
            }
        };
        observer.enter(&self.backend, batch, &placed, &mut selection);
        for layer in &mut self.layers {
            layer.forward(&self.backend, &self.shape, &placed, &mut hidden, &mut selection)?;
            if let Some(selection) = &selection {
                observer.leave(&self.backend, layer.number, &hidden, selection);
            }
        }
        let output = match &self.head {
            Some(head) => self.answer(request, head, &hidden),
            None => {
                let carry = self.outgoing_carry(request, selection.as_ref(), carry)?;
                StepOutput::HandOff(HandOff {
                    epoch: request.epoch,
                    step_id: request.step_id,
                    rows: batch.rows(),
                    hidden: self.backend.export(&hidden, self.shape.hidden_dtype),
                    residual: None,
                    carry,
                })
            }
        };
        self.backend.check()?;
        Ok(output)
    }

    fn check(&self, request: &StepRequest) -> Result<(), SliceError> {
        let step_id = request.step_id;
        let rows = request.batch.rows();
        if rows > self.contract.row_capacity {
            let expected = format!("at most the contract's {}", self.contract.row_capacity);
            return Err(SliceError::Count { step_id, what: "rows", found: rows, expected });
        }
        let longest = request.batch.segments.iter().map(|s| s.start + s.rows).max().unwrap_or(0);
        if longest > self.max_positions {
            let expected = format!("at most the model's {}", self.max_positions);
            return Err(SliceError::Count { step_id, what: "positions", found: longest, expected });
        }
        Ok(())
    }

    fn check_tokens(&self, request: &StepRequest, ids: &[u32]) -> Result<(), SliceError> {
        let step_id = request.step_id;
        let rows = request.batch.real_rows();
        if ids.len() != rows {
            let expected = format!("one for each of {rows} rows");
            let found = ids.len();
            return Err(SliceError::Count { step_id, what: "token ids", found, expected });
        }
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= self.vocab_size) {
            let expected = format!("below the vocabulary's {}", self.vocab_size);
            let found = id as usize;
            return Err(SliceError::Count { step_id, what: "is a token id", found, expected });
        }
        Ok(())
    }

    fn wrong_input(&self, expected: &'static str, found: &'static str) -> SliceError {
        SliceError::Input { stage: self.contract.stage, expected, found }
    }

    /// The rows that the next slice needs: this slice's own when it has chosen, else the received ones unchanged.
    fn outgoing_carry(
        &self,
        request: &StepRequest,
        selection: Option<&B::Selection>,
        received: Option<SentCarry>,
    ) -> Result<Option<SentCarry>, SliceError> {
        let Some(source_layer) = self.contract.sends_from_layer else { return Ok(None) };
        if !self.contract.layers.contains(&source_layer) {
            let layer = self.contract.layers.end;
            return received.map(Some).ok_or(SliceError::NoSelection { layer });
        }
        let selection = selection.ok_or(SliceError::NoSelection { layer: source_layer })?;
        let topk = self.contract.index_topk;
        let long: Vec<usize> = request
            .batch
            .positions()
            .enumerate()
            .filter(|(_, (_, position))| *position >= topk)
            .map(|(row, _)| row)
            .collect();
        Ok(Some(SentCarry {
            epoch: request.epoch,
            step_id: request.step_id,
            source_layer,
            indices: self.backend.export_selection(selection, &long),
        }))
    }

    fn answer(
        &self,
        request: &StepRequest,
        (norm, head): &(B::Vector, B::Weight),
        hidden: &B::Tensor,
    ) -> StepOutput {
        let logits = |rows: &[usize]| {
            let picked = self.backend.gather(hidden, rows);
            self.backend.linear_f32(head, &self.backend.rms_norm(&picked, norm, self.shape.eps))
        };
        let mut samples = request.samples.clone();
        let rows: Vec<usize> = samples.iter().map(|s| s.row).collect();
        for (at, sample) in samples.iter_mut().enumerate() {
            sample.row = at;
        }
        let sampled = if rows.is_empty() {
            Vec::new()
        } else {
            self.backend.sample(&logits(&rows), &samples)
        };
        let scored: Vec<Scored> = request
            .scores
            .chunks(SCORED_AT_ONCE)
            .flat_map(|chunk| {
                let rows: Vec<usize> = chunk.iter().map(|s| s.row).collect();
                let mut chunk = chunk.to_vec();
                for (at, score) in chunk.iter_mut().enumerate() {
                    score.row = at;
                }
                self.backend.score(&logits(&rows), &chunk)
            })
            .collect();
        StepOutput::Tokens { sampled, scored }
    }
}

/// Bytes of KV that one block takes on a slice of these layers.
#[must_use]
pub fn kv_bytes_per_block(
    config: &ModelConfig,
    contract: &StageContract,
    layout: baton_plan::KvLayout,
) -> u64 {
    let token: u64 = contract.layers.clone().map(|layer| layout.layer_bytes(config, layer)).sum();
    token * contract.block_size as u64
}

/// Bytes for the tensors that exist at once within a step, on a device that allocates them beforehand: what one layer keeps
/// alive of a step's rows, the index rows, the scores of a chunk of them and the logits of a batch.
#[must_use]
pub fn workspace_bytes(config: &ModelConfig, contract: &StageContract) -> u64 {
    let (heads, latent) = (config.num_heads, config.kv_lora_rank + config.qk_rope_head_dim);
    let attention = heads * (2 * latent + config.qk_head_dim() + config.v_head_dim);
    let chosen = config.experts_per_token;
    let experts = chosen * (config.moe_intermediate_size + config.hidden_size);
    let dense = 3 * config.intermediate_size + 6 * config.hidden_size;
    let index = config.index_heads * config.index_head_dim + 3 * config.index_topk;
    let row = 4 * (attention + experts + dense + index) as u64;
    let logits = 4 * (SCORED_AT_ONCE.max(256) * config.vocab_size) as u64;
    let head = if contract.is_last() { 2 * logits } else { 0 };
    SCORE_BYTES + head + row * contract.row_capacity as u64 * 5 / 4
}

/// Bytes of the checkpoint that a slice needs, by its config.
#[must_use]
pub fn bytes_needed(config: &ModelConfig, contract: &StageContract) -> u64 {
    let storage = baton_plan::Storage::of(config);
    slice_tensors(config, contract.layers.clone()).iter().map(|t| t.bytes(storage)).sum()
}

fn shape(config: &ModelConfig, hidden_dtype: HiddenDtype) -> Shape {
    let layout = |layout| match layout {
        baton_plan::RopeLayout::Interleaved => RopeLayout::Interleaved,
        baton_plan::RopeLayout::HalfSplit => RopeLayout::HalfSplit,
    };
    let (inv_freq, magnitude) = config.rope_inv_freq();
    Shape {
        heads: config.num_heads,
        nope: config.qk_nope_head_dim,
        rope_width: config.qk_rope_head_dim,
        rope: RopeTable { inv_freq, magnitude },
        rope_layout: layout(config.rope_layout),
        index_rope_layout: layout(config.indexer_rope_layout),
        index: IndexParams {
            heads: config.index_heads,
            head_dim: config.index_head_dim,
            topk: config.index_topk,
        },
        router: RouterParams {
            experts_per_token: config.experts_per_token,
            groups: config.num_groups,
            topk_groups: config.topk_groups,
            normalise: config.normalise_topk,
            scaling: config.routed_scaling_factor as f32,
        },
        eps: config.rms_norm_eps as f32,
        latent_eps: config.latent_norm_eps as f32,
        softmax_scale: config.softmax_scale(),
        hidden_dtype: match hidden_dtype {
            HiddenDtype::F32 => Dtype::F32,
            HiddenDtype::Bf16 => Dtype::Bf16,
        },
    }
}
