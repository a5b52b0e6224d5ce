//! Stages that speak the protocol and misbehave on request, and a coordinator for them.

use std::pin::Pin;
use std::time::Duration;

use baton_coordinator::{
    Coordinator, CoordinatorConfig, CoordinatorError, CoordinatorHandle, Event, GenerateRequest,
    Readiness,
};
use baton_plan::{Contract, HiddenDtype, IndexDtype, StageContract};
use baton_proto::v1;
use baton_proto::v1::stage_event::Event as StageEvent;
use futures::{Stream, StreamExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

/// How a stage behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behaviour {
    Sound,
    /// Takes the load request and never answers.
    HangsInLoad,
    /// Takes steps and never answers.
    HangsInSteps,
    /// Reports that it could not run the step.
    FailsSteps,
    /// Never answers a status request.
    HangsInStatus,
    /// Answers a prompt of this many tokens without the token that was asked for.
    ForgetsTokenAfter(usize),
}

/// Where the requests' trace contexts go that a stage finds in its steps.
pub(crate) type Traces = mpsc::UnboundedSender<String>;

struct FakeStage {
    stage: u32,
    last: bool,
    behaviour: Behaviour,
    traces: Option<Traces>,
}

type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

async fn for_ever<T>() -> T {
    std::future::pending().await
}

#[tonic::async_trait]
impl v1::stage_server::Stage for FakeStage {
    type LoadStream = Replies<v1::LoadEvent>;
    type RunStream = Replies<v1::StepResult>;

    async fn load(
        &self,
        _: Request<v1::LoadRequest>,
    ) -> Result<Response<Self::LoadStream>, Status> {
        if self.behaviour == Behaviour::HangsInLoad {
            return for_ever().await;
        }
        let done = v1::LoadDone { kv_blocks: 64, ..Default::default() };
        let event = v1::LoadEvent { event: Some(v1::load_event::Event::Done(done)) };
        Ok(Response::new(Box::pin(futures::stream::iter([Ok(event)]))))
    }

    async fn wire(&self, _: Request<v1::WireRequest>) -> Result<Response<v1::WireReply>, Status> {
        Ok(Response::new(v1::WireReply::default()))
    }

