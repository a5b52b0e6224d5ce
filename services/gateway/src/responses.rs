//! `/v1/responses`: OpenAI's newer form of a chat. Nothing is kept: a request brings its whole conversation.

mod events;
mod input;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use baton_coordinator::FinishReason;
use serde_json::{Map, Value, json};

use crate::answer::Used;
use crate::app::{AppState, unix_time};
use crate::body::JsonFields;
use crate::chat::Asked;
use crate::chat::message::{Call, Message};
use crate::choice::Piece;
use crate::error::ApiError;
use crate::trace::RequestTrace;
use crate::{generate, sse};

pub(crate) async fn create(
    State(app): State<AppState>,
    trace: RequestTrace,
    JsonFields(mut fields): JsonFields,
) -> Result<Response, ApiError> {
    let echoed = input::echoed(&fields);
    let mut chat = input::chat(&mut fields)?;
    let asked = Asked::read(&app, &mut chat, &trace).await?;
    if asked.params.n > 1 {
        return Err(ApiError::field(
            "n",
            "\"n\" is not a field of responses, which have one answer",
        ));
    }
    let pieces = asked.start(&app, &trace)?;
    let answer = Answer {
        id: id("resp"),
        created: unix_time(),
        model: app.config.model_name.clone(),
        echoed,
        prompt_tokens: asked.prompt.len(),
        reasoning: ReasoningTokens {
            open: asked.thinking,
            end: app.tokenizer.id_of_added("</think>"),
            tokens: 0,
        },
        used: Used::default(),
    };
    if asked.params.stream {
        let events = events::Events::new(answer, asked.parser());
        return sse::respond(pieces, events).await;
    }
    let mut answer = answer;
    let piece = generate::collect(pieces, 1).await?.pop().unwrap_or_default();
    answer.count(&piece);
    let message = Message::of(&piece.text, &mut asked.parser());
    Ok(Json(answer.body(finished(piece.finish), output(&message))).into_response())
}

/// An id that is unique enough.
fn id(prefix: &str) -> String {
    format!("{prefix}_{:032x}", rand::random::<u128>())
}

/// Counts the tokens of the reasoning while they come.
#[derive(Debug)]
struct ReasoningTokens {
    open: bool,
    end: Option<u32>,
    tokens: usize,
}

impl ReasoningTokens {
    fn count(&mut self, ids: &[u32]) {
        for token in ids {
            if !self.open {
                return;
            }
            self.tokens += 1;
            self.open = Some(*token) != self.end;
        }
    }
}

/// What all forms of one answer have in common.
#[derive(Debug)]
struct Answer {
    id: String,
    created: u64,
    model: String,
    echoed: Map<String, Value>,
    prompt_tokens: usize,
    reasoning: ReasoningTokens,
    used: Used,
}

impl Answer {
    fn count(&mut self, piece: &Piece) {
        self.reasoning.count(&piece.token_ids);
        self.used.add(0, 1, piece);
    }

    /// The response object. `status` is "in_progress", "completed" or "incomplete".
    fn body(&self, status: &str, output: Vec<Value>) -> Value {
        let mut body = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details":
                (status == "incomplete").then(|| json!({"reason": "max_output_tokens"})),
            "model": self.model,
            "output": output,
            "previous_response_id": null,
            "store": false,
            "truncation": "disabled",
        });
        for (name, value) in &self.echoed {
            body[name] = value.clone();
        }
        body["usage"] = match status {
            "in_progress" => Value::Null,
            _ => json!({
                "input_tokens": self.prompt_tokens,
                "input_tokens_details": {"cached_tokens": self.used.cached_tokens},
                "output_tokens": self.used.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reasoning.tokens},
                "total_tokens": self.prompt_tokens + self.used.completion_tokens,
            }),
        };
        body
    }
}

fn finished(reason: Option<FinishReason>) -> &'static str {
    match reason {
        Some(FinishReason::Length) => "incomplete",
        _ => "completed",
    }
}

fn output(message: &Message) -> Vec<Value> {
    let mut items = Vec::new();
    if !message.reasoning.is_empty() {
        items.push(reasoning_item(&id("rs"), &message.reasoning));
    }
    if !message.content.is_empty() {
        items.push(message_item(&id("msg"), "completed", &message.content));
    }
    items.extend(message.calls.iter().map(|call| call_item(&id("fc"), "completed", call)));
    items
}

fn reasoning_item(id: &str, text: &str) -> Value {
    let content: &[Value] = &[json!({"type": "reasoning_text", "text": text})];
    let content = if text.is_empty() { &[] } else { content };
    json!({"id": id, "type": "reasoning", "summary": [], "content": content})
}

fn message_item(id: &str, status: &str, text: &str) -> Value {
    let content: &[Value] = &[text_part(text)];
    let content = if text.is_empty() { &[] } else { content };
    json!({"id": id, "type": "message", "role": "assistant", "status": status, "content": content})
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn call_item(id: &str, status: &str, call: &Call) -> Value {
    json!({
        "id": id, "type": "function_call", "status": status,
        "call_id": call.id, "name": call.name, "arguments": call.arguments,
    })
}
