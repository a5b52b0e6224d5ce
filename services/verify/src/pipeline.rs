//! A pipeline of slices in this process. Hand-offs go through their wire form and are accepted as on a link.

use std::path::Path;

use baton_kernels::sampling::{SampleRequest, ScoreRequest};
use baton_kernels::{Backend, Batch, CpuBackend, CpuOptions, Segment};
use baton_model::{Checkpoint, Slice, SliceError, StepInput, StepOutput, StepRequest};
use baton_plan::{
    Contract, ContractOptions, HiddenDtype, IndexDtype, ModelConfig, Partition, StageContract,
};
use baton_transport::frame::{decode, encode};
use baton_transport::{ExpectedStep, FrameLimits, HandOff};

use crate::error::VerifyError;
use crate::watch::{Seen, StockBuffer, Watch};

/// Tokens per KV block.
const BLOCK: usize = 16;
/// Most rows of a prompt in one step; longer prompts take several, as in service.
pub(crate) const CHUNK: usize = 128;

/// One sequence at a time through slices of a model.
pub(crate) struct Pipeline {
    slices: Vec<Box<dyn Stage>>,
    /// One per stage where stock behaviour is reproduced.
    stale: Option<Vec<StockBuffer>>,
    full_layers: Vec<usize>,
    topk: usize,
    longest: usize,
    step_id: u64,
}

/// Where slices are run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// A GPU; needs the feature `cuda`.
    Cuda {
        /// Which one, from 0.
        ordinal: usize,
    },
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda { ordinal } => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// A slice on some device.
trait Stage {
    fn contract(&self) -> &StageContract;
    fn step(
        &mut self,
        request: &StepRequest,
        input: StepInput<'_>,
        watch: &mut Watch<'_>,
    ) -> Result<StepOutput, SliceError>;
}

impl<B: Backend> Stage for Slice<B> {
    fn contract(&self) -> &StageContract {
        self.contract()
    }

    fn step(
        &mut self,
        request: &StepRequest,
        input: StepInput<'_>,
        watch: &mut Watch<'_>,
    ) -> Result<StepOutput, SliceError> {
        self.forward_observed(request, input, watch)
    }
}

impl Device {
    fn load(
        self,
        config: &ModelConfig,
        checkpoint: &Checkpoint,
        contract: StageContract,
        blocks: usize,
    ) -> Result<Box<dyn Stage>, VerifyError> {
        match self {
            Self::Cpu => {
                let backend = CpuBackend::new(CpuOptions::default())?;
                Ok(Box::new(Slice::load(
                    backend,
                    config,
                    checkpoint,
                    contract,
                    blocks,
                    &mut |_| {},
                )?))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda { ordinal } => {
                let options = baton_kernels::CudaOptions {
                    ordinal,
                    activations: match contract.hidden_dtype {
                        HiddenDtype::F32 => baton_kernels::cuda::Element::F32,
                        HiddenDtype::Bf16 => baton_kernels::cuda::Element::Bf16,
                    },
                    workspace: baton_model::slice::workspace_bytes(config, &contract),
                };
                let backend = baton_kernels::CudaBackend::new(options)?;
                Ok(Box::new(Slice::load(
                    backend,
                    config,
                    checkpoint,
                    contract,
                    blocks,
                    &mut |_| {},
                )?))
            }
            #[cfg(not(feature = "cuda"))]
            Self::Cuda { .. } => Err(VerifyError::NoCuda),
        }
    }
}

/// What a step answers.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    /// The most likely next token.
    pub(crate) next: u32,
    /// Log-probabilities of the targets.
    pub(crate) scores: Vec<f32>,
    /// What was seen of the layers.
    pub(crate) seen: Seen,
}

