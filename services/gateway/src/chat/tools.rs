//! The functions of a chat, and whether the answer must call one.

use std::sync::Arc;

use serde_json::Value;

use crate::error::ApiError;
use crate::fields::Fields;
use crate::output::{Tool, Tools};

/// What the client wants to be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ToolChoice {
    None,
    Auto,
    Required,
    Named(String),
}

impl ToolChoice {
    pub(super) fn read(fields: &Fields, tools: Option<&Tools>) -> Result<Self, ApiError> {
        let wrong = |message: String| ApiError::field("tool_choice", message);
        let choice = match fields.get("tool_choice") {
            None => return Ok(if tools.is_some() { Self::Auto } else { Self::None }),
            Some(Value::String(word)) => match word.as_str() {
                "none" => return Ok(Self::None),
                "auto" => return Ok(Self::Auto),
                "required" => Self::Required,
                other => {
                    return Err(wrong(format!(
                        "\"tool_choice\" is {other:?}, expected \"none\", \"auto\", \"required\" or a function"
                    )));
                }
            },
            Some(value) => {
                let name = value.pointer("/function/name").and_then(Value::as_str);
                let name = name.ok_or_else(|| {
                    wrong("\"tool_choice\" names no function, expected {\"type\": \"function\", \"function\": {\"name\": ...}}".into())
                })?;
                Self::Named(name.to_owned())
            }
        };
        match (&choice, tools) {
            (_, None) => {
                Err(wrong("\"tool_choice\" demands a call, but there are no \"tools\"".into()))
            }
            (Self::Named(name), Some(tools)) if tools.get(name).is_none() => {
                Err(wrong(format!("\"tool_choice\" names {name:?}, which is not one of \"tools\"")))
            }
            _ => Ok(choice),
        }
    }

    /// The functions of which one must be called.
    pub(super) fn demanded(&self, tools: Option<&Tools>) -> Option<Tools> {
        match (self, tools?) {
            (Self::Required, tools) => Some(tools.clone()),
            (Self::Named(name), tools) => tools.get(name).map(|tool| Tools(vec![tool.clone()])),
            _ => None,
        }
    }
}

/// The functions of `tools`; none when the list is absent or empty.
pub(super) fn read(fields: &Fields) -> Result<Option<Arc<Tools>>, ApiError> {
    let Some(list) = fields.list("tools")? else { return Ok(None) };
    let mut tools = Vec::with_capacity(list.len());
    for (i, tool) in list.iter().enumerate() {
        let function = tool.get("function").unwrap_or(&Value::Null);
        let Some(name) = function.get("name").and_then(Value::as_str).filter(|n| !n.is_empty())
        else {
            return Err(ApiError::field(
                format!("tools[{i}].function.name"),
                format!("tools[{i}].function.name is missing, expected the name of a function"),
            ));
        };
        let parameters = function.get("parameters").cloned().unwrap_or(Value::Null);
        tools.push(Tool { name: name.to_owned(), parameters });
    }
    Ok((!tools.is_empty()).then(|| Arc::new(Tools(tools))))
}

/// The tools to show to the model; none when it may not call any.
pub(super) fn shown(fields: &Fields) -> Result<Option<Value>, ApiError> {
    let Some(tools) = fields.list("tools")? else { return Ok(None) };
    read(fields)?;
    let forbidden = fields.get("tool_choice").and_then(Value::as_str) == Some("none");
    Ok((!tools.is_empty() && !forbidden).then(|| tools.clone().into()))
}
