//! `baton bench pipeline`: what the control plane costs.
//!
//! Real stage processes, a real coordinator and real links; a fixed delay stands for the compute of a step. All sequences
//! decode, so that the ideal is known: with N stages and at least N micro-batches, one step per delay.

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, bail, ensure};
use baton_coordinator::{
    Coordinator, CoordinatorConfig, CoordinatorHandle, Event, GenerateRequest, Readiness,
};
use baton_plan::{
    BalanceOptions, Contract, ContractOptions, HiddenDtype, IndexDtype, ModelConfig, Partition,
    published,
};
use baton_telemetry::traces::{self, Span, SpanExt as _, SpanKind};
use baton_telemetry::{Metrics, MetricsConfig, Traces};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::args::{BenchPipelineArgs, TelemetryArgs};
use crate::children::Children;
use crate::{progress, serve, shutdown};

/// Tokens per KV block.
const BLOCK: usize = 16;
/// Tokens of each sequence's prompt.
const PROMPT: usize = 16;
/// How long the pipeline may take to start, and to bring every sequence to its second token.
const START: Duration = Duration::from_secs(60);

pub(crate) async fn run(args: BenchPipelineArgs, telemetry: TelemetryArgs) -> anyhow::Result<()> {
    ensure!(args.stages > 0, "--stages 0: expected at least 1");
    ensure!(args.stage_ms > 0.0, "--stage-ms {}: expected more than 0", args.stage_ms);
    ensure!(args.sequences > 0, "--sequences 0: expected at least 1");
    ensure!(args.seconds > 0.0, "--seconds {}: expected more than 0", args.seconds);
    let shutdown = shutdown::on_signal()?;
    let grpc = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = serve::bind(grpc, "the stages").await?;
    let address = format!("http://{}", listener.local_addr().context("the gRPC address")?);
    let micro_batches = args.micro_batches.unwrap_or(args.stages).max(1);
    let delay = Duration::try_from_secs_f64(args.stage_ms / 1e3)
        .with_context(|| format!("--stage-ms {}", args.stage_ms))?;
    // A sequence gets one token per round of its micro-batch, and must not end before the measurement does.
    let round = delay.as_secs_f64() * args.stages.max(micro_batches) as f64;
    let tokens = ((args.seconds + START.as_secs_f64()) / round).ceil() as usize + 1;
    let traces = telemetry.traces("baton-bench")?;
    let mut config = config(&args, micro_batches, tokens, listener)?;
    config.traces = traces.clone();

    let (startup, events) = mpsc::unbounded_channel();
    let (joining, _joined) = watch::channel(Default::default());
    tokio::spawn(progress::show(events, joining));
    let (handle, coordinator) = Coordinator::start(config, shutdown.clone(), startup);
    let mut children = Children::spawn(
        (0..args.stages)
            .map(|index| {
                let options = [
                    ("--coordinator", address.clone()),
                    ("--listen", "127.0.0.1:0".to_owned()),
                    ("--index", index.to_string()),
                    ("--delay-ms", args.stage_ms.to_string()),
                ];
                let options =
                    options.into_iter().flat_map(|(name, value)| [name.into(), value.into()]);
                std::iter::once("stage".into())
                    .chain(options)
                    .chain(["--exit-with-coordinator".into()])
                    .chain(telemetry.forward())
                    .collect()
            })
            .collect(),
    )?;
    let measured = tokio::select! {
        measured = measure(&handle, (&args, &traces), tokens, &shutdown) => measured,
        ended = children.next_ended() => Err(anyhow::anyhow!("{ended}")),
    };
    shutdown.cancel();
    children.stop().await;
    coordinator.await.context("the coordinator panicked")??;
    report(&args, micro_batches, delay, &measured?)
}

/// The pipeline of a model of GLM-5.3's shape, without the model.
fn config(
    args: &BenchPipelineArgs,
    micro_batches: usize,
    tokens: usize,
    listener: tokio::net::TcpListener,
) -> anyhow::Result<CoordinatorConfig> {
    let model = ModelConfig::from_json(published::GLM_5_3)?;
    let partition = Partition::balanced(&model, &BalanceOptions::new(&model, args.stages))?;
    let step_rows = 512.max(args.sequences);
    let options = ContractOptions {
        hidden_dtype: HiddenDtype::Bf16,
        index_dtype: IndexDtype::I32,
        row_capacity: step_rows,
        block_size: BLOCK,
    };
    let contract = Contract::new(&model, &partition, &options)?;
    let blocks = args.sequences * (PROMPT + tokens).div_ceil(BLOCK);
    Ok(CoordinatorConfig {
        listener,
        contract,
        config_digest: String::new(),
        checkpoint_digest: String::new(),
        eos_token_ids: Vec::new(),
        max_positions: PROMPT + tokens,
        link: "tcp".to_owned(),
        join_timeout: START,
        load_timeout: START,
        wire_timeout: Duration::from_secs(10),
        step_timeout: START,
        recovery_timeout: Duration::ZERO,
        max_waiting: args.sequences,
        max_sequences: args.sequences,
        step_rows,
        prefill_chunk: step_rows,
        micro_batches,
        max_kv_blocks: u32::try_from(blocks).context("--sequences: too many")?,
        prefix_cache: false,
        metrics: Metrics::new(MetricsConfig::default())?,
        traces: Traces::off(),
    })
}