impl Pipeline {
    /// Loads a model, cut as given, with room for one sequence of `longest` tokens.
    pub(crate) fn load(
        directory: &Path,
        config: &ModelConfig,
        partition: &Partition,
        longest: usize,
        device: Device,
        reproduce_stale: bool,
    ) -> Result<Self, VerifyError> {
        let options = ContractOptions {
            hidden_dtype: HiddenDtype::F32,
            index_dtype: IndexDtype::I32,
            row_capacity: CHUNK,
            block_size: BLOCK,
        };
        let contract = Contract::new(config, partition, &options)?;
        let checkpoint = Checkpoint::open(directory)?;
        let blocks = longest.div_ceil(BLOCK);
        let stale = reproduce_stale.then(|| {
            contract.stages.iter().map(|_| StockBuffer::new(CHUNK, config.index_topk)).collect()
        });
        let slices = contract
            .stages
            .into_iter()
            .map(|contract| device.load(config, &checkpoint, contract, blocks))
            .collect::<Result<_, VerifyError>>()?;
        Ok(Self {
            slices,
            stale,
            full_layers: config.schedule.full(),
            topk: config.index_topk,
            longest,
            step_id: 0,
        })
    }

    /// Runs `tokens` from position `start` on, and scores the tokens that follow each row.
    pub(crate) fn step(
        &mut self,
        tokens: &[u32],
        start: usize,
        targets: &[u32],
    ) -> Result<Answer, VerifyError> {
        self.step_id += 1;
        let rows = tokens.len();
        let blocks = (0..self.longest.div_ceil(BLOCK) as u32).collect();
        let scores =
            targets.iter().enumerate().map(|(row, &target)| ScoreRequest { row, target, top: 0 });
        let request = StepRequest {
            epoch: 1,
            step_id: self.step_id,
            batch: Batch {
                segments: vec![Segment { first_row: 0, rows, start, blocks }],
                padding: 0,
                block_size: BLOCK,
            },
            samples: vec![greedy(rows - 1)],
            scores: scores.collect(),
        };
        let positions: Vec<u32> = (start..start + rows).map(|p| p as u32).collect();
        let expected = ExpectedStep { epoch: 1, step_id: self.step_id, positions, padding: 0 };
        let long: Vec<usize> = (0..rows).filter(|row| start + row >= self.topk).collect();
        let mut answer = Answer::default();
        answer.seen.long = long.len();
        let mut wire: Option<HandOff> = None;
        for (stage, slice) in self.slices.iter_mut().enumerate() {
            let contract = slice.contract().clone();
            let refused = |reason: String| VerifyError::HandOff { stage, reason };
            let input = match wire.take() {
                None => StepInput::Tokens(tokens),
                Some(sent) => {
                    let limits = FrameLimits::from(&contract);
                    let bytes = encode(sent, &limits).to_bytes();
                    let received = decode(&bytes, &limits).map_err(|e| refused(e.to_string()))?;
                    let accepted = received.accept(&contract, &expected);
                    StepInput::HandOff(accepted.map_err(|e| refused(e.to_string()))?)
                }
            };
            let mut watch = Watch {
                stage,
                topk: self.topk,
                receives: contract.receives_from_layer.is_some(),
                full_layers: &self.full_layers,
                stale: self.stale.as_mut().map(|buffers| &mut buffers[stage]),
                long: long.clone(),
                seen: &mut answer.seen,
            };
            match slice.step(&request, input, &mut watch)? {
                StepOutput::HandOff(sent) => wire = Some(sent),
                StepOutput::Tokens { sampled, scored } => {
                    answer.next = sampled.first().map_or(0, |s| s.token);
                    answer.scores = scored.iter().map(|s| s.logprob).collect();
                }
            }
        }
        Ok(answer)
    }

    /// Greedy continuation of a prompt, until `stop` says so or `limit` tokens are there.
    pub(crate) fn generate(
        &mut self,
        prompt: &[u32],
        limit: usize,
        stop: impl Fn(&[u32]) -> bool,
    ) -> Result<Vec<u32>, VerifyError> {
        let mut next = 0;
        for start in (0..prompt.len()).step_by(CHUNK) {
            let end = (start + CHUNK).min(prompt.len());
            next = self.step(&prompt[start..end], start, &[])?.next;
        }
        let mut text = vec![next];
        while text.len() < limit && !stop(&text) && prompt.len() + text.len() < self.longest {
            let position = prompt.len() + text.len() - 1;
            text.push(self.step(&text[text.len() - 1..], position, &[])?.next);
        }
        Ok(text)
    }
}

fn greedy(row: usize) -> SampleRequest {
    SampleRequest {
        row,
        temperature: 0.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        seed: 0,
        draw: 0,
        logprobs: None,
        banned: Vec::new(),
        adjustments: Default::default(),
    }
}

#[cfg(test)]
mod tests;
