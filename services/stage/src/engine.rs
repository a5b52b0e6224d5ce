//! What computes a step.

use std::time::Duration;

use baton_kernels::Backend;
use baton_kernels::sampling::{Sampled, Scored};
use baton_model::{Slice, StepInput, StepOutput, StepRequest};
use baton_plan::StageContract;
use baton_transport::{HandOff, SentCarry};

/// Runs steps of one slice.
pub trait Engine: Send {
    /// Runs one step.
    ///
    /// # Errors
    /// One sentence that says what is wrong with the step.
    fn run(&mut self, request: &StepRequest, input: StepInput<'_>) -> Result<StepOutput, String>;
    /// Scores that were not numbers.
    fn nan_scores(&self) -> u64;
}

impl<B: Backend> Engine for Slice<B> {
    fn run(&mut self, request: &StepRequest, input: StepInput<'_>) -> Result<StepOutput, String> {
        self.forward(request, input).map_err(|e| e.to_string())
    }

    fn nan_scores(&self) -> u64 {
        self.backend().nan_scores()
    }
}

/// Sleeps instead of computing and keeps the contract: what control plane and links cost can be measured against it.
#[derive(Debug)]
pub struct DelayEngine {
    contract: StageContract,
    delay: Duration,
}

impl DelayEngine {
    /// An engine that takes `delay` for every step.
    #[must_use]
    pub fn new(contract: StageContract, delay: Duration) -> Self {
        Self { contract, delay }
    }
}

impl Engine for DelayEngine {
    fn run(&mut self, request: &StepRequest, _: StepInput<'_>) -> Result<StepOutput, String> {
        std::thread::sleep(self.delay);
        let contract = &self.contract;
        if contract.is_last() {
            let token = |draw: u64| (draw % 1000) as u32;
            let sampled = request.samples.iter().map(|s| Sampled {
                token: token(s.draw),
                logprob: 0.0,
                top: vec![],
            });
            let scored = request.scores.iter().map(|s| Scored {
                token: s.target,
                logprob: 0.0,
                top: vec![],
            });
            return Ok(StepOutput::Tokens { sampled: sampled.collect(), scored: scored.collect() });
        }
        let rows = request.batch.rows();
        let topk = contract.index_topk;
        let long = request.batch.positions().filter(|(_, p)| *p >= topk).count();
        Ok(StepOutput::HandOff(HandOff {
            epoch: request.epoch,
            step_id: request.step_id,
            rows,
            hidden: vec![0; rows * contract.hidden_size * contract.hidden_dtype.size()],
            residual: None,
            carry: contract.sends_from_layer.map(|source_layer| SentCarry {
                epoch: request.epoch,
                step_id: request.step_id,
                source_layer,
                indices: (0..long).flat_map(|_| 0..topk as i32).collect(),
            }),
        }))
    }

    fn nan_scores(&self) -> u64 {
        0
    }
}
