//! The fields that ask for a grammar.

use llguidance::api::TopLevelGrammar;
use serde_json::{Map, Value, json};

use super::MOST_GRAMMAR_BYTES;
use crate::error::ApiError;
use crate::fields::{Fields, kind};

/// The grammar that `response_format`, `structured_outputs` or one of vLLM's `guided_*` fields asks for, and the field's
/// name. At most one may.
pub(crate) fn read(fields: &Fields) -> Result<Option<(&'static str, TopLevelGrammar)>, ApiError> {
    let mut asked = Vec::new();
    if let Some(grammar) = response_format(fields)? {
        asked.push(("response_format", grammar));
    }
    for (name, form) in [
        ("guided_json", "json"),
        ("guided_regex", "regex"),
        ("guided_choice", "choice"),
        ("guided_grammar", "grammar"),
    ] {
        if let Some(value) = fields.get(name) {
            asked.push((name, of_form(name, form, value)?));
        }
    }
    if let Some(map) = fields.object("structured_outputs")? {
        asked.extend(structured(map)?.map(|grammar| ("structured_outputs", grammar)));
    }
    if let [_, (name, _), ..] = asked[..] {
        let message = format!("{name:?} comes beside {:?}; send one of them", asked[0].0);
        return Err(ApiError::field(name, message));
    }
    Ok(asked.pop())
}

fn response_format(fields: &Fields) -> Result<Option<TopLevelGrammar>, ApiError> {
    let name = "response_format";
    let Some(format) = fields.object(name)? else { return Ok(None) };
    let form = format.get("type").and_then(Value::as_str).unwrap_or_default();
    match form {
        "text" => Ok(None),
        "json_object" => of_form(name, "json", &json!({"type": "object"})).map(Some),
        "json_schema" => {
            // Chat nests the schema, responses do not.
            let holder = format.get("json_schema").and_then(Value::as_object).unwrap_or(format);
            let schema = holder.get("schema").ok_or_else(|| {
                ApiError::field(name, "\"response_format\" has no \"schema\" of its JSON")
            })?;
            of_form(name, "json", schema).map(Some)
        }
        "grammar" => {
            let text = format.get("grammar").unwrap_or(&Value::Null);
            of_form(name, "grammar", text).map(Some)
        }
        other => {
            let expected = "\"text\", \"json_object\", \"json_schema\" or \"grammar\"";
            let message = format!("\"response_format\" has type {other:?}, expected {expected}");
            Err(ApiError::field(name, message))
        }
    }
}

fn structured(map: &Map<String, Value>) -> Result<Option<TopLevelGrammar>, ApiError> {
    let name = "structured_outputs";
    let mut given = map.iter().filter(|(_, value)| !value.is_null());
    match (given.next(), given.next()) {
        (None, _) => Ok(None),
        (Some((form, value)), None) => of_form(name, form, value).map(Some),
        _ => Err(ApiError::field(name, "\"structured_outputs\" has more than one constraint")),
    }
}

fn of_form(name: &str, form: &str, value: &Value) -> Result<TopLevelGrammar, ApiError> {
    let wrong = |expected: &str| {
        ApiError::field(name, format!("{name:?} is {}, expected {expected}", kind(value)))
    };
    if value.to_string().len() > MOST_GRAMMAR_BYTES {
        return Err(ApiError::field(name, format!("{name:?} is longer than a MiB")));
    }
    let text = || value.as_str().ok_or_else(|| wrong("a string"));
    match form {
        "json" => match value {
            Value::Object(_) | Value::Bool(true) => {
                Ok(TopLevelGrammar::from_json_schema(value.clone()))
            }
            Value::String(text) => match serde_json::from_str(text) {
                Ok(schema @ Value::Object(_)) => Ok(TopLevelGrammar::from_json_schema(schema)),
                _ => Err(wrong("a JSON schema")),
            },
            _ => Err(wrong("a JSON schema")),
        },
        "json_object" => of_form(name, "json", &json!({"type": "object"})),
        "regex" => Ok(TopLevelGrammar::from_regex(text()?)),
        "choice" => {
            let choices = value.as_array().filter(|list| !list.is_empty());
            let choices = choices.ok_or_else(|| wrong("a list of strings"))?;
            let quoted = choices.iter().map(|c| c.as_str().map(super::calls::quoted));
            let quoted = quoted.collect::<Option<Vec<_>>>();
            let quoted = quoted.ok_or_else(|| wrong("a list of strings"))?;
            Ok(TopLevelGrammar::from_lark(format!("start: {}", quoted.join(" | "))))
        }
        "grammar" => Ok(TopLevelGrammar::from_lark(text()?.to_owned())),
        _ => Err(ApiError::field(
            name,
            format!("{name:?} has {form:?}, expected json, json_object, regex, choice or grammar"),
        )),
    }
}
