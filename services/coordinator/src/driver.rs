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
use crate::report;
use crate::request::{Event, Readiness, Submission};
use crate::scheduler::{Limits, Scheduler};
use crate::state::StateWriter;
use crate::timeline::Timeline;
use crate::trace::StepTraces;
use crate::wiring::{Wired, Wiring};
use crate::{CoordinatorError, StartupEvent};

/// What the driver is told.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Set when prefixes are cached.
    pub(crate) cache_root: Option<BlockHash>,
    pub(crate) eos_token_ids: Vec<u32>,
    pub(crate) max_positions: usize,
    pub(crate) max_sequences: usize,
    pub(crate) step_rows: usize,
    pub(crate) prefill_chunk: usize,
    pub(crate) micro_batches: usize,
    pub(crate) step_timeout: Duration,
    /// How long requests wait for a failed pipeline to come back.
    pub(crate) recovery_timeout: Duration,
    pub(crate) numbers: Arc<Numbers>,
    pub(crate) timeline: Timeline,
    pub(crate) traces: Traces,
}

/// How often stages are asked for their state, and how long one may take to answer.
pub(crate) const POLL: Duration = Duration::from_secs(1);

/// The failure of a step whose neighbour's end of the link is gone, as `baton-transport` names it.
const LINK_CLOSED: &str = "link-closed";

/// A stage's answer, or why its stream ended.
type StageResult = (usize, Result<v1::StepResult, String>);

/// What ended a pipeline.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The stage it began with.
    pub(crate) stage: usize,
    pub(crate) reason: String,
    /// Whether somebody else will say it better: the registry, of a stage that is gone.
    secondhand: bool,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stage {} {}", self.stage, self.reason)
    }
}

/// One epoch.
struct Pipeline<'a> {
    wired: Wired,
    settings: &'a Settings,
    contract: &'a Contract,
    scheduler: &'a mut Scheduler,
    steps: Vec<mpsc::Sender<v1::Step>>,
    /// When each step was sent.
    sent: HashMap<u64, Instant>,
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

/// Runs one pipeline after the other, all for the same requests.
pub(crate) struct Driver {
    pub(crate) settings: Settings,
    pub(crate) wiring: Wiring,
    pub(crate) scheduler: Scheduler,
    pub(crate) inbox: Inbox,
}

/// What comes from outside, whatever the pipeline does.
pub(crate) struct Inbox {
    pub(crate) submissions: mpsc::Receiver<Submission>,
    pub(crate) ready: watch::Sender<Readiness>,
    pub(crate) state: StateWriter,
    pub(crate) shutdown: CancellationToken,
}

/// How a pipeline ends.
enum End {
    Failed(Failure),
    /// Nobody submits any more.
    Abandoned,
    Shutdown,
}

impl Driver {
    pub(crate) fn new(settings: Settings, wiring: Wiring, inbox: Inbox) -> Self {
        let limits = Limits {
            step_rows: settings.step_rows,
            prefill_chunk: settings.prefill_chunk,
            micro_batches: settings.micro_batches,
            max_sequences: settings.max_sequences,
            max_positions: settings.max_positions,
            eos_token_ids: settings.eos_token_ids.clone(),
            cache_root: settings.cache_root,
        };
        let block_size = wiring.contract.stages.first().map_or(1, |s| s.block_size);
        Self { settings, wiring, scheduler: Scheduler::new(limits, 0, block_size, 0), inbox }
    }

    /// Runs until `shutdown`.
    ///
    /// # Errors
    /// When the pipeline cannot be made for the first time. One that fails later is made again.
    pub(crate) async fn run(mut self) -> Result<(), CoordinatorError> {
        let Inbox { state, shutdown, .. } = &mut self.inbox;
        let starting = || report::starting(&self.wiring.contract, &self.wiring.startup.now());
        let mut wired = tokio::select! {
            wired = self.wiring.wire_first() => wired?,
            never = state.answer(starting) => match never {},
            () = shutdown.cancelled() => return Ok(()),
        };
        loop {
            let epoch = wired.epoch;
            self.scheduler.resume(wired.kv_blocks, epoch);
            self.wiring.startup.tell(StartupEvent::Ready { kv_blocks: wired.kv_blocks });
            let again = match self.epoch(wired).await {
                End::Failed(failure) => self.recover(&failure, epoch).await,
                End::Abandoned => return Ok(()),
                End::Shutdown => None,
            };
            match again {
                Some(again) => wired = again,
                None => break,
            }
        }
        self.end().await;
        Ok(())
    }

