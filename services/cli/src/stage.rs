//! `baton stage`.

use std::time::Duration;

use baton_stage::{BackendKind, StageConfig};

use crate::args::{Device, StageArgs, TelemetryArgs};
use crate::shutdown;

pub(crate) async fn run(args: StageArgs, telemetry: TelemetryArgs) -> anyhow::Result<()> {
    let shutdown = shutdown::on_signal()?;
    let backend = match args.delay_ms {
        Some(ms) => BackendKind::Delay(Duration::try_from_secs_f64(ms / 1e3)?),
        None => match args.backend {
            Device::Cpu => BackendKind::Cpu,
            Device::Cuda => BackendKind::Cuda { ordinal: args.gpu },
        },
    };
    let config = StageConfig {
        coordinator: args.coordinator,
        listen: args.listen,
        link_listen: args.link_listen,
        advertise: args.advertise,
        advertise_link: args.advertise_link,
        model_dir: args.model,
        backend,
        threads: args.threads,
        memory_bytes: args.memory,
        metrics: args.metrics,
        preferred_index: args.index,
        standby: args.standby,
        exit_with_coordinator: args.exit_with_coordinator,
        latent_norm_eps: args.latent_norm_eps,
        traces: telemetry.traces("baton-stage")?,
        otlp: telemetry.otlp("baton-stage"),
    };
    Ok(baton_stage::run(config, shutdown).await?)
}
