//! A response that arrives event by event.

use serde_json::{Value, json};

use super::{Answer, call_item, finished, id, message_item, reasoning_item, text_part};
use crate::chat::message::Message;
use crate::choice::Piece;
use crate::error::ApiError;
use crate::output::{Delta, OutputParser};
use crate::sse::Chunks;

/// The item that is being written.
#[derive(Debug)]
enum Open {
    Reasoning { id: String, text: String },
    Message { id: String, text: String },
    Call { id: String },
}

/// Makes the events of one answer.
#[derive(Debug)]
pub(super) struct Events {
    answer: Answer,
    parser: OutputParser,
    /// The calls so far.
    message: Message,
    open: Option<Open>,
    /// Items that are complete.
    output: Vec<Value>,
    status: &'static str,
    sequence: u64,
    begun: bool,
}

impl Events {
    pub(super) fn new(answer: Answer, parser: OutputParser) -> Self {
        Self {
            answer,
            parser,
            message: Message::default(),
            open: None,
            output: Vec::new(),
            status: "completed",
            sequence: 0,
            begun: false,
        }
    }

    fn event(&mut self, name: &str, fields: Value) -> Value {
        let mut event = json!({"type": name, "sequence_number": self.sequence});
        self.sequence += 1;
        for (name, value) in fields.as_object().into_iter().flatten() {
            event[name] = value.clone();
        }
        event
    }

    /// Ends the item that is being written.
    fn close(&mut self, events: &mut Vec<Value>) {
        let at = self.output.len();
        let item = match self.open.take() {
            None => return,
            Some(Open::Reasoning { id, text }) => {
                let done =
                    json!({"item_id": id, "output_index": at, "content_index": 0, "text": text});
                events.push(self.event("response.reasoning_text.done", done));
                reasoning_item(&id, &text)
            }
            Some(Open::Message { id, text }) => {
                let place = json!({"item_id": id, "output_index": at, "content_index": 0});
                let mut done = place.clone();
                done["text"] = text.as_str().into();
                done["logprobs"] = json!([]);
                events.push(self.event("response.output_text.done", done));
                let mut part = place;
                part["part"] = text_part(&text);
                events.push(self.event("response.content_part.done", part));
                message_item(&id, "completed", &text)
            }
            Some(Open::Call { id }) => {
                let Some(call) = self.message.calls.last() else { return };
                let done = json!({
                    "item_id": id, "output_index": at, "name": call.name,
                    "arguments": call.arguments,
                });
                let item = call_item(&id, "completed", call);
                events.push(self.event("response.function_call_arguments.done", done));
                item
            }
        };
        let done = json!({"output_index": at, "item": item});
        events.push(self.event("response.output_item.done", done));
        self.output.push(item);
    }

    fn add_item(&mut self, item: Value, events: &mut Vec<Value>) {
        let added = json!({"output_index": self.output.len(), "item": item});
        events.push(self.event("response.output_item.added", added));
    }

    fn take(&mut self, delta: Delta, events: &mut Vec<Value>) {
        self.message.add(delta.clone());
        match delta {
            Delta::Reasoning(text) => {
                if !matches!(self.open, Some(Open::Reasoning { .. })) {
                    self.close(events);
                    let id = id("rs");
                    self.add_item(reasoning_item(&id, ""), events);
                    self.open = Some(Open::Reasoning { id, text: String::new() });
                }
                if let Some(Open::Reasoning { id, text: all }) = &mut self.open {
                    all.push_str(&text);
                    let place = json!({
                        "item_id": id, "output_index": self.output.len(), "content_index": 0,
                        "delta": text,
                    });
                    events.push(self.event("response.reasoning_text.delta", place));
                }
            }
            Delta::Content(text) => {
                if !matches!(self.open, Some(Open::Message { .. })) {
                    self.close(events);
                    let id = id("msg");
                    self.add_item(message_item(&id, "in_progress", ""), events);
                    let part = json!({
                        "item_id": id, "output_index": self.output.len(), "content_index": 0,
                        "part": text_part(""),
                    });
                    events.push(self.event("response.content_part.added", part));
                    self.open = Some(Open::Message { id, text: String::new() });
                }
                if let Some(Open::Message { id, text: all }) = &mut self.open {
                    all.push_str(&text);
                    let place = json!({
                        "item_id": id, "output_index": self.output.len(), "content_index": 0,
                        "delta": text, "logprobs": [],
                    });
                    events.push(self.event("response.output_text.delta", place));
                }
            }
            Delta::Call { .. } => {
                // The call that this one follows is complete; its arguments are those before the last.
                if let Some(call) = self.message.calls.pop() {
                    self.close(events);
                    let id = id("fc");
                    self.add_item(call_item(&id, "in_progress", &call), events);
                    self.message.calls.push(call);
                    self.open = Some(Open::Call { id });
                }
            }
            Delta::Arguments { text, .. } => {
                if let Some(Open::Call { id }) = &self.open {
                    let place = json!({
                        "item_id": id, "output_index": self.output.len(), "delta": text,
                    });
                    events.push(self.event("response.function_call_arguments.delta", place));
                }
            }
        }
    }
}

impl Chunks for Events {
    const END_MARK: bool = false;

    fn piece(&mut self, _: usize, piece: Piece) -> Vec<Value> {
        let mut events = Vec::new();
        if !std::mem::replace(&mut self.begun, true) {
            for name in ["response.created", "response.in_progress"] {
                let body = json!({"response": self.answer.body("in_progress", Vec::new())});
                events.push(self.event(name, body));
            }
        }
        self.answer.count(&piece);
        let mut deltas = self.parser.push(&piece.text);
        if piece.finish.is_some() {
            deltas.extend(self.parser.finish());
        }
        for delta in deltas {
            self.take(delta, &mut events);
        }
        if piece.finish.is_some() {
            self.close(&mut events);
            self.status = finished(piece.finish);
        }
        events
    }

    fn end(&mut self) -> Option<Value> {
        let output = std::mem::take(&mut self.output);
        let body = json!({"response": self.answer.body(self.status, output)});
        Some(self.event(&format!("response.{}", self.status), body))
    }

    fn failed(&mut self, error: &ApiError) -> Value {
        let error = error.body();
        let fields = json!({
            "code": error["error"]["code"], "message": error["error"]["message"],
            "param": error["error"]["param"],
        });
        self.event("error", fields)
    }
}
