//! Registry, wiring, KV blocks and scheduler: drives the stages and answers the gateway.
//!
//! [`Coordinator::start`] waits for the stages ([`registry`]), loads and wires them ([`wiring`]), then runs the loop of
//! [`driver`] around the pure [`scheduler`]. A pipeline that fails is made again ([`recovery`]); its requests wait.

mod block_manager;
mod driver;
pub mod grammar;
mod metrics;
mod prefix;
mod recovery;
mod registry;
mod report;
pub mod request;
mod sampling;
mod scheduler;
mod sequence;
mod startup;
pub mod state;
mod timeline;
mod trace;
mod wiring;

use std::sync::Arc;
use std::time::Duration;

use baton_plan::Contract;
use baton_proto::v1::coordinator_server::CoordinatorServer;
use baton_telemetry::{Metrics, Traces};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;

use startup::Startup;

pub use grammar::{Grammar, Matcher};
pub use request::{
    CoordinatorHandle, Event, FinishReason, GenerateRequest, Readiness, SamplingParams,
    SubmitError, TokenLogprob,
};
pub use timeline::Timeline;

/// How a pipeline is to be made and run.
#[derive(Debug)]
pub struct CoordinatorConfig {
    /// Where stages dial in.
    pub listener: TcpListener,
    /// One contract per stage.
    pub contract: Contract,
    /// Digest of the config; empty when stages have no model.
    pub config_digest: String,
    /// Digest of the checkpoint's index; empty when stages have no model.
    pub checkpoint_digest: String,
    /// Ids that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Longest context.
    pub max_positions: usize,
    /// Kind of link.
    pub link: String,
    /// Longest wait for all stages.
    pub join_timeout: Duration,
    /// Longest time without progress while loading.
    pub load_timeout: Duration,
    /// Longest time for wiring.
    pub wire_timeout: Duration,
    /// Longest time for a step.
    pub step_timeout: Duration,
    /// How long requests wait for a failed pipeline to come back; 0 ends them at once. The pipeline is made again in any case.
    pub recovery_timeout: Duration,
    /// Requests that may wait.
    pub max_waiting: usize,
    /// Sequences that may run.
    pub max_sequences: usize,
    /// Most rows in a step.
    pub step_rows: usize,
    /// Most rows of one prompt in a step.
    pub prefill_chunk: usize,
    /// Steps in flight.
    pub micro_batches: usize,
    /// Upper bound for the KV pool; 0 for none.
    pub max_kv_blocks: u32,
    /// Whether requests take up the KV of earlier ones with the same beginning.
    pub prefix_cache: bool,
    /// Where the pipeline's numbers are shown.
    pub metrics: Metrics,
    /// Spans of requests that come with a trace context.
    pub traces: Traces,
}

/// What happens while the pipeline starts.
#[derive(Clone, Debug, PartialEq)]
pub enum StartupEvent {
    /// A stage has joined.
    Joined {
        /// Its index.
        stage: usize,
        /// Its backend.
        backend: String,
        /// Its address.
        address: String,
        /// Where it answers `/metrics`, host:port; empty when it does not.
        metrics: String,
    },
    /// A stage reads its slice.
    Loading {
        /// Its index.
        stage: usize,
        /// Bytes read.
        bytes_done: u64,
        /// Bytes of the slice.
        bytes_total: u64,
    },
    /// A stage holds its slice.
    Loaded {
        /// Its index.
        stage: usize,
        /// What it computes on, in words.
        device: String,
        /// Bytes read.
        bytes_read: u64,
        /// Bytes of the slice's tensors.
        bytes_needed: u64,
        /// Time it took.
        seconds: f64,
        /// KV blocks it can hold.
        kv_blocks: u32,
        /// It held the slice already; nothing was read.
        held: bool,
    },
    /// A stage is connected to the next.
    Wired {
        /// Its index.
        stage: usize,
        /// Kind of link; empty on the last stage.
        link: String,
    },
    /// Requests are taken.
    Ready {
        /// KV blocks of the pipeline.
        kv_blocks: u32,
    },
}

