//! The other end of the gateway's channels: scripted, or a small deterministic "model".

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use baton_coordinator::request::Submission;
use baton_coordinator::{
    CoordinatorHandle, Event, FinishReason, GenerateRequest, Readiness, Timeline, TokenLogprob,
};
use baton_gateway::{Gateway, GatewayConfig, GenerationDefaults, Limits, serve};
use baton_telemetry::{Metrics, MetricsConfig};
use reqwest::Response;
use serde_json::{Value, json};
use tokenizers::Tokenizer;
use tokio::sync::{mpsc, oneshot, watch};

/// `<|endoftext|>` of the fixture.
pub(crate) const EOS: u32 = 476;
/// Embedding rows of the pretended model: more than the tokenizer has ids.
pub(crate) const VOCAB: usize = 512;
pub(crate) const MAX_POSITIONS: usize = 4096;
pub(crate) const MODEL: &str = "org/tiny";

pub(crate) fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

pub(crate) fn encode(text: &str) -> Vec<u32> {
    let tokenizer = Tokenizer::from_file(fixtures().join("tokenizer.json")).unwrap();
    tokenizer.encode(text, false).unwrap().get_ids().to_vec()
}

pub(crate) fn token(id: u32) -> Event {
    Event::Token { token: TokenLogprob { token: id, logprob: -0.5 }, top: vec![] }
}

/// Events that spell a text and end.
pub(crate) fn says(text: &str, reason: FinishReason) -> Vec<Event> {
    encode(text).into_iter().map(token).chain([Event::Finished(reason)]).collect()
}

/// A running gateway.
pub(crate) struct Server {
    pub(crate) url: String,
    pub(crate) client: reqwest::Client,
    pub(crate) readiness: watch::Sender<Readiness>,
    pub(crate) requests: Arc<Mutex<Vec<GenerateRequest>>>,
    pub(crate) timeline: Timeline,
    stop: Option<oneshot::Sender<()>>,
    pub(crate) serving: tokio::task::JoinHandle<std::io::Result<()>>,
}

pub(crate) fn config() -> GatewayConfig {
    GatewayConfig {
        model_dir: fixtures(),
        model_name: MODEL.into(),
        max_positions: MAX_POSITIONS,
        vocab_size: VOCAB,
        eos_token_ids: vec![EOS],
        defaults: GenerationDefaults::default(),
        limits: Limits { body_bytes: 1 << 20, ..Limits::default() },
        traces: baton_telemetry::Traces::off(),
    }
}

/// Two stages; a scraper is answered by one of them.
pub(crate) fn pipeline_state() -> Value {
    json!({"stages": [
        {"index": 0, "layers": [0, 3], "metrics": null},
        {"index": 1, "layers": [3, 6], "metrics": "10.0.0.7:9100"},
    ]})
}

impl Server {
    /// A gateway whose submissions the test takes itself.
    pub(crate) async fn raw(
        config: GatewayConfig,
        queue: usize,
    ) -> (Self, mpsc::Receiver<Submission>) {
        let (submissions, receiver) = mpsc::channel(queue);
        let (readiness, ready) = watch::channel(Readiness::Ready);
        let (mut pipeline, state) = baton_coordinator::state::channel();
        tokio::spawn(async move { pipeline.answer(pipeline_state).await });
        let metrics = Metrics::new(MetricsConfig::default()).unwrap();
        let timeline = Timeline::new(2);
        let handle = CoordinatorHandle::new(submissions, ready, state, timeline.clone());
        let router = Gateway::new(config, handle, &metrics).unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (stop, stopped) = oneshot::channel();
        let serving = tokio::spawn(serve(
            listener,
            router,
            async {
                let _ = stopped.await;
            },
            std::time::Duration::from_secs(10),
        ));
        let server = Self {
            url,
            client: reqwest::Client::new(),
            readiness,
            requests: Arc::default(),
            timeline,
            stop: Some(stop),
            serving,
        };
        (server, receiver)
    }

