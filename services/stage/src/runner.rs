//! The compute thread: steps in order, one at a time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_kernels::Batch;
use baton_kernels::sampling::{Adjustments, Penalties, SampleRequest, ScoreRequest};
use baton_model::{StepInput, StepOutput, StepRequest};
use baton_plan::StageContract;
use baton_proto::v1;
use baton_telemetry::traces;
use baton_transport::ExpectedStep;
use baton_transport::link::{HandOffReceiver, HandOffSender, LinkStats};
use tokio::sync::mpsc;

use crate::block_tables::BlockTables;
use crate::engine::Engine;
use crate::times::{Arrived, Laps};
use crate::totals::{Totals, add};
use crate::trace::StepTraces;

/// A step that this stage could not run.
struct Failure {
    kind: &'static str,
    message: String,
}

/// Everything that one wiring needs.
pub(crate) struct Runner {
    pub(crate) epoch: u64,
    pub(crate) contract: StageContract,
    pub(crate) engine: Box<dyn Engine>,
    pub(crate) tables: BlockTables,
    pub(crate) receiver: Option<Box<dyn HandOffReceiver>>,
    pub(crate) sender: Option<Box<dyn HandOffSender>>,
    pub(crate) step_timeout: Duration,
    pub(crate) totals: Arc<Totals>,
    traces: StepTraces,
    /// What of the link's and the engine's own counts is in the totals.
    received: LinkStats,
    nan_scores: u64,
    /// After a failed step the next stages miss a frame: nothing later of this epoch may be answered.
    failed: Option<String>,
    /// Whether the engine itself failed: what it holds is not to be relied on.
    broken: bool,
}

impl Runner {
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new(
        epoch: u64,
        contract: StageContract,
        engine: Box<dyn Engine>,
        kv_blocks: u32,
        receiver: Option<Box<dyn HandOffReceiver>>,
        sender: Option<Box<dyn HandOffSender>>,
        step_timeout: Duration,
        totals: Arc<Totals>,
        traces: StepTraces,
    ) -> Self {
        let tables = BlockTables::new(kv_blocks, contract.block_size);
        let nan_scores = engine.nan_scores();
        Self {
            epoch,
            contract,
            engine,
            tables,
            receiver,
            sender,
            step_timeout,
            totals,
            traces,
            received: LinkStats::default(),
            nan_scores,
            failed: None,
            broken: false,
        }
    }

    /// Runs steps until the stream of them ends, or nobody waits for results; gives the engine back unless it failed.
    pub(crate) fn run(
        mut self,
        mut steps: mpsc::Receiver<Arrived>,
        results: &mpsc::Sender<v1::StepResult>,
    ) -> Option<Box<dyn Engine>> {
        while let Some(Arrived { mut step, at, unix_micros }) = steps.blocking_recv() {
            if results.is_closed() {
                break;
            }
            let mut result =
                v1::StepResult { epoch: step.epoch, step_id: step.step_id, ..Default::default() };
            let mut laps = Laps::since(at);
            let mut times = v1::StepTimes {
                arrived_unix_micros: unix_micros,
                queue_wait: laps.lap(),
                ..Default::default()
            };
            self.totals.begins();
            let mut kind = None;
            if let Err(failure) = self.step(&step, &mut result, &mut times, &mut laps) {
                // A link that breaks after the coordinator has gone is how a pipeline ends.
                if !results.is_closed() {
                    tracing::error!(
                        step = step.step_id,
                        kind = failure.kind,
                        trace_ids = trace_ids(&step),
                        "{}",
                        failure.message
                    );
                }
                kind = Some(failure.kind);
                self.failed.get_or_insert_with(|| failure.message.clone());
                result.failure = Some(v1::StepFailure {
                    stage: self.contract.stage as u32,
                    kind: failure.kind.into(),
                    message: failure.message,
                });
            }
            self.totals.ends(&times, kind);
            result.times = Some(times);
            let nan_scores = self.engine.nan_scores();
            add(&self.totals.nan_scores, nan_scores - self.nan_scores);
            self.nan_scores = nan_scores;
            self.traces.ran(&mut step, &result, kind);
            if results.blocking_send(result).is_err() {
                break;
            }
        }
        (!self.broken).then_some(self.engine)
    }

