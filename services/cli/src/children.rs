//! The stage processes of `baton up`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// How long a stage may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// Pauses before a stage is started again: the first, doubled with every end until the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A stage that ran this long has done nothing wrong in starting.
const STEADY: Duration = Duration::from_secs(60);

/// Stage processes; dropping this kills those that still run.
#[derive(Debug)]
pub(crate) struct Children {
    binary: PathBuf,
    /// By stage.
    arguments: Vec<Vec<OsString>>,
    pids: Arc<Mutex<Vec<Option<Pid>>>>,
    pauses: Vec<Duration>,
    started: Vec<Instant>,
    /// Ends the pauses before a start.
    stopping: CancellationToken,
    waits: JoinSet<Ended>,
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
        let stages = arguments.len();
        let mut children = Self {
            binary: std::env::current_exe().context("find this program's file")?,
            arguments,
            pids: Arc::new(Mutex::new(vec![None; stages])),
            pauses: vec![FIRST_PAUSE; stages],
            started: vec![Instant::now(); stages],
            stopping: CancellationToken::new(),
            waits: JoinSet::new(),
        };
        for stage in 0..stages {
            let child = start(&children.binary, &children.arguments[stage], stage, &children.pids)?;
            children.waits.spawn(wait(stage, child, Arc::clone(&children.pids)));
        }
        Ok(children)
    }

    /// Starts a stage that has ended again, after a pause that grows when it ends again and again.
    pub(crate) fn restart(&mut self, stage: usize) {
        if self.started[stage].elapsed() > STEADY {
            self.pauses[stage] = FIRST_PAUSE;
        }
        let pause = self.pauses[stage];
        self.pauses[stage] = (pause * 2).min(LONGEST_PAUSE);
        self.started[stage] = Instant::now() + pause;
        let (binary, arguments) = (self.binary.clone(), self.arguments[stage].clone());
        let (pids, stopping) = (Arc::clone(&self.pids), self.stopping.clone());
        self.waits.spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stopping.cancelled() => {}
            }
            match start(&binary, &arguments, stage, &pids) {
                Ok(child) => wait(stage, child, pids).await,
                Err(error) => Ended { stage, status: None, last_words: format!("{error:#}") },
            }
        });
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
        // Without places nothing is started any more.
        let pids = std::mem::take(&mut *lock(&self.pids));
        self.stopping.cancel();
        for pid in pids.into_iter().flatten() {
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

fn lock(pids: &Mutex<Vec<Option<Pid>>>) -> MutexGuard<'_, Vec<Option<Pid>>> {
    // Every change is one assignment.
    pids.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the process of a stage and notes its id.
fn start(
    binary: &Path,
    arguments: &[OsString],
    stage: usize,
    pids: &Mutex<Vec<Option<Pid>>>,
) -> anyhow::Result<Child> {
    // Locked while it starts: nobody who stops all may miss it.
    let mut pids = lock(pids);
    let place = pids.get_mut(stage).context("the stages are being stopped")?;
    let child = Command::new(binary)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0) // Ctrl-C reaches this process alone; it ends the stages in order.
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("start stage {stage}"))?;
    *place = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    Ok(child)
}

async fn wait(stage: usize, mut child: Child, pids: Arc<Mutex<Vec<Option<Pid>>>>) -> Ended {
    let stderr = child.stderr.take();
    let relay = tokio::spawn(async move {
        let Some(stderr) = stderr else { return String::new() };
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
    if let Some(place) = lock(&pids).get_mut(stage) {
        *place = None;
    }
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
