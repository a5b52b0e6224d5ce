//! How the choices of a chat look, whole and in pieces.

use std::sync::Arc;

use baton_coordinator::FinishReason;
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Used};
use crate::choice::{Piece, ScoredToken};
use crate::generate::reason_name;
use crate::output::{Delta, OutputParser};
use crate::tokenizer::TextTokenizer;
use crate::{logprobs, sse};

pub(super) const OBJECT: &str = "chat.completion";
const CHUNK: &str = "chat.completion.chunk";

/// A message, put together from what its text turned out to be.
#[derive(Debug, Default)]
pub(crate) struct Message {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) calls: Vec<Call>,
}

/// A function call of a message.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) id: String,
    pub(crate) name: String,
    /// JSON text, cut off where the answer was.
    pub(crate) arguments: String,
}

impl Message {
    /// All of a finished text.
    pub(crate) fn of(text: &str, parser: &mut OutputParser) -> Self {
        let mut message = Self::default();
        let deltas = parser.push(text).into_iter().chain(parser.finish());
        deltas.for_each(|delta| message.add(delta));
        message
    }

    /// Adds what came next.
    pub(crate) fn add(&mut self, delta: Delta) {
        match delta {
            Delta::Reasoning(text) => self.reasoning.push_str(&text),
            Delta::Content(text) => self.content.push_str(&text),
            Delta::Call { name, .. } => {
                self.calls.push(Call { id: call_id(), name, arguments: String::new() });
            }
            Delta::Arguments { text, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&text);
                }
            }
        }
    }
}

/// An id by which a client sends the result back.
pub(crate) fn call_id() -> String {
    format!("call_{:024x}", rand::random::<u128>() >> 32)
}

/// How choices look in this endpoint.
pub(super) struct Shape {
    pub(super) answer: Answer,
    pub(super) tokenizer: Arc<TextTokenizer>,
    pub(super) logprobs: Option<usize>,
    /// Set when the client wants ids.
    pub(super) prompt_ids: Option<Vec<u32>>,
}

impl Shape {
    fn scores(&self, tokens: &[ScoredToken]) -> Value {
        self.logprobs.map_or(Value::Null, |top| logprobs::chat(&self.tokenizer, tokens, top))
    }

    pub(super) fn choice(&self, index: usize, piece: Piece, mut parser: OutputParser) -> Value {
        let Message { reasoning, content, calls } = Message::of(&piece.text, &mut parser);
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        let nothing = content.is_empty() && !(reasoning.is_empty() && calls.is_empty());
        message.insert("content".into(), if nothing { Value::Null } else { content.into() });
        message.insert("refusal".into(), Value::Null);
        if !reasoning.is_empty() {
            message.insert("reasoning_content".into(), reasoning.into());
        }
        if !calls.is_empty() {
            let calls = calls.into_iter().map(|call| {
                let function = json!({"name": call.name, "arguments": call.arguments});
                json!({"id": call.id, "type": "function", "function": function})
            });
            message.insert("tool_calls".into(), calls.collect());
        }
        let mut choice = json!({
            "index": index,
            "message": message,
            "logprobs": self.scores(&piece.tokens),
            "finish_reason": piece.finish.map(|reason| reason_of(reason, &parser)),
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

fn reason_of(reason: FinishReason, parser: &OutputParser) -> &'static str {
    match reason {
        FinishReason::Stop if parser.calls() > 0 => "tool_calls",
        reason => reason_name(reason),
    }
}

pub(super) struct Stream {
    shape: Shape,
    parsers: Vec<OutputParser>,
    started: Vec<bool>,
    any_started: bool,
    used: Used,
}

impl Stream {
    pub(super) fn new(shape: Shape, parsers: Vec<OutputParser>) -> Self {
        let started = vec![false; parsers.len()];
        Self { shape, parsers, started, any_started: false, used: Used::default() }
    }

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

fn delta(delta: Delta) -> Value {
    match delta {
        Delta::Reasoning(text) => json!({"reasoning_content": text}),
        Delta::Content(text) => json!({"content": text}),
        Delta::Call { index, name } => json!({"tool_calls": [{
            "index": index, "id": call_id(), "type": "function",
            "function": {"name": name, "arguments": ""},
        }]}),
        Delta::Arguments { index, text } => {
            json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        }
    }
}

impl sse::Chunks for Stream {
    fn piece(&mut self, index: usize, piece: Piece) -> Vec<Value> {
        self.used.add(index, self.started.len(), &piece);
        let mut chunks: Vec<Value> = self.opening(index).into_iter().collect();
        let parser = &mut self.parsers[index];
        let mut deltas = parser.push(&piece.text);
        if piece.finish.is_some() {
            deltas.extend(parser.finish());
        }
        let mut deltas: Vec<Value> = deltas.into_iter().map(delta).collect();
        let scored = self.shape.logprobs.is_some() && !piece.tokens.is_empty();
        let told = piece.finish.is_some() || scored || self.shape.prompt_ids.is_some();
        if deltas.is_empty() && told {
            deltas.push(json!({}));
        }
        // Scores and ids come with the first part of what the piece turned out to be, its end with the last.
        let last = deltas.len().saturating_sub(1);
        let (mut tokens, mut ids) = (Some(piece.tokens), Some(piece.token_ids));
        for (at, delta) in deltas.into_iter().enumerate() {
            let scores = match tokens.take() {
                Some(tokens) if !tokens.is_empty() => self.shape.scores(&tokens),
                _ => Value::Null,
            };
            let finish = piece.finish.filter(|_| at == last);
            let mut choice = json!({
                "index": index,
                "delta": delta,
                "logprobs": scores,
                "finish_reason": finish.map(|reason| reason_of(reason, &self.parsers[index])),
            });
            self.shape.add_ids(&mut choice, ids.take().unwrap_or_default());
            chunks.push(self.shape.answer.chunk(CHUNK, choice).into());
        }
        chunks
    }

    fn end(&mut self) -> Option<Value> {
        self.shape.answer.closing(CHUNK, self.used)
    }
}