    fn step(
        &mut self,
        step: &v1::Step,
        result: &mut v1::StepResult,
        times: &mut v1::StepTimes,
        laps: &mut Laps,
    ) -> Result<(), Failure> {
        let stage = self.contract.stage;
        let bad = |message: String| Failure {
            kind: "bad-step",
            message: format!("stage {stage}, step {}: {message}", step.step_id),
        };
        if let Some(reason) = &self.failed {
            let message = format!("stage {stage}: an earlier step failed: {reason}");
            return Err(Failure { kind: "epoch-failed", message });
        }
        if step.epoch != self.epoch {
            return Err(bad(format!("epoch {}, expected {}", step.epoch, self.epoch)));
        }
        let segments = self.tables.apply(step).map_err(bad)?;
        self.totals.kv_blocks_held.store(self.tables.held(), Ordering::Relaxed);
        let request = request(step, segments, self.contract.block_size);
        let rows = request.batch.rows();
        if rows > self.contract.row_capacity {
            let capacity = self.contract.row_capacity;
            return Err(bad(format!("{rows} rows, the contract allows {capacity}")));
        }
        let deadline = Instant::now() + self.step_timeout;
        let tokens: Vec<u32>;
        let input = match &mut self.receiver {
            None => {
                tokens = step.segments.iter().flat_map(|s| s.token_ids.iter().copied()).collect();
                StepInput::Tokens(&tokens)
            }
            Some(receiver) => {
                let received = receiver.recv(step.step_id, deadline);
                times.receive_wait = laps.lap();
                let received = received.map_err(|e| Failure {
                    kind: e.kind(),
                    message: format!("stage {stage}, step {}: {e}", step.step_id),
                })?;
                let expected = ExpectedStep {
                    epoch: step.epoch,
                    step_id: step.step_id,
                    positions: request.batch.positions().map(|(_, p)| p as u32).collect(),
                    padding: request.batch.padding,
                };
                let accepted = received
                    .accept(&self.contract, &expected)
                    .map_err(|e| Failure { kind: e.kind(), message: e.to_string() })?;
                let stats = receiver.stats();
                let before = std::mem::replace(&mut self.received, stats);
                add(&self.totals.bytes_received, stats.payload_bytes - before.payload_bytes);
                let carried = stats.carry_entries - before.carry_entries;
                let topk = self.contract.index_topk.max(1) as u64;
                add(&self.totals.carry_rows_received, carried / topk);
                StepInput::HandOff(accepted)
            }
        };
        let engine = &mut self.engine;
        // A panic ends the step, not the process: the coordinator hears of it like of any other failure.
        let output = catch_unwind(AssertUnwindSafe(|| engine.run(&request, input)));
        times.compute = laps.lap();
        self.broken = !matches!(output, Ok(Ok(_)));
        let output = output
            .map_err(|_| Failure {
                kind: "panic",
                message: format!("stage {stage}, step {}: the engine panicked", step.step_id),
            })?
            .map_err(bad)?;
        add(&self.totals.rows, rows as u64);
        match (output, &mut self.sender) {
            (StepOutput::HandOff(hand_off), Some(sender)) => {
                let carry = hand_off
                    .carry
                    .as_ref()
                    .map_or(0, |c| c.indices.len() / self.contract.index_topk.max(1));
                let bytes = hand_off.hidden.len()
                    + carry * self.contract.index_topk * self.contract.index_dtype.size();
                let sent = sender.send(hand_off, deadline);
                times.send = laps.lap();
                sent.map_err(|e| Failure {
                    kind: e.kind(),
                    message: format!("stage {stage}, step {}: {e}", step.step_id),
                })?;
                result.handoff_bytes = bytes as u64;
                result.carry_rows = carry as u32;
                add(&self.totals.bytes_sent, bytes as u64);
                add(&self.totals.rows_sent, rows as u64);
                add(&self.totals.carry_rows_sent, carry as u64);
                Ok(())
            }
            (StepOutput::Tokens { sampled, scored }, None) => {
                answer(step, sampled, scored, result);
                Ok(())
            }
            _ => Err(bad("the slice's output does not fit its place in the pipeline".into())),
        }
    }
}

