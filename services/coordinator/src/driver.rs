//! The loop around the scheduler: steps to the stages, results back, failures to whoever waits.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_plan::Contract;
use baton_proto::v1;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

use crate::registry::Registry;
use crate::request::{Event, Readiness, Submission};
use crate::scheduler::{Limits, Scheduler};
use crate::wiring::Wired;

/// What the driver is told.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) contract: Contract,
    pub(crate) eos_token_ids: Vec<u32>,
    pub(crate) max_positions: usize,
    pub(crate) max_sequences: usize,
    pub(crate) step_rows: usize,
    pub(crate) prefill_chunk: usize,
    pub(crate) micro_batches: usize,
    pub(crate) step_timeout: Duration,
}

/// A stage's answer, or why its stream ended.
type StageResult = (usize, Result<v1::StepResult, String>);

struct Pipeline {
    wired: Wired,
    settings: Settings,
    steps: Vec<mpsc::Sender<v1::Step>>,
    /// When each step was sent.
    sent: HashMap<u64, Instant>,
    scheduler: Scheduler,
    compute_micros: Vec<u64>,
    statuses: Vec<v1::StatusReply>,
}

/// Runs until the submissions end; a failed pipeline stays up and answers that it is not ready.
pub(crate) async fn drive(
    settings: Settings,
    wired: Wired,
    registry: &Registry,
    mut submissions: mpsc::Receiver<Submission>,
    ready: &watch::Sender<Readiness>,
    state: &watch::Sender<Arc<Value>>,
) {
    let stages = settings.contract.stages.len();
    let block_size = settings.contract.stages.first().map_or(1, |s| s.block_size);
    let limits = Limits {
        step_rows: settings.step_rows,
        prefill_chunk: settings.prefill_chunk,
        micro_batches: settings.micro_batches,
        max_sequences: settings.max_sequences,
        max_positions: settings.max_positions,
        eos_token_ids: settings.eos_token_ids.clone(),
    };
    let scheduler = Scheduler::new(limits, wired.kv_blocks, block_size, wired.epoch);
    let (results, mut answers) = mpsc::channel::<StageResult>(256);
    let steps = (0..stages).map(|stage| open(stage, &wired, results.clone())).collect();
    let mut pipeline = Pipeline {
        compute_micros: vec![0; stages],
        statuses: vec![v1::StatusReply::default(); stages],
        wired,
        settings,
        steps,
        sent: HashMap::new(),
        scheduler,
    };
    let mut lost = registry.lost();
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    let failure = loop {
        while let Some(step) = pipeline.scheduler.next_step() {
            pipeline.send(&step).await;
        }
        tokio::select! {
            submission = submissions.recv() => match submission {
                Some(submission) => pipeline.scheduler.submit(submission),
                None => return,
            },
            Some((stage, result)) = answers.recv() => {
                if let Err(reason) = pipeline.take(stage, result) {
                    break reason;
                }
            }
            gone = gone(&mut lost) => break gone,
            _ = tick.tick() => {
                if let Some(reason) = pipeline.overdue() {
                    break reason;
                }
                pipeline.poll().await;
                state.send_replace(Arc::new(pipeline.state(None)));
            }
        }
    };
    tracing::error!("the pipeline failed: {failure}");
    ready.send_replace(Readiness::NotReady(failure.clone()));
    pipeline.scheduler.fail_all(&failure);
    state.send_replace(Arc::new(pipeline.state(Some(&failure))));
    // What was submitted before the readiness dropped is told, not forgotten.
    while let Some(submission) = submissions.recv().await {
        let event = Event::Failed { message: failure.clone(), retryable: true };
        let _ = submission.events.send(event);
    }
}

/// Pends until a stage is lost, and says which.
async fn gone(lost: &mut watch::Receiver<Option<(usize, String)>>) -> String {
    match lost.wait_for(Option::is_some).await.map(|gone| gone.clone()) {
        Ok(Some((stage, reason))) => format!("stage {stage} was lost: {reason}"),
        _ => std::future::pending().await,
    }
}

