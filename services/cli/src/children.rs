//! The stage processes of `baton up`.

use std::ffi::OsString;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStderr, Command};
use tokio::task::JoinSet;

/// How long a stage may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// Stage processes; dropping this kills those that still run.
#[derive(Debug)]
pub(crate) struct Children {
    waits: JoinSet<Ended>,
    pids: Vec<Pid>,
}

/// A stage process that ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) stage: usize,
    pub(crate) status: Option<ExitStatus>,
    /// What it said last, most often the reason.
    pub(crate) last_words: String,
}

impl Children {
    /// Starts `baton stage` once per list of arguments.
    pub(crate) fn spawn(arguments: Vec<Vec<OsString>>) -> anyhow::Result<Self> {
        let binary = std::env::current_exe().context("find this program's file")?;
        let mut children = Self { waits: JoinSet::new(), pids: Vec::new() };
        for (stage, arguments) in arguments.into_iter().enumerate() {
            let mut child = Command::new(&binary)
                .args(arguments)
                .stdin(Stdio::null())
                .stderr(Stdio::piped())
                .process_group(0) // Ctrl-C reaches this process alone; it ends the stages in order.
                .kill_on_drop(true)
                .spawn()
                .with_context(|| format!("start stage {stage}"))?;
            let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
            children.pids.extend(pid);
            let stderr = child.stderr.take().context("a piped standard error")?;
            children.waits.spawn(wait(stage, child, stderr));
        }
        Ok(children)
    }

    /// The next stage that ends. Pends for ever when all have ended.
    pub(crate) async fn next_ended(&mut self) -> Ended {
        match self.waits.join_next().await {
            Some(Ok(ended)) => ended,
            _ => std::future::pending().await,
        }
    }

    /// SIGTERM to all, SIGKILL to those that do not end in time.
    pub(crate) async fn stop(mut self) {
        for &pid in &self.pids {
            // A process that has ended already is what we want.
            let _ = kill_process(pid, Signal::TERM);
        }
        let all = async { while self.waits.join_next().await.is_some() {} };
        if tokio::time::timeout(GRACE, all).await.is_err() {
            tracing::warn!("some stages did not end within {GRACE:?} of SIGTERM and are killed");
            self.waits.abort_all();
        }
    }
}

async fn wait(stage: usize, mut child: Child, stderr: ChildStderr) -> Ended {
    let relay = tokio::spawn(async move {
        let mut last = String::new();
        let mut lines = BufReader::new(stderr).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            // An object stays one.
            match line.strip_prefix('{') {
                Some(rest) => eprintln!("{{\"stage\":{stage},{rest}"),
                None => eprintln!("stage {stage} | {line}"),
            }
            last = line;
        }
        last
    });
    let status = child.wait().await.ok();
    Ended { stage, status, last_words: relay.await.unwrap_or_default() }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "stage {} ended", self.stage)?;
        if let Some(status) = self.status {
            write!(f, " ({status})")?;
        }
        match self.last_words.trim() {
            "" => Ok(()),
            words => write!(f, ": {words}"),
        }
    }
}
