//! `baton coordinator`.

use crate::args::{CoordinatorArgs, TelemetryArgs};
use crate::{serve, shutdown};

pub(crate) async fn run(args: CoordinatorArgs, telemetry: TelemetryArgs) -> anyhow::Result<()> {
    let shutdown = shutdown::on_signal()?;
    let plan = serve::Plan::new(&args.model, &args.pipeline, args.latent_norm_eps)?;
    let http = serve::bind(args.http, "the HTTP API").await?;
    let grpc = serve::bind(args.grpc, "the stages").await?;
    let serving = serve::start(
        &args.model,
        plan,
        (&args.pipeline, &telemetry),
        http,
        grpc,
        &shutdown,
        args.drain_timeout,
    )
    .await?;
    tracing::info!("waiting for {} stages at {}", serving.stages, args.grpc);
    serve::finish(serving, &shutdown).await
}
