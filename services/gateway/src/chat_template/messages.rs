//! Bringing a request's messages into the form that templates expect.

use serde_json::{Map, Value, json};

use super::ChatTemplate;
use crate::error::ApiError;
use crate::fields::kind;

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
/// Names under which clients send an assistant's reasoning; templates read the first, some the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Checks every message and brings it into the template's form: null fields dropped, text parts joined unless the
/// template reads parts, call arguments as objects, reasoning under the name that templates read.
pub(crate) fn normalise(
    messages: Vec<Value>,
    template: &ChatTemplate,
) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::field("messages", "\"messages\" is empty, expected at least one"));
    }
    let normal = |(i, message)| message_of(&format!("messages[{i}]"), message, template);
    messages.into_iter().enumerate().map(normal).collect()
}

fn message_of(at: &str, message: Value, template: &ChatTemplate) -> Result<Value, ApiError> {
    let Value::Object(message) = message else {
        return Err(wrong(at, "an object", &message));
    };
    let mut message: Map<String, Value> =
        message.into_iter().filter(|(_, value)| !value.is_null()).collect();
    let role_at = format!("{at}.role");
    let role = match message.get("role") {
        Some(Value::String(role)) => role.clone(),
        other => return Err(wrong(&role_at, "a string", other.unwrap_or(&Value::Null))),
    };
    if !ROLES.contains(&role.as_str()) {
        let expected = ROLES.join(", ");
        return Err(ApiError::field(
            &role_at,
            format!("{role_at} is {role:?}, expected one of {expected}"),
        ));
    }
    if role == "developer" && !template.knows_developer() {
        message.insert("role".into(), "system".into());
    }
    match message.get_mut("content") {
        Some(content) => {
            *content = content_of(&format!("{at}.content"), content.take(), &role, template)?;
        }
        // Calls come without content; templates that add to it would fail on nothing.
        None if role == "assistant" => drop(message.insert("content".into(), "".into())),
        None => return Err(wrong(&format!("{at}.content"), "text", &Value::Null)),
    }
    if let Some(calls) = message.get_mut("tool_calls") {
        let calls_at = format!("{at}.tool_calls");
        let Value::Array(calls) = calls else { return Err(wrong(&calls_at, "a list", calls)) };
        for (i, call) in calls.iter_mut().enumerate() {
            parse_arguments(&format!("{calls_at}[{i}]"), call, template)?;
        }
    }
    if let Some(reasoning) = REASONING.iter().find_map(|name| message.get(*name)).cloned() {
        message.entry("thinking").or_insert_with(|| reasoning.clone());
        message.insert(REASONING[0].into(), reasoning);
    }
    Ok(Value::Object(message))
}

fn content_of(
    at: &str,
    content: Value,
    role: &str,
    template: &ChatTemplate,
) -> Result<Value, ApiError> {
    let parts = match content {
        Value::String(_) => return Ok(content),
        Value::Array(parts) => parts,
        other => return Err(wrong(at, "a string or a list of parts", &other)),
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (i, part) in parts.iter().enumerate() {
        let at = format!("{at}[{i}]");
        let text = match part {
            Value::String(text) => Some(text.as_str()),
            Value::Object(fields) => match fields.get("type").and_then(Value::as_str) {
                None | Some("text") => fields.get("text").and_then(Value::as_str),
                Some(other) if role != "tool" => {
                    return Err(ApiError::field(
                        format!("{at}.type"),
                        format!("{at}.type is {other:?}; this model reads only \"text\""),
                    ));
                }
                Some(_) => None,
            },
            _ => None,
        };
        match text {
            Some(text) => texts.push(text),
            // Results of tools have forms of their own, which only the template knows.
            None if role == "tool" && template.takes_parts() => {}
            None => return Err(wrong(&format!("{at}.text"), "a string", &Value::Null)),
        }
    }
    if template.takes_parts() { Ok(Value::Array(parts)) } else { Ok(texts.join("\n").into()) }
}

/// Clients send a call's arguments as a JSON text; most templates walk them as an object.
fn parse_arguments(at: &str, call: &mut Value, template: &ChatTemplate) -> Result<(), ApiError> {
    let at = format!("{at}.function");
    let Some(Value::Object(function)) = call.get_mut("function") else {
        return Err(wrong(&at, "an object", &Value::Null));
    };
    if !function.get("name").is_some_and(Value::is_string) {
        return Err(wrong(&format!("{at}.name"), "a string", &Value::Null));
    }
    let at = format!("{at}.arguments");
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => json!({}),
        Some(Value::String(text)) if text.trim().is_empty() => json!({}),
        Some(Value::String(text)) => serde_json::from_str(text)
            .map_err(|e| ApiError::field(&at, format!("{at} is not valid JSON: {e}")))?,
        Some(other) => other.clone(),
    };
    if !arguments.is_object() {
        return Err(wrong(&at, "a JSON object", &arguments));
    }
    let sent_as_text = function.get("arguments").is_some_and(Value::is_string);
    if !template.takes_argument_text() {
        function.insert("arguments".into(), arguments);
    } else if !sent_as_text {
        function.insert("arguments".into(), arguments.to_string().into());
    }
    Ok(())
}

fn wrong(at: &str, expected: &str, value: &Value) -> ApiError {
    let got = if value.is_null() { "missing" } else { kind(value) };
    ApiError::field(at, format!("{at} is {got}, expected {expected}"))
}
