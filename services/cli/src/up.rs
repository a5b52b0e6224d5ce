//! `baton up`: a whole pipeline on this machine.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;

use crate::args::{Device, TelemetryArgs, UpArgs};
use crate::children::Children;
use crate::{demo, serve, shutdown};

pub(crate) async fn run(args: UpArgs, telemetry: TelemetryArgs) -> anyhow::Result<()> {
    let shutdown = shutdown::on_signal()?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => demo::directory()?,
    };
    let plan = serve::Plan::new(&model, &args.pipeline, args.latent_norm_eps)?;
    let http = serve::bind(SocketAddr::new(args.host, args.port), "the HTTP API").await?;
    let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let grpc = serve::bind(local, "the stages").await?;
    let coordinator = format!("http://{}", grpc.local_addr().context("the gRPC address")?);
    let stages = plan.stages();
    let mut serving = serve::start(
        &model,
        plan,
        (&args.pipeline, &telemetry),
        http,
        grpc,
        &shutdown,
        Duration::ZERO,
    )
    .await?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or_else(|| (cores / stages).max(1));
    let gpus = match args.backend {
        Device::Cpu => 1,
        Device::Cuda => gpus()?,
    };
    let mut children = Children::spawn(
        (0..stages)
            .map(|index| {
                let mut all = arguments(&coordinator, &model, index, threads, &args, gpus);
                all.extend(telemetry.forward());
                all
            })
            .collect(),
    )?;
    let outcome = loop {
        tokio::select! {
            ended = &mut serving.coordinator => {
                break ended.context("the coordinator panicked")?.map_err(Into::into);
            }
            ended = children.next_ended() => {
                if shutdown.is_cancelled() {
                    continue;
                }
                tracing::error!("{ended}");
                // One that could never join would not the next time either.
                if !serving.joined.borrow().contains(&ended.stage) {
                    break Err(anyhow::anyhow!("{ended}"));
                }
                children.restart(ended.stage);
            }
        }
    };
    shutdown.cancel();
    children.stop().await;
    serving.http.await.context("the gateway panicked")??;
    crate::telemetry::farewell(serving.traces, serving.metrics).await;
    outcome
}

/// GPUs of this machine.
#[cfg(feature = "cuda")]
fn gpus() -> anyhow::Result<usize> {
    Ok(baton_kernels::cuda::device_count()?)
}

#[cfg(not(feature = "cuda"))]
fn gpus() -> anyhow::Result<usize> {
    anyhow::bail!("--backend cuda: this binary was built without the feature `cuda`")
}

fn arguments(
    coordinator: &str,
    model: &Path,
    index: usize,
    threads: usize,
    args: &UpArgs,
    gpus: usize,
) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["stage".into()];
    let mut option = |name: &str, value: OsString| arguments.extend([name.into(), value]);
    option("--coordinator", coordinator.into());
    option("--model", model.into());
    option("--listen", "127.0.0.1:0".into());
    option("--metrics", "127.0.0.1:0".into());
    option("--index", index.to_string().into());
    option("--threads", threads.to_string().into());
    if args.backend == Device::Cuda {
        option("--backend", "cuda".into());
        let gpu = args.gpus.get(index).or(args.gpus.last()).copied().unwrap_or(index % gpus);
        option("--gpu", gpu.to_string().into());
    }
    if let Some(eps) = args.latent_norm_eps {
        option("--latent-norm-eps", eps.to_string().into());
    }
    let memory = &args.pipeline.split.memory;
    if let Some(bytes) = memory.get(index).or(memory.first()) {
        option("--memory", bytes.to_string().into());
    }
    arguments.push("--exit-with-coordinator".into());
    arguments
}
