//! One OpenAI-compatible server, of baton or any other engine.

use std::time::Duration;

use reqwest::{Client, RequestBuilder, Response};
use serde_json::Value;

use crate::error::VerifyError;

/// How long a server may take for one answer.
const PATIENCE: Duration = Duration::from_secs(600);

/// A server and the model that it is asked for.
#[derive(Clone, Debug)]
pub struct Server {
    client: Client,
    url: String,
    model: String,
    key: Option<String>,
}

impl Server {
    /// Asks the server at `base`, with or without `/v1`, which models it serves, and takes `model` or the only one.
    ///
    /// # Errors
    /// When it cannot be reached, or serves several models and none is named.
    pub async fn connect(
        base: &str,
        model: Option<&str>,
        key: Option<&str>,
    ) -> Result<Self, VerifyError> {
        let url = base.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let failed = |reason: String| VerifyError::Server { url: url.clone(), reason };
        let client = Client::builder()
            .timeout(PATIENCE)
            .connect_timeout(Duration::from_secs(10))
            .build()
            .map_err(|e| failed(e.to_string()))?;
        let mut server = Self { client, url, model: String::new(), key: key.map(str::to_owned) };
        let models = server.get("/v1/models").await?;
        let served: Vec<&str> = models["data"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|model| model["id"].as_str())
            .collect();
        server.model = match (model, served.as_slice()) {
            (Some(model), _) => model.to_owned(),
            (None, [only]) => (*only).to_owned(),
            (None, several) => {
                return Err(
                    server.failed(format!("it serves {several:?}, expected one, or a name"))
                );
            }
        };
        Ok(server)
    }

    /// Its address, without `/v1`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The model's name.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The JSON that a GET is answered with.
    ///
    /// # Errors
    /// When there is no such answer; the error holds what the server said.
    pub async fn get(&self, path: &str) -> Result<Value, VerifyError> {
        let response = self.send(path, self.client.get(self.at(path))).await?;
        self.json(path, response).await
    }

    /// The JSON that a POST is answered with.
    ///
    /// # Errors
    /// As [`Server::get`].
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, VerifyError> {
        let response = self.open(path, body).await?;
        self.json(path, response).await
    }

    /// A successful answer to a POST, its body still to be read.
    ///
    /// # Errors
    /// As [`Server::get`].
    pub async fn open(&self, path: &str, body: &Value) -> Result<Response, VerifyError> {
        self.send(path, self.client.post(self.at(path)).json(body)).await
    }

    fn at(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    pub(crate) fn failed(&self, reason: impl Into<String>) -> VerifyError {
        VerifyError::Server { url: self.url.clone(), reason: reason.into() }
    }

    /// What a failed connection says: its cause is at the end of the chain.
    #[must_use]
    pub fn broken(&self, path: &str, error: &reqwest::Error) -> VerifyError {
        let mut cause: &dyn std::error::Error = error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        self.failed(format!("{path}: {cause}"))
    }

    async fn send(&self, path: &str, request: RequestBuilder) -> Result<Response, VerifyError> {
        let request = match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        let response = request.send().await.map_err(|e| self.broken(path, &e))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let text = response.text().await.map_err(|e| self.broken(path, &e))?;
        let answer: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
        let said = answer["error"]["message"].as_str().unwrap_or(text.trim());
        Err(self.failed(format!("{path} answered {status}: {said}")))
    }

    async fn json(&self, path: &str, response: Response) -> Result<Value, VerifyError> {
        let text = response.text().await.map_err(|e| self.broken(path, &e))?;
        serde_json::from_str(&text)
            .map_err(|_| self.failed(format!("{path} did not answer in JSON")))
    }
}