    /// Runs a wired pipeline as long as it lasts.
    async fn epoch(&mut self, wired: Wired) -> End {
        let Self { settings, wiring, scheduler, inbox } = self;
        let (results, mut answers) = mpsc::channel::<StageResult>(256);
        let mut pipeline = Pipeline::new(settings, &wiring.contract, wired, scheduler, results);
        let mut lost = wiring.registry.lost();
        let mut tick = tokio::time::interval(POLL);
        let failure = loop {
            while let Some(step) = pipeline.scheduler.next_step(Instant::now()) {
                pipeline.send(step).await;
            }
            settings.numbers.scheduler(pipeline.scheduler);
            tokio::select! {
                submission = inbox.submissions.recv() => match submission {
                    Some(submission) => pipeline.scheduler.submit(submission),
                    None => return End::Abandoned,
                },
                Some((stage, result)) = answers.recv() => {
                    if let Err(failure) = pipeline.take(stage, result) {
                        break cause(failure, &mut lost).await;
                    }
                }
                gone = gone(&mut lost) => break gone,
                _ = tick.tick() => {
                    if let Some(failure) = pipeline.overdue() {
                        break failure;
                    }
                }
                question = inbox.state.question() => {
                    // One that was given up needs no answer.
                    let _ = question.send(pipeline.state(wiring.registry.standbys()));
                }
                () = inbox.shutdown.cancelled() => return End::Shutdown,
            }
        };
        let reason = failure.to_string();
        tracing::error!(
            trace_ids = pipeline.scheduler.trace_ids(),
            "the pipeline failed: {reason}"
        );
        pipeline.traces.failed(&reason);
        settings.numbers.failed(failure.stage);
        End::Failed(failure)
    }

    /// Tells everybody that it is over.
    async fn end(&mut self) {
        let reason = "the server is shutting down";
        self.inbox.ready.send_replace(Readiness::NotReady(reason.to_owned()));
        self.scheduler.fail_all(reason);
        let submissions = &mut self.inbox.submissions;
        submissions.close();
        // Ends when everything is taken whose sending had begun.
        while let Some(submission) = submissions.recv().await {
            fail(&submission, reason);
        }
    }
}

/// Refuses a request.
pub(crate) fn fail(submission: &Submission, reason: &str) {
    // One whose client has gone needs no answer.
    let _ = submission.events.send(Event::Failed { message: reason.to_owned(), retryable: true });
}

/// Pends until a stage is lost, and says which.
async fn gone(lost: &mut watch::Receiver<Option<(usize, String)>>) -> Failure {
    match lost.wait_for(Option::is_some).await.map(|gone| gone.clone()) {
        Ok(Some((stage, reason))) => {
            Failure { stage, reason: format!("was lost: {reason}"), secondhand: false }
        }
        _ => std::future::pending().await,
    }
}

/// How long a stage that died may be known by its neighbours alone.
const HEARSAY: Duration = Duration::from_millis(300);

/// What a failure began with: of a stage that dies, its neighbours may tell before its own connection does.
async fn cause(failure: Failure, lost: &mut watch::Receiver<Option<(usize, String)>>) -> Failure {
    if !failure.secondhand {
        return failure;
    }
    tokio::time::timeout(HEARSAY, gone(lost)).await.unwrap_or(failure)
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

impl<'a> Pipeline<'a> {
    fn new(
        settings: &'a Settings,
        contract: &'a Contract,
        wired: Wired,
        scheduler: &'a mut Scheduler,
        results: mpsc::Sender<StageResult>,
    ) -> Self {
        let stages = contract.stages.len();
        Self {
            contract,
            scheduler,
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
        let failed = |reason| Failure { stage, reason, secondhand: false };
        let result = result.map_err(|reason| {
            let reason = format!("was lost: {reason}");
            Failure { secondhand: true, ..failed(reason) }
        })?;
        self.settings.timeline.answered(stage, &result);
        if let Some(failure) = &result.failure {
            let reason = format!("failed ({}): {}", failure.kind, failure.message);
            return Err(Failure { secondhand: failure.kind == LINK_CLOSED, ..failed(reason) });
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
            secondhand: false,
            reason: format!(
                "has not answered step {step} for {:.1} s, longer than {:.1} s; the last step it answered is {}",
                elapsed.as_secs_f64(),
                limit.as_secs_f64(),
                self.answered[stage]
            ),
        })
    }

    fn state(&self, standbys: usize) -> Value {
        report::running(&report::Running {
            contract: self.contract,
            wired: &self.wired,
            scheduler: self.scheduler,
            statuses: &self.statuses.now(),
            compute_micros: &self.compute_micros,
            standbys,
        })
    }
}
