//! The loop around the scheduler: steps to the stages, results back, failures to whoever waits.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_plan::Contract;
use baton_proto::v1;
use baton_proto::v1::stage_client::StageClient;
use baton_telemetry::Traces;
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::metrics::{Numbers, StepMeter};
use crate::prefix::BlockHash;
use crate::registry::Registry;
use crate::report;
use crate::request::{Event, Readiness, Submission};
use crate::scheduler::{Limits, Scheduler};
use crate::state::StateWriter;
use crate::timeline::Timeline;
use crate::trace::StepTraces;
use crate::wiring::Wired;

/// What the driver is told.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) contract: Contract,
    /// Set when prefixes are cached.
    pub(crate) cache_root: Option<BlockHash>,
    pub(crate) eos_token_ids: Vec<u32>,
    pub(crate) max_positions: usize,
    pub(crate) max_sequences: usize,
    pub(crate) step_rows: usize,
    pub(crate) prefill_chunk: usize,
    pub(crate) micro_batches: usize,
    pub(crate) step_timeout: Duration,
    pub(crate) numbers: Arc<Numbers>,
    pub(crate) timeline: Timeline,
    pub(crate) traces: Traces,
}

/// How often stages are asked for their state, and how long one may take to answer.
const POLL: Duration = Duration::from_secs(1);

/// A stage's answer, or why its stream ended.
type StageResult = (usize, Result<v1::StepResult, String>);

/// What ended a pipeline.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The stage it began with.
    pub(crate) stage: usize,
    pub(crate) reason: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stage {} {}", self.stage, self.reason)
    }
}

struct Pipeline {
    wired: Wired,
    settings: Settings,
    steps: Vec<mpsc::Sender<v1::Step>>,
    /// When each step was sent.
    sent: HashMap<u64, Instant>,
    scheduler: Scheduler,
    /// The last step that each stage has answered.
    answered: Vec<u64>,
    compute_micros: Vec<u64>,
    statuses: Statuses,
    meter: StepMeter,
    traces: StepTraces,
}

/// What every stage last said of itself, kept up to date by one task per stage.
struct Statuses {
    replies: Arc<Mutex<Vec<v1::StatusReply>>>,
    /// Ends the tasks when dropped.
    _tasks: JoinSet<()>,
}

/// Runs until `shutdown`; a failed pipeline stays up and answers that it is not ready.
pub(crate) async fn drive(
    settings: Settings,
    wired: Wired,
    registry: &Registry,
    mut submissions: mpsc::Receiver<Submission>,
    ready: &watch::Sender<Readiness>,
    state: &mut StateWriter,
    shutdown: &CancellationToken,
) {
    let (results, mut answers) = mpsc::channel::<StageResult>(256);
    let mut pipeline = Pipeline::new(settings, wired, results);
    let mut lost = registry.lost();
    let mut tick = tokio::time::interval(POLL);
    let failure = loop {
        while let Some(step) = pipeline.scheduler.next_step(Instant::now()) {
            pipeline.send(step).await;
        }
        pipeline.settings.numbers.scheduler(&pipeline.scheduler);
        tokio::select! {
            submission = submissions.recv() => match submission {
                Some(submission) => pipeline.scheduler.submit(submission),
                None => return,
            },
            Some((stage, result)) = answers.recv() => {
                if let Err(failure) = pipeline.take(stage, result) {
                    break failure;
                }
            }
            gone = gone(&mut lost) => break gone,
            _ = tick.tick() => {
                if let Some(failure) = pipeline.overdue() {
                    break failure;
                }
            }
            question = state.question() => {
                // One that was given up needs no answer.
                let _ = question.send(pipeline.state(None));
            }
            () = shutdown.cancelled() => {
                let reason = "the server is shutting down";
                ready.send_replace(Readiness::NotReady(reason.to_owned()));
                pipeline.scheduler.fail_all(reason);
                return refuse(submissions, reason).await;
            }
        }
    };
    let reason = failure.to_string();
    let trace_ids = pipeline.scheduler.trace_ids();
    tracing::error!(trace_ids, "the pipeline failed: {reason}");
    ready.send_replace(Readiness::NotReady(reason.clone()));
    pipeline.traces.failed(&reason);
    pipeline.scheduler.fail_all(&reason);
    pipeline.settings.numbers.failed(failure.stage);
    pipeline.settings.numbers.scheduler(&pipeline.scheduler);
    let last = pipeline.state(Some(&failure));
    let answering = state.answer(|| last.clone());
    tokio::pin!(answering);
    // What was submitted before the readiness dropped is told, not forgotten.
    loop {
        tokio::select! {
            submission = submissions.recv() => match submission {
                Some(submission) => fail(&submission, &reason),
                None => return,
            },
            never = &mut answering => match never {},
            () = shutdown.cancelled() => return refuse(submissions, &reason).await,
        }
    }
}

/// Takes no more submissions, and tells those that came already.
async fn refuse(mut submissions: mpsc::Receiver<Submission>, reason: &str) {
    submissions.close();
    // Ends when everything is taken whose sending had begun.
    while let Some(submission) = submissions.recv().await {
        fail(&submission, reason);
    }
}

