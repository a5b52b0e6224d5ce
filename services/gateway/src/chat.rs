//! `/v1/chat/completions`: messages through the checkpoint's own template.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Used};
use crate::app::{AppState, traceparent};
use crate::body::JsonFields;
use crate::chat_template::{self, Chat};
use crate::choice::{Choice, Piece, ScoredToken};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generate::{self, Plan, reason_name};
use crate::params::Params;
use crate::tokenizer::TextTokenizer;
use crate::{logprobs, prompt, sse};

const OBJECT: &str = "chat.completion";
const CHUNK: &str = "chat.completion.chunk";
/// Template variables that a request sets through fields of its own.
const OWN_VARIABLES: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

pub(crate) async fn complete(
    State(app): State<AppState>,
    headers: HeaderMap,
    JsonFields(mut fields): JsonFields,
) -> Result<Response, ApiError> {
    let params = Params::read(&fields, &app.config)?;
    let scores = read_logprobs(&fields, app.config.limits.logprobs)?;
    refuse_unsupported(&fields)?;
    if params.max_tokens == Some(0) {
        return Err(ApiError::field("max_tokens", "\"max_tokens\" is 0, expected at least 1"));
    }
    let add_special_tokens = fields.boolean("add_special_tokens")?.unwrap_or(false);
    let text = render(&app, &mut fields).await?;
    let ids = prompt::encode_text(&app.tokenizer, text, add_special_tokens).await?;
    let max_tokens = prompt::room(
        "messages",
        &ids,
        params.max_tokens,
        app.config.max_positions,
        app.config.max_positions,
    )?;
    let trace = traceparent(&headers);
    let plans = (0..params.n)
        .map(|i| {
            let request = params.request(&app.config, (&ids, max_tokens), i, scores, &trace);
            let options = params.text_options(&app.config, scores.is_some());
            Plan { request, choice: Choice::new(app.tokenizer.clone(), options, None) }
        })
        .collect();
    let pieces = generate::start(&app.handle, plans)?;
    let shape = Shape {
        answer: Answer::new(&app, "chatcmpl", &params, ids.len()),
        tokenizer: app.tokenizer.clone(),
        logprobs: scores,
        prompt_ids: params.return_token_ids.then_some(ids),
    };
    if params.stream {
        let stream = Stream {
            shape,
            started: vec![false; params.n],
            any_started: false,
            used: Used::default(),
        };
        return sse::respond(pieces, stream).await;
    }
    let finished = generate::collect(pieces, params.n).await?;
    let used = Used::of(&finished, params.n);
    let choices = finished.into_iter().enumerate();
    let choices = choices.map(|(index, piece)| shape.choice(index, piece)).collect();
    let mut body = shape.answer.whole(OBJECT, choices, used);
    if let Some(ids) = &shape.prompt_ids {
        body.insert("prompt_token_ids".into(), ids.as_slice().into());
    }
    Ok(Json(body).into_response())
}

/// The chat as the template renders it.
pub(crate) async fn render(app: &AppState, fields: &mut Fields) -> Result<String, ApiError> {
    let Some(template) = &app.template else {
        return Err(ApiError::field(
            "messages",
            "this checkpoint has no chat template; send a prompt to /v1/completions",
        ));
    };
    let add_generation_prompt = fields.boolean("add_generation_prompt")?;
    let continue_final_message = fields.boolean("continue_final_message")?.unwrap_or(false);
    if continue_final_message && add_generation_prompt == Some(true) {
        return Err(ApiError::field(
            "continue_final_message",
            "\"continue_final_message\" and \"add_generation_prompt\" exclude each other",
        ));
    }
    let variables = variables(fields)?;
    let tools = tools(fields)?;
    fields.list("documents")?;
    fields.list("messages")?;
    let Some(Value::Array(messages)) = fields.take("messages") else {
        return Err(ApiError::field("messages", "\"messages\" is missing"));
    };
    let chat = Chat {
        messages: chat_template::normalise(messages, template)?,
        tools,
        documents: fields.take("documents"),
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
        variables,
    };
    let app = app.clone();
    let rendered = prompt::blocking(move || app.template.as_ref().map(|t| t.render(chat))).await?;
    let text = rendered.ok_or_else(|| ApiError::internal("the chat template is gone"))?;
    text.map_err(|e| ApiError::field("messages", e.to_string()))
}

fn variables(fields: &Fields) -> Result<Map<String, Value>, ApiError> {
    let mut variables = Map::new();
    if let Some(effort) = fields.string("reasoning_effort")? {
        variables.insert("reasoning_effort".into(), effort.into());
    }
    if let Some(own) = fields.object("chat_template_kwargs")? {
        if let Some(name) = OWN_VARIABLES.iter().find(|name| own.contains_key(**name)) {
            return Err(ApiError::field(
                "chat_template_kwargs",
                format!("\"chat_template_kwargs\" sets {name:?}, which has a field of its own"),
            ));
        }
        variables.extend(own.clone());
    }
    Ok(variables)
}