/// Tokens and the seconds they took.
struct Measured {
    tokens: u64,
    seconds: f64,
}

async fn measure(
    handle: &CoordinatorHandle,
    (args, traces): (&BenchPipelineArgs, &Traces),
    tokens: usize,
    shutdown: &CancellationToken,
) -> anyhow::Result<Measured> {
    let started = Instant::now();
    while let Readiness::NotReady(reason) = handle.readiness() {
        ensure!(started.elapsed() < START, "the pipeline did not start: {reason}");
        ensure!(!shutdown.is_cancelled(), "interrupted");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (arrived, mut arrivals) = mpsc::unbounded_channel::<anyhow::Result<usize>>();
    for sequence in 0..args.sequences {
        let root = traces.start("bench", SpanKind::Internal, None, SystemTime::now());
        let mut events = handle.submit(request(tokens, root.as_ref()))?;
        let arrived = arrived.clone();
        tokio::spawn(async move {
            let _root = root;
            while let Some(event) = events.recv().await {
                let event = match event {
                    Event::Token { .. } => Ok(sequence),
                    Event::Prompt(_) | Event::Admitted { .. } => continue,
                    event @ (Event::Finished(_) | Event::Expired) => {
                        Err(anyhow::anyhow!("a sequence ended: {event:?}"))
                    }
                    Event::Failed { message, .. } => Err(anyhow::anyhow!("{message}")),
                };
                if arrived.send(event).is_err() {
                    return;
                }
            }
        });
    }
    // Prompts are over once every sequence has its second token.
    let mut each = vec![0_usize; args.sequences];
    let mut next = async || match arrivals.recv().await {
        Some(arrival) => arrival,
        None => bail!("the coordinator has gone"),
    };
    let warm = async {
        while each.iter().any(|count| *count < 2) {
            each[next().await?] += 1;
        }
        Ok::<_, anyhow::Error>(())
    };
    tokio::time::timeout(START, warm)
        .await
        .with_context(|| format!("not every sequence got two tokens within {START:?}"))??;
    let window = Duration::try_from_secs_f64(args.seconds)
        .with_context(|| format!("--seconds {}", args.seconds))?;
    let bar = ProgressBar::new(window.as_millis() as u64);
    let style = ProgressStyle::with_template("measuring {bar:30} {percent}%");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let begun = Instant::now();
    let mut count = 0;
    let counting = async {
        loop {
            next().await?;
            count += 1;
            bar.set_position(begun.elapsed().as_millis() as u64);
        }
    };
    tokio::select! {
        ended = counting => ended,
        () = tokio::time::sleep(window) => Ok::<(), anyhow::Error>(()),
        () = shutdown.cancelled() => bail!("interrupted"),
    }?;
    bar.finish_and_clear();
    Ok(Measured { tokens: count, seconds: begun.elapsed().as_secs_f64() })
}

fn request(tokens: usize, root: Option<&Span>) -> GenerateRequest {
    GenerateRequest {
        prompt: vec![1; PROMPT],
        max_tokens: tokens,
        ignore_eos: true,
        traceparent: root.map(|root| traces::format(root.span_context())).unwrap_or_default(),
        ..Default::default()
    }
}

fn report(
    args: &BenchPipelineArgs,
    micro_batches: usize,
    delay: Duration,
    measured: &Measured,
) -> anyhow::Result<()> {
    let delay = delay.as_secs_f64();
    // Fewer sequences than micro-batches leave some of them empty.
    let in_flight = micro_batches.min(args.sequences);
    let rows = args.sequences as f64 / in_flight as f64;
    let ideal = in_flight.min(args.stages) as f64 / (args.stages as f64 * delay);
    let steps = measured.tokens as f64 / measured.seconds / rows;
    let share = steps / ideal;
    let control = 1.0 / steps - 1.0 / ideal;
    let bubble = 1.0 - steps * delay;
    let mut out = std::io::stdout().lock();
    if args.json {
        let report = json!({
            "stages": args.stages,
            "stage_ms": args.stage_ms,
            "sequences": args.sequences,
            "micro_batches": micro_batches,
            "seconds": measured.seconds,
            "tokens": measured.tokens,
            "steps_per_second": steps,
            "ideal_steps_per_second": ideal,
            "efficiency": share,
            "bubble_share": bubble,
            "control_ms_per_step": control * 1e3,
        });
        writeln!(out, "{report:#}")?;
        return Ok(());
    }
    writeln!(
        out,
        "{} stages of {} ms, {} sequences in {micro_batches} micro-batches, {:.1} s",
        args.stages, args.stage_ms, args.sequences, measured.seconds
    )?;
    writeln!(out, "steps per second   {steps:.2} of {ideal:.2} ideal ({:.1}%)", share * 100.0)?;
    writeln!(out, "bubble per stage   {:.1}% of the time", bubble * 100.0)?;
    writeln!(out, "control plane      {:.3} ms per step", control * 1e3)?;
    Ok(())
}
