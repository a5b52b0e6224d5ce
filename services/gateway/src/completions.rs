//! `/v1/completions`: prompts as text or ids, several at once, with echo and log-probabilities.

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use baton_coordinator::GenerateRequest;
use serde_json::{Value, json};

use crate::answer::{Answer, Used};
use crate::app::AppState;
use crate::body::JsonFields;
use crate::choice::{Choice, Piece, ScoredToken};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generate::{self, Plan, reason_name};
use crate::params::Params;
use crate::tokenizer::TextTokenizer;
use crate::trace::RequestTrace;
use crate::{constraint, logprobs, prompt, sse};

/// OpenAI's default for `max_tokens` here.
const DEFAULT_MAX_TOKENS: usize = 16;
const OBJECT: &str = "text_completion";

pub(crate) async fn complete(
    State(app): State<AppState>,
    trace: RequestTrace,
    JsonFields(mut fields): JsonFields,
) -> Result<Response, ApiError> {
    let mut params = Params::read(&fields, &app.config)?;
    if let Some((field, grammar)) = constraint::read(&fields)? {
        let app = app.clone();
        let compile = move || app.compile(field, grammar, false, false);
        params.grammar = Some(prompt::blocking(compile).await??);
    }
    let own = OwnParams::read(&fields, &app, &params)?;
    let prompts = prompt::read(fields.take("prompt"), app.config.vocab_size)?;
    let each = own.best_of;
    let choices = prompts.len() * each;
    if choices > app.config.limits.choices {
        return Err(ApiError::field(
            "prompt",
            format!(
                "{} prompts with {each} choices each are {choices}, the limit is {}",
                prompts.len(),
                app.config.limits.choices
            ),
        ));
    }
    let tokenizing = SystemTime::now();
    let encoded = prompt::encode(&app.tokenizer, prompts, own.add_special_tokens).await?;
    trace.tokenized(tokenizing);
    let most = app.config.max_positions;
    let rooms = encoded
        .iter()
        .map(|ids| prompt::room("prompt", ids, params.max_tokens, DEFAULT_MAX_TOKENS, most))
        .collect::<Result<Vec<usize>, ApiError>>()?;
    let prompt_tokens = encoded.iter().map(Vec::len).sum();
    trace.asks("text_completion", &app.config.model_name, &params, prompt_tokens);
    let plans = encoded
        .iter()
        .zip(rooms)
        .flat_map(|(ids, room)| (0..each).map(move |i| (ids.as_slice(), room, i)))
        .map(|(ids, room, i)| {
            let request = GenerateRequest {
                prompt_logprobs: own.logprobs.filter(|_| own.echo),
                ..params.request(
                    &app.config,
                    (ids, room),
                    i,
                    own.generated_logprobs(),
                    trace.traceparent(),
                )
            };
            let options = params.text_options(&app.config, own.generated_logprobs().is_some());
            let echo = own.echo.then(|| ids.to_vec());
            Plan { request, choice: Choice::new(app.tokenizer.clone(), options, echo) }
        })
        .collect();
    let pieces = generate::start(&app, plans, &trace)?;
    let shape = Shape {
        answer: Answer::new(&app, "cmpl", &params, prompt_tokens),
        tokenizer: app.tokenizer.clone(),
        logprobs: own.logprobs,
        n: params.n,
        prompt_ids: params.return_token_ids.then_some(encoded),
    };
    if params.stream {
        let stream = Stream { shape, started: vec![false; choices], used: Used::default() };
        return sse::respond(pieces, stream).await;
    }
    let finished = generate::collect(pieces, choices).await?;
    let used = Used::of(&finished, each);
    let choices = best(finished, each, params.n).into_iter().enumerate();
    let choices = choices.map(|(index, piece)| shape.choice(index, piece, true)).collect();
    Ok(Json(shape.answer.whole(OBJECT, choices, used)).into_response())
}

/// Fields that only completions have.
struct OwnParams {
    /// Choices to generate for each prompt.
    best_of: usize,
    /// Whether only the best of them are wanted.
    ranked: bool,
    echo: bool,
    logprobs: Option<usize>,
    add_special_tokens: bool,
}

impl OwnParams {
    fn read(fields: &Fields, app: &AppState, params: &Params) -> Result<Self, ApiError> {
        let is_empty_text = |v: &Value| v.as_str() == Some("");
        fields.refuse_unless("suffix", is_empty_text, "null")?;
        let n = params.n;
        let most_choices = app.config.limits.choices_per_prompt as i64;
        let best_of = fields.integer_in("best_of", n as i64..=most_choices)?;
        let best_of = best_of.map_or(n, |best_of| best_of as usize);
        if best_of > n && params.stream {
            let message =
                "\"best_of\" above \"n\" cannot be streamed: the best are known at the end";
            return Err(ApiError::field("best_of", message));
        }
        let most = app.config.limits.logprobs as i64;
        Ok(Self {
            best_of,
            ranked: best_of > n,
            echo: fields.boolean("echo")?.unwrap_or(false),
            logprobs: fields.integer_in("logprobs", 0..=most)?.map(|n| n as usize),
            add_special_tokens: fields.boolean("add_special_tokens")?.unwrap_or(true),
        })
    }
}

impl OwnParams {
    /// Scores of generated tokens: those asked for, or what ranking needs.
    fn generated_logprobs(&self) -> Option<usize> {
        self.logprobs.or_else(|| self.ranked.then_some(0))
    }
}

/// Of every `each` choices the `n` with the highest mean log-probability per generated token, best first.
fn best(choices: Vec<Piece>, each: usize, n: usize) -> Vec<Piece> {
    if each == n {
        return choices;
    }
    let mut kept = Vec::new();
    let mut choices = choices.into_iter();
    loop {
        let mut group: Vec<(f32, Piece)> =
            choices.by_ref().take(each).map(|piece| (mean_logprob(&piece), piece)).collect();
        if group.is_empty() {
            return kept;
        }
        group.sort_by(|a, b| b.0.total_cmp(&a.0));
        kept.extend(group.into_iter().take(n).map(|(_, piece)| piece));
    }
}

/// Over the tokens that were generated, not those echoed.
fn mean_logprob(piece: &Piece) -> f32 {
    let generated = piece.tokens.len().min(piece.token_ids.len());
    let tokens = &piece.tokens[piece.tokens.len() - generated..];
    let sum: f32 = tokens.iter().filter_map(|token| token.logprob).sum();
    sum / generated.max(1) as f32
}

/// How choices look in this endpoint.
struct Shape {
    answer: Answer,
    tokenizer: Arc<TextTokenizer>,
    logprobs: Option<usize>,
    n: usize,
    /// Set when the client wants ids.
    prompt_ids: Option<Vec<Vec<u32>>>,
}

impl Shape {
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
}

struct Stream {
    shape: Shape,
    started: Vec<bool>,
    used: Used,
}

impl sse::Chunks for Stream {
    fn piece(&mut self, index: usize, piece: Piece) -> Vec<Value> {
        self.used.add(index, self.shape.n, &piece);
        let first = !std::mem::replace(&mut self.started[index], true);
        let choice = self.shape.choice(index, piece, first);
        vec![self.shape.answer.chunk(OBJECT, choice).into()]
    }

    fn end(&mut self) -> Option<Value> {
        self.shape.answer.closing(OBJECT, self.used)
    }
}
