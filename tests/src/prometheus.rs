//! Debian's Prometheus, scraping a pipeline.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::pipeline::free_address;

/// How long a start may take.
const START: Duration = Duration::from_secs(30);

/// A running Prometheus with `deploy/prometheus/rules.yaml`. Dropping it kills it.
#[derive(Debug)]
pub struct Prometheus {
    url: String,
    client: reqwest::Client,
    server: Child,
    _place: TempDir,
}

/// A file of `deploy/`.
#[must_use]
pub fn deploy(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(file)
}

impl Prometheus {
    /// Scrapes the coordinator at `target` (host:port) and the stages that it names, every second, and evaluates the rules as
    /// often. It is Debian's package `prometheus`.
    ///
    /// # Errors
    /// When it is missing or does not start.
    pub async fn scraping(target: &str) -> anyhow::Result<Self> {
        let place = tempfile::tempdir()?;
        // The configuration that users get, faster and with this pipeline's address.
        let config = std::fs::read_to_string(deploy("prometheus/prometheus.yaml"))?
            .replace("coordinator:8000", target)
            .replace("5s", "1s")
            .replace("[rules.yaml]", &format!("[{}]", deploy("prometheus/rules.yaml").display()));
        let file = place.path().join("prometheus.yaml");
        std::fs::write(&file, config)?;
        let address = free_address()?;
        let server = Command::new("prometheus")
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", place.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(place.path().join("log"))?)
            .spawn()
            .context("start prometheus, of Debian's package prometheus")?;
        let client = reqwest::Client::builder().no_proxy().build()?;
        let url = format!("http://{address}");
        let started = Self { url, client, server, _place: place };
        let begun = Instant::now();
        while started.get("/api/v1/status/runtimeinfo", &[]).await.is_err() {
            if begun.elapsed() > START {
                let log = std::fs::read_to_string(started._place.path().join("log"))?;
                bail!("Prometheus does not answer after {START:?}:\n{log}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(started)
    }

    async fn get(&self, path: &str, query: &[(&str, &str)]) -> anyhow::Result<Value> {
        let query: Vec<String> =
            query.iter().map(|(name, value)| format!("{name}={}", encoded(value))).collect();
        let url = format!("{}{path}?{}", self.url, query.join("&"));
        let answer: Value = self.client.get(url).send().await?.json().await?;
        ensure!(answer["status"] == "success", "{path} {query:?}: {answer}");
        Ok(answer["data"].clone())
    }

    /// The series that an expression has now.
    ///
    /// # Errors
    /// When it is no valid expression.
    pub async fn query(&self, expression: &str) -> anyhow::Result<Vec<Value>> {
        let data = self.get("/api/v1/query", &[("query", expression)]).await?;
        Ok(data["result"].as_array().cloned().unwrap_or_default())
    }

    /// Waits until an expression has a series.
    ///
    /// # Errors
    /// When it has none within `limit`, or is not valid.
    pub async fn until(&self, expression: &str, limit: Duration) -> anyhow::Result<Vec<Value>> {
        let begun = Instant::now();
        loop {
            let series = self.query(expression).await?;
            if !series.is_empty() {
                return Ok(series);
            }
            ensure!(begun.elapsed() < limit, "nothing within {limit:?}: {expression}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Names of all metrics that it knows, recorded ones included.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn names(&self) -> anyhow::Result<Vec<String>> {
        Ok(serde_json::from_value(self.get("/api/v1/label/__name__/values", &[]).await?)?)
    }

    /// Its rules, with what is wrong with each.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn rules(&self) -> anyhow::Result<Vec<Value>> {
        let data = self.get("/api/v1/rules", &[]).await?;
        let groups = data["groups"].as_array().cloned().unwrap_or_default();
        Ok(groups.iter().flat_map(|g| g["rules"].as_array().cloned().unwrap_or_default()).collect())
    }
}

/// Percent-encoded, all that is not a letter or a digit.
fn encoded(value: &str) -> String {
    value
        .bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
