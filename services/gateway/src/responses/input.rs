//! A request for a response, brought into the form of a chat.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::fields::{Fields, kind};

/// Fields that a response repeats, with what they are when left out.
pub(super) fn echoed(fields: &Fields) -> Map<String, Value> {
    let defaults = [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("temperature", Value::Null),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_p", Value::Null),
    ];
    let value = |(name, default): (&str, Value)| {
        (name.to_owned(), fields.get(name).cloned().unwrap_or(default))
    };
    defaults.into_iter().map(value).collect()
}

/// The same request as a chat.
pub(super) fn chat(fields: &mut Fields) -> Result<Fields, ApiError> {
    for name in ["previous_response_id", "conversation", "prompt"] {
        fields.refuse_unless(name, |_| false, "null: this server keeps no conversations")?;
    }
    let no = |v: &Value| v == &Value::Bool(false);
    fields.refuse_unless("background", no, "false")?;
    fields.refuse_unless("truncation", |v| v.as_str() == Some("disabled"), "\"disabled\"")?;
    let mut chat = Map::new();
    let mut messages = Vec::new();
    if let Some(text) = fields.string("instructions")? {
        messages.push(json!({"role": "system", "content": text}));
    }
    match fields.take("input") {
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => add_items(items, &mut messages)?,
        other => {
            let got = other.as_ref().map_or("missing", kind);
            let message = format!("\"input\" is {got}, expected a string or a list of items");
            return Err(ApiError::field("input", message));
        }
    }
    chat.insert("messages".into(), messages.into());
    if let Some(format) = fields.object("text")?.and_then(|text| text.get("format")) {
        chat.insert("response_format".into(), format.clone());
    }
    if let Some(effort) = fields.object("reasoning")?.and_then(|r| r.get("effort")) {
        chat.insert("reasoning_effort".into(), effort.clone());
    }
    if let Some(tools) = fields.list("tools")? {
        let tools: Result<Vec<Value>, ApiError> =
            tools.iter().enumerate().map(|(i, tool)| nested(i, tool)).collect();
        chat.insert("tools".into(), tools?.into());
    }
    if let Some(choice) = fields.get("tool_choice") {
        let named =
            choice.get("name").map(|name| json!({"type": "function", "function": {"name": name}}));
        chat.insert("tool_choice".into(), named.unwrap_or_else(|| choice.clone()));
    }
    if let Some(most) = fields.get("max_output_tokens") {
        chat.insert("max_completion_tokens".into(), most.clone());
    }
    const SAME: [&str; 22] = [
        "model",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "ignore_eos",
        "min_tokens",
        "stop_token_ids",
        "priority",
        "timeout",
        "cache_salt",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "skip_special_tokens",
        "structured_outputs",
    ];
    for name in SAME {
        if let Some(value) = fields.get(name) {
            chat.insert(name.into(), value.clone());
        }
    }
    Fields::new(Value::Object(chat))
}

/// A function as chats describe it.
fn nested(i: usize, tool: &Value) -> Result<Value, ApiError> {
    if tool["type"] != "function" {
        let message = format!("tools[{i}] is {}; only functions can be called here", tool["type"]);
        return Err(ApiError::field(format!("tools[{i}].type"), message));
    }
    let mut function = tool.as_object().cloned().unwrap_or_default();
    function.remove("type");
    Ok(json!({"type": "function", "function": function}))
}

/// Adds the items of a conversation; calls and reasoning belong to the assistant's message before or after them.
fn add_items(items: Vec<Value>, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let mut reasoning: Option<String> = None;
    for (i, item) in items.into_iter().enumerate() {
        let at = format!("input[{i}]");
        match item["type"].as_str().unwrap_or("message") {
            "message" => {
                let mut message = json!({
                    "role": item["role"],
                    "content": content(&at, &item["content"])?,
                });
                if item["role"] == "assistant"
                    && let Some(text) = reasoning.take()
                {
                    message["reasoning_content"] = text.into();
                }
                messages.push(message);
            }
            "reasoning" => {
                let parts =
                    [&item["content"], &item["summary"]].into_iter().filter_map(Value::as_array);
                let texts = parts.flatten().filter_map(|part| part["text"].as_str());
                reasoning = Some(texts.collect::<Vec<_>>().join("\n"));
            }
            "function_call" => {
                let function = json!({"name": item["name"], "arguments": item["arguments"]});
                let call = json!({"id": item["call_id"], "type": "function", "function": function});
                let last = messages.last_mut().filter(|m| m["role"] == "assistant");
                match last.map(|message| &mut message["tool_calls"]) {
                    Some(Value::Array(calls)) => calls.push(call),
                    Some(calls) => *calls = json!([call]),
                    None => {
                        let mut message =
                            json!({"role": "assistant", "content": "", "tool_calls": [call]});
                        if let Some(text) = reasoning.take() {
                            message["reasoning_content"] = text.into();
                        }
                        messages.push(message);
                    }
                }
            }
            "function_call_output" => messages.push(json!({
                "role": "tool",
                "tool_call_id": item["call_id"],
                "content": content(&at, &item["output"])?,
            })),
            other => {
                let message = format!("{at}.type is {other:?}, which this server does not read");
                return Err(ApiError::field(format!("{at}.type"), message));
            }
        }
    }
    Ok(())
}

/// Content with parts under the name that chats know.
fn content(at: &str, content: &Value) -> Result<Value, ApiError> {
    let Value::Array(parts) = content else { return Ok(content.clone()) };
    let part = |(i, part): (usize, &Value)| match part["type"].as_str() {
        Some("input_text" | "output_text" | "text") => {
            Ok(json!({"type": "text", "text": part["text"]}))
        }
        _ => {
            let at = format!("{at}.content[{i}].type");
            let message = format!("{at} is {}; this model reads only text", part["type"]);
            Err(ApiError::field(at, message))
        }
    };
    parts.iter().enumerate().map(part).collect()
}