/// The tools to show to the model; none when it may not call any.
fn tools(fields: &Fields) -> Result<Option<Value>, ApiError> {
    let Some(tools) = fields.list("tools")? else { return Ok(None) };
    for (i, tool) in tools.iter().enumerate() {
        let name = tool.get("function").and_then(|f| f.get("name"));
        if !name.is_some_and(Value::is_string) {
            return Err(ApiError::field(
                format!("tools[{i}].function.name"),
                format!("tools[{i}].function.name is missing, expected the name of a function"),
            ));
        }
    }
    let forbidden = fields.get("tool_choice").and_then(Value::as_str) == Some("none");
    Ok((!tools.is_empty() && !forbidden).then(|| tools.clone().into()))
}

fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    let free = |v: &Value| matches!(v.as_str(), Some("auto" | "none"));
    fields.refuse_unless("tool_choice", free, "\"auto\" or \"none\"")?;
    let is_none = |v: &Value| v.as_str() == Some("none");
    fields.refuse_unless("function_call", is_none, "null")?;
    let is_empty = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
    fields.refuse_unless("functions", is_empty, "null")?;
    let only_text = |v: &Value| v.as_array().is_some_and(|m| m.iter().all(|m| m == "text"));
    fields.refuse_unless("modalities", only_text, "[\"text\"]")?;
    fields.refuse_unless("audio", |_| false, "null")?;
    fields.refuse_unless("web_search_options", |_| false, "null")?;
    fields.refuse_unless("echo", |v| v == &Value::Bool(false), "false")
}

fn read_logprobs(fields: &Fields, most: usize) -> Result<Option<usize>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    match fields.integer_in("top_logprobs", 0..=most as i64)? {
        Some(top) if wanted => Ok(Some(top as usize)),
        Some(top) if top > 0 => Err(ApiError::field(
            "top_logprobs",
            "\"top_logprobs\" is only allowed with \"logprobs\": true",
        )),
        _ => Ok(wanted.then_some(0)),
    }
}

/// How choices look in this endpoint.
struct Shape {
    answer: Answer,
    tokenizer: Arc<TextTokenizer>,
    logprobs: Option<usize>,
    /// Set when the client wants ids.
    prompt_ids: Option<Vec<u32>>,
}

impl Shape {
    fn scores(&self, tokens: &[ScoredToken]) -> Value {
        self.logprobs.map_or(Value::Null, |top| logprobs::chat(&self.tokenizer, tokens, top))
    }

    fn choice(&self, index: usize, piece: Piece) -> Value {
        let mut choice = json!({
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": null},
            "logprobs": self.scores(&piece.tokens),
            "finish_reason": piece.finish.map(reason_name),
        });
        self.add_ids(&mut choice, piece.token_ids);
        choice
    }

    fn delta(&self, index: usize, piece: Piece) -> Value {
        let delta = if piece.text.is_empty() { json!({}) } else { json!({"content": piece.text}) };
        let scores = if piece.tokens.is_empty() { Value::Null } else { self.scores(&piece.tokens) };
        let mut choice = json!({
            "index": index,
            "delta": delta,
            "logprobs": scores,
            "finish_reason": piece.finish.map(reason_name),
        });
        self.add_ids(&mut choice, piece.token_ids);
        choice
    }

    fn add_ids(&self, choice: &mut Value, ids: Vec<u32>) {
        if self.prompt_ids.is_some() {
            choice["token_ids"] = ids.into();
        }
    }
}

struct Stream {
    shape: Shape,
    started: Vec<bool>,
    any_started: bool,
    used: Used,
}

impl Stream {
    /// The chunk that opens a choice; the very first one also carries the prompt's ids.
    fn opening(&mut self, index: usize) -> Option<Value> {
        if std::mem::replace(&mut self.started[index], true) {
            return None;
        }
        let choice = json!({
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": null,
            "finish_reason": null,
        });
        let mut chunk = self.shape.answer.chunk(CHUNK, choice);
        if !std::mem::replace(&mut self.any_started, true)
            && let Some(ids) = &self.shape.prompt_ids
        {
            chunk.insert("prompt_token_ids".into(), ids.as_slice().into());
        }
        Some(chunk.into())
    }
}

impl sse::Chunks for Stream {
    fn piece(&mut self, index: usize, piece: Piece) -> Vec<Value> {
        self.used.add(index, self.started.len(), &piece);
        let mut chunks: Vec<Value> = self.opening(index).into_iter().collect();
        chunks.push(self.shape.answer.chunk(CHUNK, self.shape.delta(index, piece)).into());
        chunks
    }

    fn end(&mut self) -> Option<Value> {
        self.shape.answer.closing(CHUNK, self.used)
    }
}
