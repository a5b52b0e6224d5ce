//! A coordinator that only lets stages join, and what a test asks of them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::{Duration, Instant};

use baton_plan::StageContract;
use baton_plan::{
    Contract, ContractOptions, HiddenDtype, IndexDtype, LinkKind, ModelConfig, Partition,
};
use baton_proto::v1;
use baton_proto::v1::coordinator_server::{Coordinator, CoordinatorServer};
use baton_proto::v1::stage_client::StageClient;
use baton_stage::{BackendKind, StageConfig, StageError};
use baton_transport::link::{self, Hello, LinkSender};
use baton_transport::{FrameLimits, HandOff, SentCarry};
use futures::Stream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Channel;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

/// Layers F F F S S S F S S S, `index_topk` 8.
pub(crate) const MODEL: &str = "share-4-3";
pub(crate) const TOPK: usize = 8;
pub(crate) const BLOCK: usize = 16;
/// Far more than anything here takes.
const LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models").join(MODEL)
}

/// The contract of the model cut into stages of so many layers.
pub(crate) fn contract(counts: &[usize]) -> Contract {
    let config = ModelConfig::load(&model_dir()).unwrap();
    let partition = Partition::from_counts(counts, config.num_layers).unwrap();
    let options = ContractOptions {
        hidden_dtype: HiddenDtype::F32,
        index_dtype: IndexDtype::I32,
        row_capacity: 64,
        block_size: BLOCK,
    };
    Contract::new(&config, &partition, &options).unwrap()
}

/// Lets every stage join and tells the test of it.
struct Joining(mpsc::Sender<v1::Hello>);

type Orders = Pin<Box<dyn Stream<Item = Result<v1::StageOrder, Status>> + Send>>;

#[tonic::async_trait]
impl Coordinator for Joining {
    type JoinStream = Orders;

