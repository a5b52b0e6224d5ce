//! The gRPC service.

use std::net::TcpListener;
use std::ops::Range;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_model::Checkpoint;
use baton_plan::{LinkKind, ModelConfig, StageContract};
use baton_proto::v1;
use baton_telemetry::Traces;
use baton_transport::FrameLimits;
use baton_transport::link::{self, HandOffReceiver, HandOffSender, Hello};
use futures::Stream;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::engine::{DelayEngine, Engine};
use crate::load::{self, Load};
use crate::runner::Runner;
use crate::times::Arrived;
use crate::totals::{Counts, Totals};
use crate::trace::StepTraces;
use crate::{BackendKind, StageConfig, StageError};

/// How long after its time a step is called stuck: its own deadline speaks first.
const SLACK: Duration = Duration::from_secs(5);
/// Steps that may wait in front of the compute thread.
const QUEUE: usize = 64;

/// A stage's own reading of its model directory.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) checkpoint: Checkpoint,
}

impl Model {
    pub(crate) fn open(dir: &Path, stage: &StageConfig) -> Result<Self, StageError> {
        let config = ModelConfig::load(dir)?.with_latent_norm_eps(stage.latent_norm_eps);
        Ok(Self { config, checkpoint: Checkpoint::open(dir)? })
    }
}

/// What the stage holds, whatever connection asks.
pub(crate) struct Host {
    pub(crate) model: Option<Model>,
    backend: BackendKind,
    threads: Option<usize>,
    memory_bytes: Option<u64>,
    links: Arc<TcpListener>,
    pub(crate) totals: Arc<Totals>,
    traces: Traces,
    /// Held while a slice is loaded or links are made: a coordinator that gave up may ask again meanwhile.
    changing: Mutex<()>,
    state: Mutex<State>,
    /// Told when a runner gives its engine back.
    returned: Condvar,
}

/// What others see of the host at one moment.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) phase: v1::StageState,
    /// Wired, and its steps make progress.
    pub(crate) ready: bool,
    pub(crate) epoch: u64,
    pub(crate) joins: u64,
    /// Once the stage knows it.
    pub(crate) index: Option<usize>,
    pub(crate) layers: Option<Range<usize>>,
    last: bool,
    pub(crate) link: String,
    pub(crate) kv_blocks: u32,
    pub(crate) bytes_needed: u64,
    pub(crate) load_seconds: f64,
}

impl View {
    /// Name of the cut in front of this stage: "0-1".
    pub(crate) fn cut_before(&self) -> Option<String> {
        let index = self.index.filter(|_| self.layers.is_some())?;
        Some(format!("{}-{index}", index.checked_sub(1)?))
    }

    /// Name of the cut behind it.
    pub(crate) fn cut_after(&self) -> Option<String> {
        let index = self.index.filter(|_| self.layers.is_some() && !self.last)?;
        Some(format!("{index}-{}", index + 1))
    }
}

#[derive(Default)]
struct State {
    phase: v1::StageState,
    epoch: u64,
    joins: u64,
    index: Option<usize>,
    contract: Option<StageContract>,
    /// Absent while a runner has it, and after it failed.
    engine: Option<Box<dyn Engine>>,
    /// Whether a runner has it.
    lent: bool,
    /// What the engine was loaded for, and what came of it.
    loaded: Option<(v1::LoadRequest, v1::LoadDone)>,
    wired: Option<Wired>,
    bytes_read: u64,
    kv_blocks: u32,
    link: String,
    failure: String,
    bytes_needed: u64,
    load_seconds: f64,
    step_timeout: Duration,
    /// Totals when the stage was wired.
    before: Counts,
}

/// Links that wait for `Run`.
struct Wired {
    receiver: Option<Box<dyn HandOffReceiver>>,
    sender: Option<Box<dyn HandOffSender>>,
    kv_blocks: u32,
    step_timeout: Duration,
}

