//! A client of the HTTP API, as plain as can be.

use std::time::Duration;

use anyhow::{Context as _, bail};
use reqwest::{Response, StatusCode};
use serde_json::{Value, json};

/// Bound on any one request.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Speaks to one server.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    url: String,
    model: String,
}

impl Client {
    /// A client of the server at `url`, which serves `model`.
    ///
    /// # Errors
    /// When the HTTP library cannot be set up.
    pub fn new(url: &str, model: &str) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder().timeout(TIMEOUT).no_proxy().build()?;
        Ok(Self { http, url: url.to_owned(), model: model.to_owned() })
    }

    /// Status and JSON body of a GET.
    ///
    /// # Errors
    /// When there is no answer, or none in JSON.
    pub async fn get(&self, path: &str) -> anyhow::Result<(StatusCode, Value)> {
        let response = self.http.get(format!("{}{path}", self.url)).send().await?;
        let status = response.status();
        Ok((status, response.json().await.with_context(|| format!("the body of {path}"))?))
    }

    /// Status and JSON body of a POST.
    ///
    /// # Errors
    /// When there is no answer, or none in JSON.
    pub async fn post(&self, path: &str, body: &Value) -> anyhow::Result<(StatusCode, Value)> {
        let response = self.send(path, body).await?;
        let status = response.status();
        Ok((status, response.json().await.with_context(|| format!("the body of {path}"))?))
    }

    async fn send(&self, path: &str, body: &Value) -> anyhow::Result<Response> {
        Ok(self.http.post(format!("{}{path}", self.url)).json(body).send().await?)
    }

    /// A greedy completion of a prompt of ids, never ended by eos, unless `overrides` say otherwise.
    #[must_use]
    pub fn body(&self, prompt: &[u32], overrides: &Value) -> Value {
        let mut body = json!({
            "model": self.model,
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": true,
            "return_token_ids": true,
        });
        for (key, value) in overrides.as_object().into_iter().flatten() {
            body[key] = value.clone();
        }
        body
    }

    /// The only choice of a completion, which must succeed.
    ///
    /// # Errors
    /// When the answer is another one.
    pub async fn complete(&self, prompt: &[u32], overrides: &Value) -> anyhow::Result<Value> {
        let (status, answer) = self.post("/v1/completions", &self.body(prompt, overrides)).await?;
        match answer["choices"].as_array().map(Vec::as_slice) {
            Some([choice]) if status == StatusCode::OK => Ok(choice.clone()),
            _ => bail!("{status}: {answer}"),
        }
    }

    /// A streamed completion.
    ///
    /// # Errors
    /// When it does not begin.
    pub async fn stream(&self, prompt: &[u32], overrides: &Value) -> anyhow::Result<EventStream> {
        match self.try_stream(prompt, overrides).await? {
            Ok(stream) => Ok(stream),
            Err((status, answer)) => bail!("{status}: {answer}"),
        }
    }

    /// A streamed completion, or the answer that came in its place: a failure before the first token has a status.
    ///
    /// # Errors
    /// When there is neither.
    pub async fn try_stream(
        &self,
        prompt: &[u32],
        overrides: &Value,
    ) -> anyhow::Result<Result<EventStream, (StatusCode, Value)>> {
        let mut body = self.body(prompt, overrides);
        body["stream"] = true.into();
        let response = self.send("/v1/completions", &body).await?;
        match response.status() {
            StatusCode::OK => Ok(Ok(EventStream { response, buffer: Vec::new() })),
            status => Ok(Err((status, response.json().await.context("the body of a refusal")?))),
        }
    }
}

/// Server-sent events of one answer.
#[derive(Debug)]
pub struct EventStream {
    response: Response,
    buffer: Vec<u8>,
}

impl EventStream {
    /// The data of the next event; none at the end of the stream.
    ///
    /// # Errors
    /// When the connection breaks or sends no UTF-8.
    pub async fn next(&mut self) -> anyhow::Result<Option<String>> {
        loop {
            while let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                let line = std::str::from_utf8(&line)?.trim_end();
                if let Some(data) = line.strip_prefix("data:") {
                    return Ok(Some(data.trim_start().to_owned()));
                }
            }
            match self.response.chunk().await? {
                Some(chunk) => self.buffer.extend_from_slice(&chunk),
                None => return Ok(None),
            }
        }
    }
}