    /// Every request gets the events that `script` makes for it.
    pub(crate) async fn scripted(
        script: impl Fn(&GenerateRequest) -> Vec<Event> + Send + 'static,
    ) -> Self {
        Self::scripted_with(config(), script).await
    }

    pub(crate) async fn scripted_with(
        config: GatewayConfig,
        script: impl Fn(&GenerateRequest) -> Vec<Event> + Send + 'static,
    ) -> Self {
        let (server, mut submissions) = Self::raw(config, 64).await;
        let requests = server.requests.clone();
        tokio::spawn(async move {
            while let Some(Submission { request, events, .. }) = submissions.recv().await {
                for event in script(&request) {
                    // The gateway may have dropped its end at a stop string.
                    let _ = events.send(event);
                }
                requests.lock().unwrap().push(request);
            }
        });
        server
    }

    /// Every request gets the same text.
    pub(crate) async fn saying(text: &'static str) -> Self {
        Self::scripted(move |_| says(text, FinishReason::Length)).await
    }

    /// The small deterministic model.
    pub(crate) async fn model() -> Self {
        Self::scripted(generate).await
    }

    pub(crate) fn shut_down(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Response {
        let request = self.client.post(format!("{}{path}", self.url)).json(&body);
        request.send().await.unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.client.get(format!("{}{path}", self.url)).send().await.unwrap()
    }

    /// The JSON answer of a request that must succeed.
    pub(crate) async fn ok(&self, path: &str, body: Value) -> Value {
        let response = self.post(path, body).await;
        let status = response.status();
        let answer = response.json().await.unwrap();
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// The data lines of a streamed answer.
    pub(crate) async fn stream(&self, path: &str, body: Value) -> Vec<String> {
        let response = self.post(path, body).await;
        let status = response.status();
        let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
        let text = response.text().await.unwrap();
        assert_eq!(status, 200, "{text}");
        assert!(kind.starts_with("text/event-stream"), "{kind}");
        let data = |line: &str| line.strip_prefix("data: ").map(str::to_owned);
        text.lines().filter_map(data).collect()
    }

    pub(crate) fn request(&self, i: usize) -> GenerateRequest {
        self.requests.lock().unwrap()[i].clone()
    }
}

/// JSON chunks of a stream that ended as it should.
pub(crate) fn chunks(mut lines: Vec<String>) -> Vec<Value> {
    assert_eq!(lines.pop().as_deref(), Some("[DONE]"));
    lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn scored(id: u32, k: usize) -> (TokenLogprob, Vec<TokenLogprob>) {
    let entry = |i: usize| TokenLogprob {
        token: (id + i as u32) % VOCAB as u32,
        logprob: -0.25 - i as f32,
    };
    (entry(0), (0..k).map(entry).collect())
}

/// Plain words whose choice depends on what came before, and on the seed when sampling.
fn generate(request: &GenerateRequest) -> Vec<Event> {
    let words = encode(" the model answers a question about the river and the sea one token at a");
    let seed = if request.sampling.temperature > 0.0 { request.sampling.seed } else { 0 };
    let mut events = Vec::new();
    if let Some(k) = request.prompt_logprobs {
        events.push(Event::Prompt(request.prompt[1..].iter().map(|&id| scored(id, k)).collect()));
    }
    let mut state = request.prompt.iter().fold(seed, |s, &id| mix(s ^ u64::from(id)));
    for _ in 0..request.max_tokens {
        state = mix(state);
        let (token, top) =
            scored(words[state as usize % words.len()], request.logprobs.unwrap_or(0));
        events.push(Event::Token { token, top });
        if request.stop_token_ids.contains(&token.token) {
            events.push(Event::Finished(FinishReason::Stop));
            return events;
        }
    }
    events.push(Event::Finished(FinishReason::Length));
    events
}

fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 27)
}
