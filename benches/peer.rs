//! The peer: Hugging Face transformers, measured by `peer_transformers.py` as a process of its own.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use serde_json::Value;

/// What the peer reached, the best of its settings in each measure, in tokens per second.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Name and version.
    pub name: String,
    /// One pass over the context.
    pub prefill: f64,
    /// Batch of one.
    pub decode_1: f64,
    /// Batch of eight.
    pub decode_8: f64,
}

impl Peer {
    /// Runs the peer on a checkpoint.
    ///
    /// # Errors
    /// When the interpreter does not start, lacks the packages, or the script fails.
    pub fn measure(
        python: &str,
        checkpoint: &Path,
        context: usize,
        steps: usize,
    ) -> anyhow::Result<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peer_transformers.py");
        let output = Command::new(python)
            .arg(&script)
            .arg(checkpoint)
            .args(["--context", &context.to_string(), "--steps", &steps.to_string()])
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("--peer {python}: cannot be started"))?;
        ensure!(
            output.status.success(),
            "--peer {python}: {} ended with {}",
            script.display(),
            output.status
        );
        let report: Value = serde_json::from_slice(&output.stdout).context("the peer's report")?;
        let best = |measure: &str| {
            report["best"][measure]["value"]
                .as_f64()
                .with_context(|| format!("the peer's report lacks best.{measure}.value"))
        };
        Ok(Self {
            name: format!("transformers {}", report["transformers"].as_str().unwrap_or("?")),
            prefill: best("prefill")?,
            decode_1: best("decode_batch_1")?,
            decode_8: best("decode_batch_8")?,
        })
    }
}