/// Why the pipeline could not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CoordinatorError {
    /// Stages are missing.
    #[error("{joined} of {stages} stages joined within {timeout:?}: missing are {missing}")]
    Missing {
        /// Stages that joined.
        joined: usize,
        /// Stages expected.
        stages: usize,
        /// How long was waited.
        timeout: Duration,
        /// "stage 1, stage 3".
        missing: String,
    },
    /// A stage failed while starting.
    #[error("stage {stage}: {reason}")]
    Stage {
        /// Its index.
        stage: usize,
        /// What it said.
        reason: String,
    },
    /// The gRPC server failed.
    #[error("gRPC server: {0}")]
    Server(String),
}

/// The coordinator of one pipeline.
#[derive(Debug)]
pub struct Coordinator;

impl Coordinator {
    /// Starts in the background. The handle is not ready until the pipeline is; the task ends with an error when it cannot
    /// start, and with `Ok` after `shutdown`.
    #[must_use]
    pub fn start(
        config: CoordinatorConfig,
        shutdown: CancellationToken,
        startup: mpsc::UnboundedSender<StartupEvent>,
    ) -> (CoordinatorHandle, JoinHandle<Result<(), CoordinatorError>>) {
        let (submit, submissions) = mpsc::channel(config.max_waiting.max(1));
        let (ready, readiness) = watch::channel(Readiness::NotReady(String::new()));
        let startup = Startup::new(config.contract.stages.len(), startup, ready.clone());
        let (state, pipeline) = state::channel();
        let timeline = Timeline::new(config.contract.stages.len());
        let handle = CoordinatorHandle::new(submit, readiness, pipeline, timeline.clone());
        let run = run(config, shutdown, startup, submissions, ready, (state, timeline));
        let task = tokio::spawn(run);
        (handle, task)
    }
}

async fn run(
    config: CoordinatorConfig,
    shutdown: CancellationToken,
    startup: Startup,
    submissions: mpsc::Receiver<request::Submission>,
    ready: watch::Sender<Readiness>,
    (state, timeline): (state::StateWriter, Timeline),
) -> Result<(), CoordinatorError> {
    let registry = Arc::new(registry::Registry::new(
        config.contract.stages.len(),
        config.config_digest.clone(),
        config.checkpoint_digest.clone(),
        startup.clone(),
    ));
    let CoordinatorConfig { listener, .. } = config;
    let mut server = {
        let service = CoordinatorServer::new(registry::JoinService::new(Arc::clone(&registry)));
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<CoordinatorServer<registry::JoinService>>().await;
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(baton_proto::v1::FILE_DESCRIPTOR_SET)
            .build_v1()
            .map_err(|e| CoordinatorError::Server(e.to_string()))?;
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(health_service)
                .add_service(reflection)
                .add_service(service)
                .serve_with_incoming(incoming),
        )
    };
    let cache_root = config
        .prefix_cache
        .then(|| prefix::model(&config.config_digest, &config.checkpoint_digest));
    let numbers =
        metrics::Numbers::shown(&config.metrics, config.contract.stages.len(), ready.subscribe());
    let settings = driver::Settings {
        cache_root,
        eos_token_ids: config.eos_token_ids,
        max_positions: config.max_positions,
        max_sequences: config.max_sequences,
        step_rows: config.step_rows,
        prefill_chunk: config.prefill_chunk,
        micro_batches: config.micro_batches,
        step_timeout: config.step_timeout,
        recovery_timeout: config.recovery_timeout,
        numbers,
        timeline,
        traces: config.traces,
    };
    let wiring = wiring::Wiring {
        registry: Arc::clone(&registry),
        contract: config.contract,
        model: wiring::ModelIdentity {
            checkpoint_digest: config.checkpoint_digest,
            link: config.link,
            max_kv_blocks: config.max_kv_blocks,
        },
        times: wiring::Times {
            join: config.join_timeout,
            load: config.load_timeout,
            wire: config.wire_timeout,
            step: config.step_timeout,
        },
        startup,
    };
    let stop = shutdown.child_token();
    let inbox = driver::Inbox { submissions, ready, state, shutdown: stop.clone() };
    let serve = driver::Driver::new(settings, wiring, inbox).run();
    tokio::pin!(serve);
    let outcome = tokio::select! {
        outcome = &mut serve => outcome,
        ended = &mut server => {
            // Requests under way are told before the coordinator ends.
            stop.cancel();
            serve.await?;
            Err(CoordinatorError::Server(match ended {
                Ok(Ok(())) => "it ended by itself".to_owned(),
                Ok(Err(error)) => error.to_string(),
                Err(error) => error.to_string(),
            }))
        }
    };
    registry.dismiss().await;
    server.abort();
    outcome
}