impl Host {
    pub(crate) fn new(config: &StageConfig, model: Option<Model>, links: TcpListener) -> Self {
        Self {
            model,
            backend: config.backend,
            threads: config.threads,
            memory_bytes: config.memory_bytes,
            links: Arc::new(links),
            totals: Arc::new(Totals::new()),
            traces: config.traces.clone(),
            changing: Mutex::new(()),
            returned: Condvar::new(),
            state: Mutex::new(State {
                phase: v1::StageState::Joined,
                index: config.preferred_index.map(|index| index as usize),
                ..State::default()
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change under the lock is a plain assignment, so the state of a panicked holder is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn backend_name(&self) -> &'static str {
        match self.backend {
            BackendKind::Cpu => "cpu",
            BackendKind::Cuda { .. } => "cuda",
            BackendKind::Delay(_) => "delay",
        }
    }

    pub(crate) fn heartbeat(&self) -> v1::Heartbeat {
        let state = self.state();
        v1::Heartbeat {
            steps_done: self.totals.now().since(state.before).steps,
            state: state.phase as i32,
        }
    }

    /// The coordinator has given this stage an index.
    pub(crate) fn joined(&self, index: u32) {
        let mut state = self.state();
        state.index = Some(index as usize);
        state.joins += 1;
    }

    /// Whether a step takes longer than a step may.
    pub(crate) fn stuck(&self) -> bool {
        let limit = self.state().step_timeout + SLACK;
        self.totals.running().is_some_and(|running| running > limit)
    }

    pub(crate) fn view(&self) -> View {
        let stuck = self.stuck();
        let state = self.state();
        // Whoever is wired waits for the stream of steps, or runs it.
        let runs = state.wired.is_some() || state.lent;
        let failed = self.totals.now().since(state.before).failed_steps > 0;
        View {
            phase: state.phase,
            ready: state.phase == v1::StageState::Wired && runs && !failed && !stuck,
            epoch: state.epoch,
            joins: state.joins,
            index: state.index,
            layers: state.contract.as_ref().map(|contract| contract.layers.clone()),
            last: state.contract.as_ref().is_none_or(StageContract::is_last),
            link: state.link.clone(),
            kv_blocks: state.kv_blocks,
            bytes_needed: state.bytes_needed,
            load_seconds: state.load_seconds,
        }
    }

    /// Bytes of the checkpoint's files that were read, at any time.
    pub(crate) fn checkpoint_bytes_read(&self) -> u64 {
        self.model.as_ref().map_or(0, |model| model.checkpoint.bytes_read())
    }

    /// Drops links that no runner has taken.
    pub(crate) fn unwire(&self) {
        self.state().wired = None;
    }

    fn load(
        &self,
        request: v1::LoadRequest,
        progress: &mpsc::Sender<Result<v1::LoadEvent, Status>>,
    ) -> Result<v1::LoadDone, String> {
        let _alone = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let started = Instant::now();
        let message = request.contract.clone().ok_or("the load request has no contract")?;
        let contract = crate::contract::from_message(message)?;
        {
            // A runner of an earlier wiring ends once its links are gone.
            let state = self.state();
            let mut state = self
                .returned
                .wait_while(state, |state| state.lent)
                .unwrap_or_else(PoisonError::into_inner);
            if let (Some((of, done)), Some(_)) = (&state.loaded, &state.engine)
                && *of == request
            {
                let done = v1::LoadDone { held: true, seconds: 0.0, ..done.clone() };
                state.phase = v1::StageState::Loaded;
                return Ok(done);
            }
            state.phase = v1::StageState::Loading;
            state.engine = None;
            state.loaded = None;
        }
        let (engine, done): (Box<dyn Engine>, _) = match (self.backend, &self.model) {
            (BackendKind::Delay(delay), _) => {
                let kv_blocks = match request.max_kv_blocks {
                    0 => load::default_blocks(contract.block_size),
                    n => n,
                };
                let engine = Box::new(DelayEngine::new(contract.clone(), delay));
                let device = format!("sleeps {delay:?} a step");
                (engine, v1::LoadDone { kv_blocks, device, ..Default::default() })
            }
            (backend, Some(model)) => {
                // A stage may be loaded more than once in its life; an index was read before the first time.
                let first = self.state().bytes_read == 0;
                let load = Load {
                    model,
                    backend,
                    threads: self.threads,
                    memory_bytes: self.memory_bytes,
                    contract: &contract,
                    request: &request,
                    before: if first { 0 } else { model.checkpoint.bytes_read() },
                    progress,
                };
                load.run()?
            }
            (_, None) => return Err("this stage has no model directory".into()),
        };
        let mut state = self.state();
        let seconds = started.elapsed().as_secs_f64();
        state.engine = Some(engine);
        state.index = Some(contract.stage);
        state.contract = Some(contract);
        state.phase = v1::StageState::Loaded;
        state.bytes_read = done.bytes_read;
        state.kv_blocks = done.kv_blocks;
        state.bytes_needed = done.bytes_needed;
        state.load_seconds = seconds;
        let done = v1::LoadDone { seconds, ..done };
        state.loaded = Some((request, done.clone()));
        Ok(done)
    }

    fn wire(&self, request: &v1::WireRequest) -> Result<v1::WireReply, String> {
        let _alone = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        self.unwire();
        let contract = self.state().contract.clone().ok_or("wired before it was loaded")?;
        let kind: LinkKind = request.link.parse().map_err(|e| format!("{e}"))?;
        let deadline = Instant::now() + Duration::from_millis(request.timeout_millis.into());
        let limits = FrameLimits::from(&contract);
        let hello = |from_stage| Hello {
            epoch: request.epoch,
            from_stage,
            contract_digest: request.contract_digest.clone(),
            link: kind,
        };
        let (receiver, sender) = std::thread::scope(|scope| {
            let receiving = (!contract.is_first()).then(|| {
                let hello = hello(contract.stage - 1);
                scope.spawn(move || link::accept(&self.links, &hello, limits, deadline))
            });
            let sender = request
                .next_address
                .as_ref()
                .map(|next| link::connect(next, &hello(contract.stage), limits, deadline));
            let receiver = receiving.map(|thread| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            (receiver.transpose(), sender.transpose())
        });
        let receiver = receiver.map_err(|e| e.to_string())?;
        let sender = sender.map_err(|e| e.to_string())?;
        let link = if sender.is_some() { kind.name() } else { "" };
        let mut state = self.state();
        let step_timeout = Duration::from_millis(request.step_timeout_millis.into());
        state.wired = Some(Wired {
            receiver: receiver.map(|r| Box::new(r) as Box<dyn HandOffReceiver>),
            sender: sender.map(|s| Box::new(s) as Box<dyn HandOffSender>),
            kv_blocks: request.kv_blocks,
            step_timeout,
        });
        state.step_timeout = step_timeout;
        state.epoch = request.epoch;
        state.phase = v1::StageState::Wired;
        state.link = link.into();
        state.before = self.totals.now();
        state.failure.clear();
        Ok(v1::WireReply { link: link.into() })
    }

    fn runner(&self) -> Result<Runner, String> {
        let mut state = self.state();
        let wired = state.wired.take().ok_or("run before it was wired")?;
        let engine = state.engine.take().ok_or("another stream of steps is still running")?;
        state.lent = true;
        let contract = state.contract.clone().ok_or("run before it was loaded")?;
        let traces = StepTraces::start(&self.traces, contract.stage, contract.layers.clone());
        Ok(Runner::new(
            state.epoch,
            contract,
            engine,
            wired.kv_blocks,
            wired.receiver,
            wired.sender,
            wired.step_timeout,
            Arc::clone(&self.totals),
            traces,
        ))
    }

    /// A runner has ended; an engine that failed is not among what it gives back.
    fn finished(&self, engine: Option<Box<dyn Engine>>) {
        let mut state = self.state();
        state.engine = engine;
        state.lent = false;
        self.returned.notify_all();
    }

    fn status(&self) -> v1::StatusReply {
        let state = self.state();
        let counts = self.totals.now().since(state.before);
        v1::StatusReply {
            state: state.phase as i32,
            epoch: state.epoch,
            steps_done: counts.steps,
            contract: None,
            bytes_read: state.bytes_read,
            kv_blocks: state.kv_blocks,
            backend: self.backend_name().into(),
            link: state.link.clone(),
            handoff_bytes_sent: counts.bytes_sent,
            handoff_rows_sent: counts.rows_sent,
            carry_rows_sent: counts.carry_rows_sent,
            handoff_bytes_received: counts.bytes_received,
            carry_rows_received: counts.carry_rows_received,
            failure: state.failure.clone(),
            nan_scores: counts.nan_scores,
            kv_blocks_held: self.totals.kv_blocks_held.load(Ordering::Relaxed),
        }
    }

    fn fail(&self, reason: &str) {
        let mut state = self.state();
        state.phase = v1::StageState::Failed;
        reason.clone_into(&mut state.failure);
    }
}

/// `Stage`, over a [`Host`].
#[derive(Clone)]
pub(crate) struct StageService {
    host: Arc<Host>,
}

impl StageService {
    pub(crate) fn new(host: Arc<Host>) -> Self {
        Self { host }
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl v1::stage_server::Stage for StageService {
    type LoadStream = ReceiverStream<Result<v1::LoadEvent, Status>>;
    type RunStream = Answers<v1::StepResult>;

    async fn load(
        &self,
        request: Request<v1::LoadRequest>,
    ) -> Result<Response<Self::LoadStream>, Status> {
        let (events, receiver) = mpsc::channel(16);
        let host = Arc::clone(&self.host);
        tokio::task::spawn_blocking(move || {
            let last = match host.load(request.into_inner(), &events) {
                Ok(done) => Ok(v1::LoadEvent { event: Some(v1::load_event::Event::Done(done)) }),
                Err(reason) => {
                    host.fail(&reason);
                    Err(Status::failed_precondition(reason))
                }
            };
            let _ = events.blocking_send(last);
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn wire(
        &self,
        request: Request<v1::WireRequest>,
    ) -> Result<Response<v1::WireReply>, Status> {
        let host = Arc::clone(&self.host);
        let wiring = tokio::task::spawn_blocking(move || host.wire(&request.into_inner()));
        let reply = wiring.await.map_err(|e| Status::internal(e.to_string()))?;
        reply.map(Response::new).map_err(Status::failed_precondition)
    }

    async fn run(
        &self,
        request: Request<Streaming<v1::Step>>,
    ) -> Result<Response<Self::RunStream>, Status> {
        let runner = self.host.runner().map_err(Status::failed_precondition)?;
        let (queue, steps) = mpsc::channel(QUEUE);
        let (results, answers) = mpsc::channel(QUEUE);
        let mut incoming = request.into_inner();
        tokio::spawn(async move {
            while let Some(Ok(step)) = incoming.next().await {
                if queue.send(Arrived::now(step)).await.is_err() {
                    break;
                }
            }
        });
        let host = Arc::clone(&self.host);
        std::thread::Builder::new()
            .name("compute".into())
            .spawn(move || host.finished(runner.run(steps, &results)))
            .map_err(|e| Status::internal(e.to_string()))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(answers).map(Ok))))
    }

    async fn status(
        &self,
        _: Request<v1::StatusRequest>,
    ) -> Result<Response<v1::StatusReply>, Status> {
        Ok(Response::new(self.host.status()))
    }

    async fn drain(
        &self,
        _: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainReply>, Status> {
        self.host.state().phase = v1::StageState::Draining;
        self.host.unwire();
        Ok(Response::new(v1::DrainReply {}))
    }
}
