//! Coordinator and gateway in this process, for `up` and `coordinator` alike.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use baton_coordinator::{Coordinator, CoordinatorConfig, CoordinatorError};
use baton_gateway::{Gateway, GatewayConfig};
use baton_model::Checkpoint;
use baton_plan::{Contract, ContractOptions, HiddenDtype, IndexDtype, ModelConfig};
use baton_telemetry::{Metrics, MetricsConfig, Traces};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::args::{PipelineArgs, TelemetryArgs};
use crate::{plan, progress, telemetry};

/// How long answers of a pipeline that has stopped may take to be sent.
const FAREWELL: Duration = Duration::from_secs(10);

/// A coordinator and a gateway that run.
pub(crate) struct Serving {
    pub(crate) coordinator: JoinHandle<Result<(), CoordinatorError>>,
    pub(crate) http: JoinHandle<std::io::Result<()>>,
    pub(crate) stages: usize,
    pub(crate) traces: Traces,
    pub(crate) metrics: Metrics,
    /// Stages that have joined at some time.
    pub(crate) joined: watch::Receiver<BTreeSet<usize>>,
}

/// What is served, checked before anything starts.
pub(crate) struct Plan {
    config: ModelConfig,
    contract: Contract,
    checkpoint_digest: String,
}

impl Plan {
    pub(crate) fn new(
        model: &Path,
        args: &PipelineArgs,
        latent_norm_eps: Option<f64>,
    ) -> anyhow::Result<Self> {
        let config = ModelConfig::load(model)?.with_latent_norm_eps(latent_norm_eps);
        let checkpoint = Checkpoint::open(model)?;
        checkpoint.check_names(&config, 0..config.num_layers)?;
        let partition = plan::partition(&config, &args.split)?;
        for note in partition.notes() {
            tracing::info!("plan: {note}");
        }
        let options = ContractOptions {
            hidden_dtype: args.activation_dtype.map_or(HiddenDtype::F32, HiddenDtype::from),
            index_dtype: IndexDtype::I32,
            row_capacity: args.step_rows,
            block_size: args.block_size,
        };
        let contract = Contract::new(&config, &partition, &options)?;
        print(&contract);
        Ok(Self { config, contract, checkpoint_digest: checkpoint.digest().to_owned() })
    }

    pub(crate) fn stages(&self) -> usize {
        self.contract.stages.len()
    }
}

/// One log line per stage: what it holds, and what crosses the cut behind it.
fn print(contract: &Contract) {
    for stage in &contract.stages {
        let (first, last) = (stage.layers.start, stage.layers.end.saturating_sub(1));
        let full = contract.full_layers.iter().filter(|layer| stage.layers.contains(layer)).count();
        let carry = match stage.sends_from_layer {
            Some(layer) => format!(", carries the rows of layer {layer}"),
            None if stage.is_last() => String::new(),
            None => ", carries nothing".to_owned(),
        };
        let bytes = stage.handoff_bytes_per_row();
        tracing::info!(
            "plan: stage {}: layers {first}-{last}, {full} of them full, sends {bytes} bytes a row{carry}",
            stage.stage
        );
    }
}

/// Starts both; the HTTP API answers at once, `/ready` once the pipeline is.
///
/// After `shutdown` no new request is taken, and those that run have `drain` before the pipeline stops under them.
pub(crate) async fn start(
    model: &Path,
    plan: Plan,
    (args, telemetry): (&PipelineArgs, &TelemetryArgs),
    http: TcpListener,
    grpc: TcpListener,
    shutdown: &CancellationToken,
    drain: Duration,
) -> anyhow::Result<Serving> {
    let name = args.served_model_name.clone().unwrap_or_else(|| {
        model
            .canonicalize()
            .ok()
            .and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned()))
            .unwrap_or_else(|| "baton".into())
    });
    let metrics = Metrics::new(MetricsConfig {
        vllm_model_name: args.vllm_metrics.then(|| name.clone()),
        otlp: telemetry.otlp("baton"),
    })?;
    let traces = telemetry.traces("baton")?;
    let mut gateway = GatewayConfig::new(model, &name, &plan.config)?;
    gateway.traces = traces.clone();
    let mut eos_token_ids = plan.config.eos_token_ids.clone();
    eos_token_ids.extend(&gateway.defaults.stop_token_ids);
    eos_token_ids.sort_unstable();
    eos_token_ids.dedup();
    let stages = plan.stages();
    let (startup, events) = mpsc::unbounded_channel();
    let (joining, joined) = watch::channel(BTreeSet::new());
    tokio::spawn(progress::show(events, joining));
    let config = CoordinatorConfig {
        listener: grpc,
        config_digest: plan.config.digest(),
        checkpoint_digest: plan.checkpoint_digest,
        eos_token_ids,
        max_positions: plan.config.max_positions,
        link: args.link.name().into(),
        join_timeout: args.join_timeout,
        load_timeout: args.load_timeout,
        wire_timeout: Duration::from_secs(10),
        step_timeout: args.step_timeout,
        recovery_timeout: args.recovery_timeout,
        max_waiting: args.max_waiting,
        max_sequences: args.max_sequences,
        step_rows: args.step_rows,
        prefill_chunk: args.prefill_chunk.unwrap_or(args.step_rows).min(args.step_rows),
        micro_batches: args.micro_batches.unwrap_or(stages).max(1),
        max_kv_blocks: args.kv_blocks.unwrap_or(0),
        prefix_cache: !args.no_prefix_cache,
        metrics: metrics.clone(),
        traces: traces.clone(),
        contract: plan.contract,
    };
    let drains = !drain.is_zero();
    let stop = if drains { CancellationToken::new() } else { shutdown.clone() };
    let (handle, coordinator) = Coordinator::start(config, stop.clone(), startup);
    let router = Gateway::new(gateway, handle, &metrics)?;
    let address = http.local_addr().context("the HTTP address")?;
    let told = shutdown.clone();
    let http = tokio::spawn(async move {
        let told = async move {
            told.cancelled().await;
            if drains {
                tracing::info!("no new requests; those that run have {drain:?}");
            }
        };
        let grace = if drains { drain } else { FAREWELL };
        let served = baton_gateway::serve(http, router, told, grace).await;
        stop.cancel();
        served
    });
    let mut out = std::io::stdout().lock();
    writeln!(out, "serving {name} over {stages} stages at http://{address}")?;
    out.flush()?;
    Ok(Serving { coordinator, http, stages, traces, metrics, joined })
}

/// Binds an address; says which one when it is taken.
pub(crate) async fn bind(address: std::net::SocketAddr, what: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address} for {what}"))
}

/// Waits for the end: of the pipeline's start when it fails, or of both servers after a shutdown.
pub(crate) async fn finish(serving: Serving, shutdown: &CancellationToken) -> anyhow::Result<()> {
    let outcome = serving.coordinator.await.context("the coordinator panicked")?;
    shutdown.cancel();
    serving.http.await.context("the gateway panicked")??;
    telemetry::farewell(serving.traces, serving.metrics).await;
    Ok(outcome?)
}