    async fn run(
        &self,
        request: Request<Streaming<v1::Step>>,
    ) -> Result<Response<Self::RunStream>, Status> {
        let mut steps = request.into_inner();
        let (stage, last, behaviour) = (self.stage, self.last, self.behaviour);
        let traces = self.traces.clone();
        Ok(Response::new(Box::pin(async_stream::stream! {
            while let Some(Ok(step)) = steps.next().await {
                if behaviour == Behaviour::HangsInSteps {
                    for_ever::<()>().await;
                }
                if let Some(traces) = &traces {
                    step.segments.iter().for_each(|s| traces.send(s.traceparent.clone()).unwrap());
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
                yield Ok(answer(&step, stage, last, behaviour));
            }
        })))
    }

    async fn status(
        &self,
        _: Request<v1::StatusRequest>,
    ) -> Result<Response<v1::StatusReply>, Status> {
        if self.behaviour == Behaviour::HangsInStatus {
            return for_ever().await;
        }
        Ok(Response::new(v1::StatusReply { steps_done: 7, ..Default::default() }))
    }

    async fn drain(
        &self,
        _: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainReply>, Status> {
        Ok(Response::new(v1::DrainReply {}))
    }
}

fn answer(step: &v1::Step, stage: u32, last: bool, behaviour: Behaviour) -> v1::StepResult {
    let mut result =
        v1::StepResult { epoch: step.epoch, step_id: step.step_id, ..Default::default() };
    result.times = Some(v1::StepTimes { compute: 5000 + stage, ..Default::default() });
    if behaviour == Behaviour::FailsSteps {
        let (kind, message) = ("stale-carry".to_owned(), "rows of step 3".to_owned());
        result.failure = Some(v1::StepFailure { stage, kind, message });
        return result;
    }
    let sampled = step.segments.iter().filter(|s| last && s.sampling.is_some()).filter(|s| {
        behaviour != Behaviour::ForgetsTokenAfter(s.start_position as usize + s.token_ids.len())
    });
    result.sampled = sampled
        .map(|s| v1::Sampled {
            sequence_id: s.sequence_id,
            token_id: s.token_ids.last().map_or(1, |token| token % 50 + 1),
            ..Default::default()
        })
        .collect();
    result
}

/// A coordinator and what belongs to it.
pub(crate) struct Fixture {
    url: String,
    stages: usize,
    pub(crate) handle: CoordinatorHandle,
    pub(crate) task: JoinHandle<Result<(), CoordinatorError>>,
    pub(crate) shutdown: CancellationToken,
}

/// A stage that has dialled in.
pub(crate) struct Member {
    /// What the coordinator said first.
    pub(crate) order: v1::stage_order::Order,
    leave: CancellationToken,
}

impl Member {
    /// Closes the connection to the coordinator without a word.
    pub(crate) fn vanish(&self) {
        self.leave.cancel();
    }
}

impl Fixture {
    /// A coordinator for this many stages of one layer each: room for two waiting requests and one running one. Requests do
    /// not wait for a pipeline to come back.
    pub(crate) async fn start(stages: usize) -> Self {
        Self::patient(stages, Duration::ZERO).await
    }

    /// The same, whose requests wait this long.
    pub(crate) async fn patient(stages: usize, recovery_timeout: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let contract = |stage| StageContract {
            stage,
            stages,
            layers: stage..stage + 1,
            hidden_size: 8,
            hidden_dtype: HiddenDtype::F32,
            index_topk: 8,
            index_dtype: IndexDtype::I32,
            row_capacity: 32,
            block_size: 4,
            receives_from_layer: None,
            sends_from_layer: None,
            config_digest: "digest".into(),
        };
        let config = CoordinatorConfig {
            traces: baton_telemetry::Traces::off(),
            listener,
            contract: Contract {
                stages: (0..stages).map(contract).collect(),
                full_layers: (0..stages).collect(),
            },
            config_digest: "digest".into(),
            checkpoint_digest: "digest".into(),
            eos_token_ids: vec![],
            max_positions: 200,
            link: "tcp".into(),
            join_timeout: Duration::from_secs(3),
            load_timeout: Duration::from_secs(1),
            wire_timeout: Duration::from_secs(1),
            step_timeout: Duration::from_secs(1),
            recovery_timeout,
            max_waiting: 2,
            max_sequences: 1,
            step_rows: 32,
            prefill_chunk: 32,
            micro_batches: 2,
            max_kv_blocks: 0,
            metrics: baton_telemetry::Metrics::new(Default::default()).unwrap(),
            prefix_cache: true,
        };
        let shutdown = CancellationToken::new();
        let (startup, _) = mpsc::unbounded_channel();
        let (handle, task) = Coordinator::start(config, shutdown.clone(), startup);
        Self { url, stages, handle, task, shutdown }
    }

    /// The same with all stages joined and wired; stage `odd` behaves as told, the others soundly. Nothing arrives behind a
    /// stage that hangs, so those after it hang too.
    pub(crate) async fn wired(
        stages: usize,
        odd: usize,
        behaviour: Behaviour,
    ) -> (Self, Vec<Member>) {
        let fixture = Self::start(stages).await;
        let mut members = Vec::new();
        for stage in 0..stages {
            let starved = stage > odd && behaviour == Behaviour::HangsInSteps;
            let behaviour = if stage == odd || starved { behaviour } else { Behaviour::Sound };
            members.push(fixture.join(stage, behaviour).await);
        }
        fixture.ready().await;
        (fixture, members)
    }

    pub(crate) async fn join(&self, stage: usize, behaviour: Behaviour) -> Member {
        self.join_as(stage, behaviour, "digest", "cpu", None).await
    }

    pub(crate) async fn join_as(
        &self,
        stage: usize,
        behaviour: Behaviour,
        digest: &str,
        backend: &str,
        traces: Option<Traces>,
    ) -> Member {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let control_address = format!("http://{}", listener.local_addr().unwrap());
        let last = stage + 1 == self.stages;
        let service = FakeStage { stage: stage as u32, last, behaviour, traces };
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(v1::stage_server::StageServer::new(service))
                .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true))),
        );
        let hello = v1::Hello {
            control_address,
            link_address: "127.0.0.1:1".into(),
            backend: backend.into(),
            config_digest: digest.into(),
            checkpoint_digest: digest.into(),
            preferred_index: (stage < self.stages).then_some(stage as u32),
            standby: stage >= self.stages,
            ..Default::default()
        };
        let event = |event| v1::StageEvent { event: Some(event) };
        let (events, outgoing) = mpsc::channel(4);
        events.send(event(StageEvent::Hello(hello))).await.unwrap();
        let mut client =
            v1::coordinator_client::CoordinatorClient::connect(self.url.clone()).await.unwrap();
        let mut orders = client.join(ReceiverStream::new(outgoing)).await.unwrap().into_inner();
        let order = orders.message().await.unwrap().unwrap().order.unwrap();
        let leave = CancellationToken::new();
        let left = leave.clone();
        tokio::spawn(async move {
            let beat = async {
                loop {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                    let heartbeat = event(StageEvent::Heartbeat(v1::Heartbeat::default()));
                    if events.send(heartbeat).await.is_err() {
                        return;
                    }
                }
            };
            let listen = async { while let Ok(Some(_)) = orders.message().await {} };
            tokio::select! {
                () = left.cancelled() => {}
                () = beat => {}
                () = listen => {}
            }
        });
        Member { order, leave }
    }

    /// Waits until the pipeline runs in this epoch, or a later one.
    pub(crate) async fn epoch(&self, epoch: u64) {
        for _ in 0..500 {
            let state = self.handle.pipeline().await;
            if state["epoch"].as_u64() >= Some(epoch) && self.handle.readiness() == Readiness::Ready
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("not in epoch {epoch}: {:?}", self.handle.readiness());
    }

    /// Waits until requests are taken.
    pub(crate) async fn ready(&self) {
        for _ in 0..200 {
            if self.handle.readiness() == Readiness::Ready {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("not ready: {:?}", self.handle.readiness());
    }

    /// Waits until the pipeline is not ready; why.
    pub(crate) async fn unready(&self) -> String {
        for _ in 0..500 {
            if let Readiness::NotReady(reason) = self.handle.readiness() {
                return reason;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("still ready");
    }

    /// Submits a prompt of three tokens.
    pub(crate) fn submit(&self, max_tokens: usize) -> mpsc::UnboundedReceiver<Event> {
        self.handle.submit(request(max_tokens)).unwrap()
    }
}

pub(crate) fn request(max_tokens: usize) -> GenerateRequest {
    GenerateRequest { prompt: vec![1, 2, 3], max_tokens, ..Default::default() }
}

/// The last event of a request, which must come within `limit`.
pub(crate) async fn last(
    mut events: mpsc::UnboundedReceiver<Event>,
    limit: Duration,
) -> Option<Event> {
    let mut last = None;
    let all = async {
        while let Some(event) = events.recv().await {
            last = Some(event);
        }
    };
    tokio::time::timeout(limit, all).await.expect("the request ends");
    last
}

/// The message of a request that failed.
pub(crate) async fn failure(events: mpsc::UnboundedReceiver<Event>, limit: Duration) -> String {
    match last(events, limit).await {
        Some(Event::Failed { message, .. }) => message,
        other => panic!("expected a failure, found {other:?}"),
    }
}
