//! `baton up` on a tiny checkpoint, ready for requests.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use reqwest::StatusCode;

use crate::client::Client;
use crate::models::model_dir;
use crate::process::Process;
use crate::program::Program;

/// How long a start may take.
const START: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(20);

/// A running pipeline. Dropping it kills all its processes.
#[derive(Debug)]
pub struct Server {
    /// The process that was started.
    pub program: Program,
    /// Speaks to it.
    pub client: Client,
    /// `http://127.0.0.1:PORT`.
    pub url: String,
}

impl Server {
    /// Serves a tiny checkpoint with these further options, and waits until it is ready.
    ///
    /// # Errors
    /// When it is not ready in time; the error holds what it printed.
    pub async fn start(model: &str, options: &[&str]) -> anyhow::Result<Self> {
        Self::start_in(&model_dir(model), options).await
    }

    /// As [`Server::start`], with any checkpoint directory.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub async fn start_in(directory: &Path, options: &[&str]) -> anyhow::Result<Self> {
        let name = directory.file_name().and_then(|name| name.to_str()).context("a directory")?;
        let path = directory.to_str().context("a path in UTF-8")?;
        let fixed = ["up", "--model", path, "--port", "0", "--threads", "1"];
        Self::ready(Program::start(fixed.iter().chain(options))?, name).await
    }

    /// Waits until a program that serves `model` is ready.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub async fn ready(mut program: Program, model: &str) -> anyhow::Result<Self> {
        let start = Instant::now();
        let mut client: Option<(Client, String)> = None;
        loop {
            if let Some(status) = program.ended()? {
                let (out, err) = (program.stdout(), program.stderr());
                bail!("baton ended ({status}) before it was ready:\n{out}{err}");
            }
            match &client {
                None => {
                    if let Some(url) = url_in(&program.stdout()) {
                        client = Some((Client::new(&url, model)?, url));
                    }
                }
                Some((ready, url)) => {
                    if matches!(ready.get("/ready").await, Ok((StatusCode::OK, _))) {
                        return Ok(Self { client: ready.clone(), url: url.clone(), program });
                    }
                }
            }
            if start.elapsed() > START {
                let (out, err) = (program.stdout(), program.stderr());
                bail!("baton is not ready after {START:?}:\n{out}{err}");
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// The process of a stage.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn stage(&self, index: usize) -> anyhow::Result<Process> {
        let wanted = index.to_string();
        self.program
            .children()
            .into_iter()
            .find(|process| process.argument("--index") == Some(&wanted))
            .with_context(|| format!("no process has --index {index}"))
    }
}

/// The first address that a line of standard output names.
fn url_in(output: &str) -> Option<String> {
    let complete = &output[..=output.rfind('\n')?];
    let url = &complete[complete.find("http://")?..];
    let end = url.find(|c: char| c.is_whitespace() || c == ',').unwrap_or(url.len());
    Some(url[..end].trim_end_matches(['/', '.']).to_owned())
}
