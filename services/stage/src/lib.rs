//! The gRPC service that hosts one slice of the model.
//!
//! [`run`] serves one stage: it dials the coordinator ([`join`]), answers `Load`, `Wire`, `Run`, `Status` and `Drain`
//! ([`service`]), and runs steps on one compute thread ([`runner`]) against an [`engine`].

mod block_tables;
mod contract;
pub mod engine;
mod health;
mod join;
mod load;
mod metrics;
mod runner;
mod service;
mod times;
mod totals;
mod trace;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use baton_proto::v1::stage_server::StageServer;
use baton_telemetry::{Metrics, MetricsConfig, OtlpConfig, Traces};
use thiserror::Error;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;

/// What a stage computes with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BackendKind {
    /// The model, on the processor.
    Cpu,
    /// The model, on a GPU; needs the feature `cuda`.
    Cuda {
        /// Which one, from 0.
        ordinal: usize,
    },
    /// No model: every step sleeps this long.
    Delay(Duration),
}

/// How a stage is set up.
#[derive(Clone, Debug)]
pub struct StageConfig {
    /// The coordinator's URL.
    pub coordinator: String,
    /// Address the coordinator dials.
    pub listen: SocketAddr,
    /// Address the previous stage's link dials; the same host and a free port when absent.
    pub link_listen: Option<SocketAddr>,
    /// Host that others reach this stage under; the address it reaches the coordinator from when absent.
    pub advertise: Option<String>,
    /// `HOST:PORT` that the previous stage dials for the link; the advertised host and the link's own port when absent.
    pub advertise_link: Option<String>,
    /// Checkpoint directory; none for the delay backend.
    pub model_dir: Option<PathBuf>,
    /// What to compute with.
    pub backend: BackendKind,
    /// Compute threads.
    pub threads: Option<usize>,
    /// Bytes for weights and KV; no limit when absent.
    pub memory_bytes: Option<u64>,
    /// Where `/metrics` is answered; nowhere when absent.
    pub metrics: Option<SocketAddr>,
    /// Index to ask for.
    pub preferred_index: Option<u32>,
    /// Wait until a pipeline lacks a stage, and take its place.
    pub standby: bool,
    /// End when the coordinator goes away.
    pub exit_with_coordinator: bool,
    /// Epsilon of the latent norms.
    pub latent_norm_eps: Option<f64>,
    /// Spans of steps.
    pub traces: Traces,
    /// Where metrics are sent beside being shown.
    pub otlp: OtlpConfig,
}

/// Why a stage ended or could not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StageError {
    /// An address cannot be used.
    #[error("cannot listen on {address}: {reason}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        reason: String,
    },
    /// The config cannot be served.
    #[error(transparent)]
    Config(#[from] baton_plan::ConfigError),
    /// The checkpoint cannot be served.
    #[error(transparent)]
    Checkpoint(#[from] baton_model::CheckpointError),
    /// The coordinator does not want this stage.
    #[error("the coordinator refused this stage: {0}")]
    Refused(String),
    /// The coordinator is out of reach or has gone.
    #[error("coordinator {address}: {reason}")]
    Coordinator {
        /// Its URL.
        address: String,
        /// What happened.
        reason: String,
    },
    /// Metrics cannot be counted.
    #[error(transparent)]
    Telemetry(#[from] baton_telemetry::TelemetryError),
    /// The gRPC server failed.
    #[error("gRPC server: {0}")]
    Server(String),
}

/// Serves one stage until `shutdown`, or until the coordinator dismisses it.
///
/// # Errors
/// When it cannot start, is refused, or loses a coordinator it was to end with.
pub async fn run(config: StageConfig, shutdown: CancellationToken) -> Result<(), StageError> {
    let model = config.model_dir.as_deref().map(|dir| service::Model::open(dir, &config));
    let model = model.transpose()?;
    let incoming = TcpIncoming::bind(config.listen)
        .map_err(|e| listen_error(config.listen, &e))?
        .with_nodelay(Some(true));
    let listening = incoming.local_addr().map_err(|e| listen_error(config.listen, &e))?;
    let link_address = config.link_listen.unwrap_or_else(|| SocketAddr::new(config.listen.ip(), 0));
    let links =
        std::net::TcpListener::bind(link_address).map_err(|e| listen_error(link_address, &e))?;
    let link_port = links.local_addr().map_err(|e| listen_error(link_address, &e))?.port();

    let host = Arc::new(service::Host::new(&config, model, links));
    let shown = Metrics::new(MetricsConfig { otlp: config.otlp.clone(), ..Default::default() })?;
    metrics::register(&shown, &host);
    let metrics = match config.metrics {
        Some(address) => Some(serve_metrics(address, shown.clone(), shutdown.clone()).await?),
        None => None,
    };
    let (health, health_service) = tonic_health::server::health_reporter();
    let health = tokio::spawn(health::follow(Arc::clone(&host), health));
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(baton_proto::v1::FILE_DESCRIPTOR_SET)
        .build_v1()
        .map_err(|e| StageError::Server(e.to_string()))?;
    let stop = shutdown.child_token();
    let server = {
        let stop = stop.clone();
        let service = StageServer::new(service::StageService::new(Arc::clone(&host)));
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(health_service)
                .add_service(reflection)
                .add_service(service)
                .serve_with_incoming_shutdown(incoming, async move { stop.cancelled().await }),
        )
    };
    let ports = join::Ports { control: listening.port(), link: link_port, metrics };
    let ended = join::run(&config, &host, ports, &shutdown).await;
    stop.cancel();
    health.abort();
    host.unwire();
    // Open streams of a coordinator that is still there end with the process; it is not waited for.
    let _ = tokio::time::timeout(Duration::from_millis(500), server).await;
    // A collector that is out of reach must not keep the process either.
    let _ = tokio::task::spawn_blocking(move || {
        config.traces.shutdown();
        shown.shutdown();
    })
    .await;
    ended
}

/// Answers `/metrics` at this address; returns the port.
async fn serve_metrics(
    address: SocketAddr,
    shown: Metrics,
    stop: CancellationToken,
) -> Result<u16, StageError> {
    let listener = tokio::net::TcpListener::bind(address).await;
    let listener = listener.map_err(|e| listen_error(address, &e))?;
    let port = listener.local_addr().map_err(|e| listen_error(address, &e))?.port();
    tokio::spawn(async move {
        if let Err(error) = baton_telemetry::metrics::serve(listener, shown, stop).await {
            tracing::error!("metrics are no longer answered: {error}");
        }
    });
    Ok(port)
}

fn listen_error(address: SocketAddr, error: &dyn std::fmt::Display) -> StageError {
    StageError::Listen { address, reason: error.to_string() }
}
