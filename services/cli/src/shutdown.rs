//! Ctrl-C and SIGTERM.

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that is cancelled by the first SIGINT or SIGTERM. A second one ends the process at once, for whoever does
/// not want to wait for an orderly end.
pub(crate) fn on_signal() -> anyhow::Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let cancelled = token.clone();
    tokio::spawn(async move {
        let mut next = async || {
            tokio::select! {
                _ = interrupt.recv() => "SIGINT",
                _ = terminate.recv() => "SIGTERM",
            }
        };
        let name = next().await;
        tracing::info!("{name}: stopping");
        cancelled.cancel();
        next().await;
        std::process::exit(130);
    });
    Ok(token)
}