fn fail(submission: &Submission, reason: &str) {
    // One whose client has gone needs no answer.
    let _ = submission.events.send(Event::Failed { message: reason.to_owned(), retryable: true });
}

/// Pends until a stage is lost, and says which.
async fn gone(lost: &mut watch::Receiver<Option<(usize, String)>>) -> Failure {
    match lost.wait_for(Option::is_some).await.map(|gone| gone.clone()) {
        Ok(Some((stage, reason))) => Failure { stage, reason: format!("was lost: {reason}") },
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

impl Statuses {
    fn follow(clients: &[StageClient<Channel>]) -> Self {
        let replies = Arc::new(Mutex::new(vec![v1::StatusReply::default(); clients.len()]));
        let mut tasks = JoinSet::new();
        for (stage, client) in clients.iter().enumerate() {
            let (mut client, replies) = (client.clone(), Arc::clone(&replies));
            tasks.spawn(async move {
                loop {
                    // A stage that does not answer is noticed by its heartbeat.
                    let poll = tokio::time::timeout(POLL, client.status(v1::StatusRequest {}));
                    if let Ok(Ok(reply)) = poll.await {
                        let mut replies = replies.lock().unwrap_or_else(PoisonError::into_inner);
                        replies[stage] = reply.into_inner();
                    }
                    tokio::time::sleep(POLL).await;
                }
            });
        }
        Self { replies, _tasks: tasks }
    }

    fn now(&self) -> Vec<v1::StatusReply> {
        self.replies.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Pipeline {
    fn new(settings: Settings, wired: Wired, results: mpsc::Sender<StageResult>) -> Self {
        let stages = settings.contract.stages.len();
        let block_size = settings.contract.stages.first().map_or(1, |s| s.block_size);
        let limits = Limits {
            step_rows: settings.step_rows,
            prefill_chunk: settings.prefill_chunk,
            micro_batches: settings.micro_batches,
            max_sequences: settings.max_sequences,
            max_positions: settings.max_positions,
            eos_token_ids: settings.eos_token_ids.clone(),
            cache_root: settings.cache_root,
        };
        Self {
            scheduler: Scheduler::new(limits, wired.kv_blocks, block_size, wired.epoch),
            steps: (0..stages).map(|stage| open(stage, &wired, results.clone())).collect(),
            sent: HashMap::new(),
            answered: vec![0; stages],
            compute_micros: vec![0; stages],
            statuses: Statuses::follow(&wired.clients),
            meter: StepMeter::wired(Arc::clone(&settings.numbers), wired.epoch, wired.kv_blocks),
            traces: StepTraces::new(settings.traces.clone()),
            wired,
            settings,
        }
    }

    async fn send(&mut self, mut step: v1::Step) {
        self.traces.left_queue(self.scheduler.left_queue());
        self.traces.sends(&mut step);
        let now = Instant::now();
        self.meter.sent(now);
        self.sent.insert(step.step_id, now);
        self.settings.timeline.sent(&step);
        for stage in &self.steps {
            // A stage whose stream has ended is reported by its results.
            let _ = stage.send(step.clone()).await;
        }
    }

    fn take(
        &mut self,
        stage: usize,
        result: Result<v1::StepResult, String>,
    ) -> Result<(), Failure> {
        let failed = |reason| Failure { stage, reason };
        let result = result.map_err(|reason| failed(format!("was lost: {reason}")))?;
        self.settings.timeline.answered(stage, &result);
        if let Some(failure) = &result.failure {
            return Err(failed(format!("failed ({}): {}", failure.kind, failure.message)));
        }
        self.meter.answered(stage, result.times, Instant::now());
        self.answered[stage] = result.step_id;
        self.compute_micros[stage] += result.times.map_or(0, |t| u64::from(t.compute));
        if stage + 1 == self.steps.len() {
            if let Some(sent) = self.sent.remove(&result.step_id) {
                self.meter.took(sent.elapsed());
            }
            self.traces.answered(result.step_id);
            self.scheduler.commit(result);
        }
        Ok(())
    }

    /// The stage that holds up a step which takes longer than a step may, with slack for the stages' own deadlines to
    /// speak first.
    fn overdue(&self) -> Option<Failure> {
        let limit = self.settings.step_timeout + Duration::from_secs(1);
        let (&step, since) = self.sent.iter().min_by_key(|(step, _)| **step)?;
        let elapsed = since.elapsed();
        // Stages answer in order: the first that lags is the one the others wait for.
        let stage = self.answered.iter().position(|answered| *answered < step)?;
        (elapsed > limit).then(|| Failure {
            stage,
            reason: format!(
                "has not answered step {step} for {:.1} s, longer than {:.1} s; the last step it answered is {}",
                elapsed.as_secs_f64(),
                limit.as_secs_f64(),
                self.answered[stage]
            ),
        })
    }

    fn state(&self, failure: Option<&Failure>) -> Value {
        report::running(&report::Running {
            contract: &self.settings.contract,
            wired: &self.wired,
            scheduler: &self.scheduler,
            prefix_cache: self.settings.cache_root.is_some(),
            statuses: &self.statuses.now(),
            compute_micros: &self.compute_micros,
            failure,
        })
    }
}
