//! What goes into a slice in one step, and what comes out.

use baton_kernels::Batch;
use baton_kernels::sampling::{SampleRequest, Sampled, ScoreRequest, Scored};
use baton_transport::{Accepted, HandOff};

/// One step, as every stage knows it.
#[derive(Clone, Debug)]
pub struct StepRequest {
    /// Wiring.
    pub epoch: u64,
    /// Step.
    pub step_id: u64,
    /// Rows, positions and block tables.
    pub batch: Batch,
    /// Tokens to draw, by row of the step; used by the last stage.
    pub samples: Vec<SampleRequest>,
    /// Tokens to score, by row of the step; used by the last stage.
    pub scores: Vec<ScoreRequest>,
}

/// Where the rows come from.
#[derive(Debug)]
pub enum StepInput<'a> {
    /// The first stage embeds token ids, one per real row.
    Tokens(&'a [u32]),
    /// Every other stage goes on with an accepted hand-off.
    HandOff(Accepted),
}

/// Where the rows go.
#[derive(Debug)]
pub enum StepOutput {
    /// To the next stage.
    HandOff(HandOff),
    /// The last stage answers.
    Tokens {
        /// One per sample request.
        sampled: Vec<Sampled>,
        /// One per score request.
        scored: Vec<Scored>,
    },
}
