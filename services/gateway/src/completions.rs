//! `/v1/completions`: prompts as text or ids, several at once, with echo and log-probabilities.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use baton_coordinator::GenerateRequest;
use serde_json::{Map, Value, json};

use crate::app::{AppState, answer_id, traceparent, unix_time};
use crate::body::JsonFields;
use crate::choice::{Choice, Piece, ScoredToken, TextOptions};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generate::{self, Plan, reason_name};
use crate::params::Params;
use crate::tokenizer::TextTokenizer;
use crate::{logprobs, prompt, sse};

/// OpenAI's default for `max_tokens` here.
const DEFAULT_MAX_TOKENS: usize = 16;

pub(crate) async fn complete(
    State(app): State<AppState>,
    headers: HeaderMap,
    JsonFields(mut fields): JsonFields,
) -> Result<Response, ApiError> {
    let params = Params::read(&fields, &app.config)?;
    let own = OwnParams::read(&fields, &app, &params)?;
    let prompts = prompt::read(fields.take("prompt"), app.config.vocab_size)?;
    let choices = prompts.len() * params.n;
    if choices > app.config.limits.choices {
        return Err(ApiError::field(
            "prompt",
            format!(
                "{} prompts with \"n\" {} are {choices} choices, the limit is {}",
                prompts.len(),
                params.n,
                app.config.limits.choices
            ),
        ));
    }
    let mut encoded = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let ids = prompt::encode(&app.tokenizer, prompt, own.add_special_tokens).await?;
        let max_positions = app.config.max_positions;
        let room =
            prompt::room("prompt", &ids, params.max_tokens, DEFAULT_MAX_TOKENS, max_positions)?;
        encoded.push((ids, room));
    }
    let trace = traceparent(&headers);
    let plans = encoded
        .iter()
        .flat_map(|(ids, room)| (0..params.n).map(move |i| (ids, *room, i)))
        .map(|(ids, max_tokens, i)| {
            let request = GenerateRequest {
                prompt: ids.clone(),
                max_tokens,
                sampling: params.sampling(i),
                logprobs: own.logprobs,
                prompt_logprobs: own.logprobs.filter(|_| own.echo),
                stop_token_ids: params.end_ids(&app.config),
                ignore_eos: params.ignore_eos,
                traceparent: trace.clone(),
            };
            let options = TextOptions {
                stop: params.stop.clone(),
                terminators: params.terminators(&app.config),
                skip_special_tokens: params.skip_special_tokens,
                scores: own.logprobs.is_some(),
            };
            let echo = own.echo.then(|| ids.clone());
            Plan { request, choice: Choice::new(app.tokenizer.clone(), options, echo) }
        })
        .collect();
    let pieces = generate::start(&app.handle, plans)?;
    let shape = Shape {
        id: answer_id("cmpl"),
        created: unix_time(),
        model: app.config.model_name.clone(),
        tokenizer: app.tokenizer.clone(),
        logprobs: own.logprobs,
        n: params.n,
        prompt_tokens: encoded.iter().map(|(ids, _)| ids.len()).sum(),
        prompt_ids: params
            .return_token_ids
            .then(|| encoded.into_iter().map(|(ids, _)| ids).collect()),
        include_usage: params.include_usage,
    };
    if params.stream {
        let stream = Stream { shape, started: vec![false; choices], completion_tokens: 0 };
        return sse::respond(pieces, stream).await;
    }
    let finished = generate::collect(pieces, choices).await?;
    let completion_tokens = finished.iter().map(|c| c.token_ids.len()).sum();
    let choices: Vec<Value> = finished
        .into_iter()
        .enumerate()
        .map(|(index, c)| {
            let piece =
                Piece { text: c.text, tokens: c.tokens, token_ids: c.token_ids, finish: c.reason };
            shape.choice(index, piece, true)
        })
        .collect();
    let mut body = shape.body(choices);
    body.insert("usage".into(), shape.usage(completion_tokens));
    Ok(Json(body).into_response())
}

/// Fields that only completions have.
struct OwnParams {
    echo: bool,
    logprobs: Option<usize>,
    add_special_tokens: bool,
}

impl OwnParams {
    fn read(fields: &Fields, app: &AppState, params: &Params) -> Result<Self, ApiError> {
        let is_empty_text = |v: &Value| v.as_str() == Some("");
        fields.refuse_unless("suffix", is_empty_text, "null")?;
        let n = params.n as u64;
        fields.refuse_unless("best_of", |v| v.as_u64() == Some(n), "the value of \"n\"")?;
        let most = app.config.limits.logprobs as i64;
        Ok(Self {
            echo: fields.boolean("echo")?.unwrap_or(false),
            logprobs: fields.integer_in("logprobs", 0..=most)?.map(|n| n as usize),
            add_special_tokens: fields.boolean("add_special_tokens")?.unwrap_or(true),
        })
    }
}

/// What stays the same over an answer.
struct Shape {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<TextTokenizer>,
    logprobs: Option<usize>,
    n: usize,
    prompt_tokens: usize,
    /// Set when the client wants ids.
    prompt_ids: Option<Vec<Vec<u32>>>,
    include_usage: bool,
}

impl Shape {
    fn body(&self, choices: Vec<Value>) -> Map<String, Value> {
        let mut body = Map::new();
        body.insert("id".into(), self.id.as_str().into());
        body.insert("object".into(), "text_completion".into());
        body.insert("created".into(), self.created.into());
        body.insert("model".into(), self.model.as_str().into());
        body.insert("choices".into(), choices.into());
        body
    }

    fn scores(&self, tokens: &[ScoredToken]) -> Value {
        self.logprobs.map_or(Value::Null, |top| logprobs::completion(&self.tokenizer, tokens, top))
    }

    fn choice(&self, index: usize, piece: Piece, first: bool) -> Value {
        let mut choice = json!({
            "index": index,
            "text": piece.text,
            "logprobs": self.scores(&piece.tokens),
            "finish_reason": piece.finish.map(reason_name),
        });
        if let Some(prompts) = &self.prompt_ids {
            choice["token_ids"] = piece.token_ids.into();
            if first {
                choice["prompt_token_ids"] = prompts[index / self.n].as_slice().into();
            }
        }
        choice
    }

    fn usage(&self, completion_tokens: usize) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        })
    }
}

struct Stream {
    shape: Shape,
    started: Vec<bool>,
    completion_tokens: usize,
}

impl sse::Chunks for Stream {
    fn piece(&mut self, index: usize, piece: Piece) -> Vec<Value> {
        self.completion_tokens += piece.token_ids.len();
        let first = !std::mem::replace(&mut self.started[index], true);
        let mut chunk = self.shape.body(vec![self.shape.choice(index, piece, first)]);
        if self.shape.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        vec![chunk.into()]
    }

    fn end(&mut self) -> Option<Value> {
        self.shape.include_usage.then(|| {
            let mut chunk = self.shape.body(Vec::new());
            chunk.insert("usage".into(), self.shape.usage(self.completion_tokens));
            chunk.into()
        })
    }
}