/// Traces of the requests with rows in a step, for log lines.
fn trace_ids(step: &v1::Step) -> String {
    let ids = step.segments.iter().map(|segment| traces::trace_id(&segment.traceparent));
    ids.filter(|id| !id.is_empty()).collect::<Vec<_>>().join(",")
}

fn adjustments(sampling: &v1::Sampling) -> Adjustments {
    Adjustments {
        allowed: sampling.allowed_tokens.clone(),
        bias: sampling.biased_tokens.iter().copied().zip(sampling.biases.iter().copied()).collect(),
        penalties: sampling.penalties.as_ref().map(|p| Penalties {
            presence: p.presence,
            frequency: p.frequency,
            repetition: p.repetition,
            seen: p.tokens.iter().copied().zip(p.generated.iter().copied()).collect(),
        }),
    }
}

/// The step in the model's terms.
fn request(
    step: &v1::Step,
    segments: Vec<baton_kernels::Segment>,
    block_size: usize,
) -> StepRequest {
    let (mut samples, mut scores) = (Vec::new(), Vec::new());
    for (message, segment) in step.segments.iter().zip(&segments) {
        if let Some(sampling) = &message.sampling {
            samples.push(SampleRequest {
                row: segment.first_row + segment.rows.saturating_sub(1),
                temperature: sampling.temperature,
                top_p: sampling.top_p,
                top_k: sampling.top_k as usize,
                min_p: sampling.min_p,
                seed: sampling.seed,
                draw: sampling.draw,
                logprobs: sampling.logprobs.map(|n| n as usize),
                banned: sampling.banned_tokens.clone(),
                adjustments: adjustments(sampling),
            });
        }
        if let Some(scoring) = &message.prompt_scoring {
            for (r, &target) in scoring.targets.iter().take(segment.rows).enumerate() {
                let row = segment.first_row + r;
                scores.push(ScoreRequest { row, target, top: scoring.top as usize });
            }
        }
    }
    StepRequest {
        epoch: step.epoch,
        step_id: step.step_id,
        batch: Batch { segments, padding: step.padding_rows as usize, block_size },
        samples,
        scores,
    }
}

/// What the last stage reports, segment by segment.
fn answer(
    step: &v1::Step,
    sampled: Vec<baton_kernels::sampling::Sampled>,
    scored: Vec<baton_kernels::sampling::Scored>,
    result: &mut v1::StepResult,
) {
    let top = |top: Vec<(u32, f32)>| {
        top.into_iter().map(|(token_id, logprob)| v1::TokenLogprob { token_id, logprob }).collect()
    };
    let wanting = step.segments.iter().filter(|s| s.sampling.is_some());
    result.sampled = wanting
        .zip(sampled)
        .map(|(segment, s)| v1::Sampled {
            sequence_id: segment.sequence_id,
            token_id: s.token,
            logprob: s.logprob,
            top: top(s.top),
        })
        .collect();
    let mut scored = scored.into_iter();
    result.prompt_scores = step
        .segments
        .iter()
        .filter_map(|segment| segment.prompt_scoring.as_ref().map(|scoring| (segment, scoring)))
        .map(|(segment, scoring)| v1::PromptScores {
            sequence_id: segment.sequence_id,
            tokens: scored
                .by_ref()
                .take(scoring.targets.len().min(segment.token_ids.len()))
                .map(|s| v1::ScoredToken { token_id: s.token, logprob: s.logprob, top: top(s.top) })
                .collect(),
        })
        .collect();
}

#[cfg(test)]
mod tests;
