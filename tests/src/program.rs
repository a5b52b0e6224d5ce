//! One running `baton` with what it printed.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::process::{self, Process};

/// How often a condition is looked at again.
const POLL: Duration = Duration::from_millis(20);

/// A running `baton`. Dropping it kills the process and its children.
#[derive(Debug)]
pub struct Program {
    child: Child,
    stdout: Lines,
    stderr: Lines,
}

/// Lines that arrive while somebody else waits.
#[derive(Clone, Debug, Default)]
struct Lines(Arc<Mutex<String>>);

impl Lines {
    fn follow(source: impl Read + Send + 'static) -> Self {
        let lines = Self::default();
        let into = lines.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(source).lines().map_while(Result::ok) {
                let mut text = into.0.lock().unwrap_or_else(PoisonError::into_inner);
                text.push_str(&line);
                text.push('\n');
            }
        });
        lines
    }

    fn text(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The program's file.
///
/// # Errors
/// When it has not been built.
pub fn binary() -> anyhow::Result<PathBuf> {
    let path = match std::env::var_os("BATON_BIN") {
        Some(path) => PathBuf::from(path),
        // Tests lie in `deps` of the directory that the program is built into.
        None => {
            let test = std::env::current_exe().context("find this test's file")?;
            test.ancestors().nth(2).context("a build directory")?.join("baton")
        }
    };
    if !path.exists() {
        bail!("{} does not exist; build it first: cargo build --bin baton", path.display());
    }
    Ok(path)
}

impl Program {
    /// Starts `baton` with these arguments.
    ///
    /// # Errors
    /// When it has not been built or does not start.
    pub fn start<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> anyhow::Result<Self> {
        Self::start_with([], arguments)
    }

    /// As [`Program::start`], with further environment variables, each `NAME=VALUE`.
    ///
    /// # Errors
    /// As [`Program::start`].
    pub fn start_with<'a, A: AsRef<OsStr>>(
        environment: impl IntoIterator<Item = &'a str>,
        arguments: impl IntoIterator<Item = A>,
    ) -> anyhow::Result<Self> {
        let binary = binary()?;
        let mut child = Command::new(&binary)
            .envs(environment.into_iter().filter_map(|variable| variable.split_once('=')))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {}", binary.display()))?;
        let stdout = child.stdout.take().map(Lines::follow).unwrap_or_default();
        let stderr = child.stderr.take().map(Lines::follow).unwrap_or_default();
        Ok(Self { child, stdout, stderr })
    }

    /// What it wrote to standard output so far.
    #[must_use]
    pub fn stdout(&self) -> String {
        self.stdout.text()
    }

    /// What it wrote to standard error so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        self.stderr.text()
    }

    /// Its children, oldest first.
    #[must_use]
    pub fn children(&self) -> Vec<Process> {
        process::children_of(self.child.id())
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it has ended already.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = Pid::from_raw(self.child.id().cast_signed()).context("a process id")?;
        kill_process(pid, signal).context("send a signal")
    }

    /// Its exit status, if it has ended.
    ///
    /// # Errors
    /// When the system does not tell.
    pub fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        self.child.try_wait().context("ask for the exit status")
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it still runs after `limit`; the error holds what it printed.
    pub fn wait(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.ended()? {
                // The threads that follow its output may be a moment behind.
                std::thread::sleep(5 * POLL);
                return Ok(status);
            }
            if start.elapsed() > limit {
                bail!(
                    "still running after {limit:?}; it printed\n{}{}",
                    self.stdout(),
                    self.stderr()
                );
            }
            std::thread::sleep(POLL);
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let children = self.children();
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for child in children {
            child.signal(Signal::KILL);
        }
    }
}

/// Waits until `condition` holds; false when it does not within `limit`.
pub async fn eventually(limit: Duration, condition: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !condition() {
        if start.elapsed() > limit {
            return false;
        }
        tokio::time::sleep(POLL).await;
    }
    true
}