    async fn join(
        &self,
        request: Request<Streaming<v1::StageEvent>>,
    ) -> Result<Response<Orders>, Status> {
        let mut events = request.into_inner();
        let hellos = self.0.clone();
        let (orders, stream) = mpsc::channel(1);
        tokio::spawn(async move {
            while let Ok(Some(event)) = events.message().await {
                if let Some(v1::stage_event::Event::Hello(hello)) = event.event {
                    hellos.send(hello).await.unwrap();
                }
            }
            drop(orders);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

/// A stage that has joined. Dropping it ends the stage.
pub(crate) struct Stage {
    pub(crate) hello: v1::Hello,
    client: StageClient<Channel>,
    contract: StageContract,
    digest: String,
    running: JoinHandle<Result<(), StageError>>,
    _stop: DropGuard,
}

impl Stage {
    /// Starts stage `index` and has it load its slice.
    pub(crate) async fn load(contract: &Contract, index: usize) -> Self {
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let incoming = TcpIncoming::bind(any).unwrap();
        let coordinator = format!("http://{}", incoming.local_addr().unwrap());
        let (hellos, mut joined) = mpsc::channel(1);
        let service = CoordinatorServer::new(Joining(hellos));
        tokio::spawn(
            tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming),
        );
        let config = StageConfig {
            coordinator,
            listen: any,
            link_listen: None,
            advertise: None,
            advertise_link: None,
            model_dir: Some(model_dir()),
            backend: BackendKind::Cpu,
            threads: Some(1),
            memory_bytes: None,
            metrics: Some(any),
            preferred_index: Some(index as u32),
            standby: false,
            exit_with_coordinator: false,
            latent_norm_eps: None,
            traces: baton_telemetry::Traces::off(),
            otlp: baton_telemetry::OtlpConfig::default(),
        };
        let stop = CancellationToken::new();
        let running = tokio::spawn(baton_stage::run(config, stop.clone()));
        let hello = within(joined.recv()).await.unwrap();
        let mut client = StageClient::connect(hello.control_address.clone()).await.unwrap();
        let slice = contract.stages[index].clone();
        let request = v1::LoadRequest {
            contract: Some(message(&slice)),
            checkpoint_digest: hello.checkpoint_digest.clone(),
            max_kv_blocks: 64,
        };
        let mut events = client.load(request).await.unwrap().into_inner();
        while within(events.message()).await.unwrap().is_some() {}
        let digest = contract.digest();
        Self { hello, client, contract: slice, digest, running, _stop: stop.drop_guard() }
    }

    /// Wires it in epoch 1; the previous stage has to connect meanwhile.
    pub(crate) async fn wire(&self, next: Option<&Self>) -> Result<(), Status> {
        let request = v1::WireRequest {
            epoch: 1,
            kv_blocks: 64,
            link: "tcp".into(),
            next_address: next.map(|stage| stage.hello.link_address.clone()),
            contract_digest: self.digest.clone(),
            timeout_millis: 5_000,
            step_timeout_millis: 2_000,
        };
        within(self.client.clone().wire(request)).await.map(drop)
    }

    /// Wires it as the last of its pipeline, with the test in the place of the stage before.
    pub(crate) async fn wire_to_test(&self) -> LinkSender {
        let address = self.hello.link_address.clone();
        let hello = Hello {
            epoch: 1,
            from_stage: self.contract.stage - 1,
            contract_digest: self.digest.clone(),
            link: LinkKind::Tcp,
        };
        let limits = FrameLimits::from(&self.contract);
        let connecting = tokio::task::spawn_blocking(move || {
            link::connect(&address, &hello, limits, Instant::now() + LIMIT)
        });
        self.wire(None).await.unwrap();
        connecting.await.unwrap().unwrap()
    }

    /// Opens its stream of steps.
    pub(crate) async fn run(&self) -> Steps {
        let (steps, outgoing) = mpsc::channel(8);
        let mut client = self.client.clone();
        let response = within(client.run(ReceiverStream::new(outgoing))).await.unwrap();
        Steps { steps, results: response.into_inner() }
    }

    pub(crate) async fn status(&self) -> v1::StatusReply {
        within(self.client.clone().status(v1::StatusRequest {})).await.unwrap().into_inner()
    }

    /// Whether the stage still serves.
    pub(crate) fn is_running(&self) -> bool {
        !self.running.is_finished()
    }
}

/// A stage's streams of steps and results.
pub(crate) struct Steps {
    steps: mpsc::Sender<v1::Step>,
    results: Streaming<v1::StepResult>,
}

impl Steps {
    pub(crate) async fn send(&self, step: &v1::Step) {
        self.steps.send(step.clone()).await.unwrap();
    }

    pub(crate) async fn result(&mut self) -> v1::StepResult {
        within(self.results.message()).await.unwrap().unwrap()
    }

    /// Kind and message of the next result, which must be a failure that answers nothing.
    pub(crate) async fn failure(&mut self) -> (String, String) {
        let result = self.result().await;
        assert!(result.sampled.is_empty() && result.prompt_scores.is_empty(), "{result:?}");
        let failure = result.failure.unwrap();
        (failure.kind, failure.message)
    }
}

/// Nothing here may hang.
pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, future).await.unwrap()
}

/// A greedy step of one sequence, which holds consecutive blocks.
pub(crate) fn step(step_id: u64, start: usize, tokens: &[u32], padding: u32) -> v1::Step {
    let blocks = |tokens: usize| tokens.div_ceil(BLOCK) as u32;
    let segment = v1::Segment {
        sequence_id: 1,
        start_position: start as u32,
        token_ids: tokens.to_vec(),
        known_blocks: blocks(start),
        new_blocks: (blocks(start)..blocks(start + tokens.len())).collect(),
        sampling: Some(v1::Sampling { top_p: 1.0, logprobs: Some(5), ..Default::default() }),
        prompt_scoring: None,
        traceparent: String::new(),
    };
    v1::Step { segments: vec![segment], ..padding_only(step_id, padding) }
}

/// A step without a single real row.
pub(crate) fn padding_only(step_id: u64, padding_rows: u32) -> v1::Step {
    v1::Step { epoch: 1, step_id, padding_rows, ..Default::default() }
}

/// A hand-off as the contract wants it: rows of a constant, and a carry of layer 2 for so many long rows.
pub(crate) fn hand_off(step_id: u64, rows: usize, long: usize) -> HandOff {
    let hidden = 64 * rows;
    let indices = (0..long).flat_map(|_| 0..TOPK as i32).collect();
    HandOff {
        epoch: 1,
        step_id,
        rows,
        hidden: (0..hidden).flat_map(|_| 0.5_f32.to_le_bytes()).collect(),
        residual: None,
        carry: Some(SentCarry { epoch: 1, step_id, source_layer: 2, indices }),
    }
}

fn message(contract: &StageContract) -> v1::StageContract {
    v1::StageContract {
        stage: contract.stage as u32,
        stages: contract.stages as u32,
        first_layer: contract.layers.start as u32,
        end_layer: contract.layers.end as u32,
        hidden_size: contract.hidden_size as u32,
        hidden_dtype: contract.hidden_dtype.to_string(),
        index_topk: contract.index_topk as u32,
        index_dtype: contract.index_dtype.to_string(),
        row_capacity: contract.row_capacity as u32,
        block_size: contract.block_size as u32,
        receives_from_layer: contract.receives_from_layer.map(|l| l as u32),
        sends_from_layer: contract.sends_from_layer.map(|l| l as u32),
        config_digest: contract.config_digest.clone(),
    }
}
