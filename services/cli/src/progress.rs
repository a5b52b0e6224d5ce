//! What a person sees while the pipeline starts: bars on a terminal, plain lines otherwise.

use std::collections::BTreeSet;
use std::io::IsTerminal as _;

use baton_coordinator::StartupEvent;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use tokio::sync::{mpsc, watch};

/// Shows events until there are no more, and keeps account of the stages that have joined.
pub(crate) async fn show(
    mut events: mpsc::UnboundedReceiver<StartupEvent>,
    joined: watch::Sender<BTreeSet<usize>>,
) {
    let terminal = std::io::stderr().is_terminal();
    let bars = MultiProgress::new();
    let mut stages: Vec<ProgressBar> = Vec::new();
    while let Some(event) = events.recv().await {
        match event {
            StartupEvent::Loading { stage, bytes_done, bytes_total } if terminal => {
                while stages.len() <= stage {
                    let style = ProgressStyle::with_template(
                        "{prefix:>9} {bar:30} {bytes}/{total_bytes} {bytes_per_sec}",
                    );
                    let bar = bars.add(ProgressBar::new(0));
                    bar.set_prefix(format!("stage {}", stages.len()));
                    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
                    stages.push(bar);
                }
                stages[stage].set_length(bytes_total);
                stages[stage].set_position(bytes_done);
            }
            // Plain lines say what is done, not how far it is.
            StartupEvent::Loading { .. } => {}
            StartupEvent::Joined { stage, backend, address, .. } => {
                joined.send_modify(|joined| {
                    joined.insert(stage);
                });
                tracing::info!("stage {stage} joined from {address} ({backend})");
            }
            StartupEvent::Loaded { stage, held: true, .. } => {
                tracing::info!("stage {stage} still holds its slice");
            }
            StartupEvent::Loaded {
                stage, bytes_read, bytes_needed, seconds, kv_blocks, ..
            } => {
                if let Some(bar) = stages.get(stage) {
                    bar.finish_and_clear();
                }
                tracing::info!(
                    "stage {stage} loaded: {bytes_read} bytes read, {bytes_needed} needed, {seconds:.1} s, \
                     {kv_blocks} KV blocks"
                );
            }
            StartupEvent::Wired { stage, link } if !link.is_empty() => {
                tracing::info!(
                    link,
                    "stage {stage} -> stage {} over {link}, as --link says",
                    stage + 1
                );
            }
            StartupEvent::Wired { .. } => {}
            StartupEvent::Ready { kv_blocks } => {
                tracing::info!("the pipeline is ready, {kv_blocks} KV blocks");
            }
        }
    }
}