/// Opens a stage's stream of steps.
fn open(stage: usize, wired: &Wired, results: mpsc::Sender<StageResult>) -> mpsc::Sender<v1::Step> {
    let (steps, outgoing) = mpsc::channel(64);
    let mut client = wired.clients[stage].clone();
    tokio::spawn(async move {
        let mut answers = match client.run(ReceiverStream::new(outgoing)).await {
            Ok(response) => response.into_inner(),
            Err(status) => {
                let _ = results.send((stage, Err(status.message().to_owned()))).await;
                return;
            }
        };
        loop {
            let result = match answers.message().await {
                Ok(Some(result)) => Ok(result),
                Ok(None) => Err("it ended its stream of results".to_owned()),
                Err(status) => Err(format!("its connection broke ({})", status.message())),
            };
            let last = result.is_err();
            if results.send((stage, result)).await.is_err() || last {
                return;
            }
        }
    });
    steps
}

impl Pipeline {
    async fn send(&mut self, step: &v1::Step) {
        self.sent.insert(step.step_id, Instant::now());
        for stage in &self.steps {
            // A stage whose stream has ended is reported by its results.
            let _ = stage.send(step.clone()).await;
        }
    }

    fn take(&mut self, stage: usize, result: Result<v1::StepResult, String>) -> Result<(), String> {
        let result = result.map_err(|reason| format!("stage {stage} was lost: {reason}"))?;
        if let Some(failure) = &result.failure {
            return Err(format!("stage {stage} failed ({}): {}", failure.kind, failure.message));
        }
        self.compute_micros[stage] += result.times.map_or(0, |t| u64::from(t.compute));
        if stage + 1 == self.steps.len() {
            self.sent.remove(&result.step_id);
            self.scheduler.commit(result);
        }
        Ok(())
    }

    /// A step that takes longer than a step may, with slack for the stage's own deadline to speak first.
    fn overdue(&self) -> Option<String> {
        let limit = self.settings.step_timeout + Duration::from_secs(1);
        let (step, since) = self.sent.iter().find(|(_, since)| since.elapsed() > limit)?;
        Some(format!("step {step} has taken {:?}, longer than {limit:?}", since.elapsed()))
    }

    async fn poll(&mut self) {
        for (client, status) in self.wired.clients.iter().zip(&mut self.statuses) {
            let mut client = client.clone();
            let poll = client.status(v1::StatusRequest {});
            // A stage that does not answer is noticed by its heartbeat.
            if let Ok(Ok(reply)) = tokio::time::timeout(Duration::from_millis(500), poll).await {
                *status = reply.into_inner();
            }
        }
    }

    fn state(&self, failure: Option<&str>) -> Value {
        let (running, waiting) = self.scheduler.live();
        let stages: Vec<Value> = self
            .settings
            .contract
            .stages
            .iter()
            .map(|contract| {
                let at = contract.stage;
                let status = &self.statuses[at];
                json!({
                    "index": at,
                    "layers": [contract.layers.start, contract.layers.end],
                    "state": if failure.is_some() { "failed" } else { "wired" },
                    "backend": self.wired.backends[at],
                    "link": self.wired.links[at],
                    "receives_from_layer": contract.receives_from_layer,
                    "sends_from_layer": contract.sends_from_layer,
                    "handoff_bytes_per_row": contract.handoff_bytes_per_row(),
                    "bytes_read": status.bytes_read,
                    "kv_blocks": status.kv_blocks,
                    "steps_done": status.steps_done,
                    "compute_micros": self.compute_micros[at],
                    "handoff_bytes_sent": status.handoff_bytes_sent,
                    "handoff_rows_sent": status.handoff_rows_sent,
                    "carry_rows_sent": status.carry_rows_sent,
                    "nan_scores": status.nan_scores,
                })
            })
            .collect();
        json!({
            "epoch": self.wired.epoch,
            "failure": failure,
            "kv_blocks": {"total": self.wired.kv_blocks, "free": self.scheduler.free_blocks()},
            "running": running,
            "waiting": waiting,
            "steps_in_flight": self.scheduler.steps_in_flight(),
            "stages": stages,
        })
    }
}
