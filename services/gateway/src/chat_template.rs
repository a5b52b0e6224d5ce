//! The checkpoint's chat template, rendered as transformers' `apply_chat_template` renders it.

mod json;
mod messages;

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value, json};
use thiserror::Error as ThisError;

use crate::config::{GatewayError, read_optional};

pub(crate) use messages::normalise;

/// Name of the template for ordinary chats.
const DEFAULT: &str = "default";
/// Name of the template that a checkpoint may have for chats with tools.
const TOOL_USE: &str = "tool_use";
/// Marks the end of a message that the answer shall continue; templates that trim it leave it without its space.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A text that no template writes by itself.
const PROBE: &str = "text of a probe";

/// Why a chat template cannot be used, or did not take a chat.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template does not parse.
    #[error("the chat template {name:?} does not parse: {reason}")]
    Syntax {
        /// Which template.
        name: String,
        /// Where and why.
        reason: String,
    },
    /// The template refused the chat, or failed on it.
    #[error("the chat template refused the request: {0}")]
    Render(String),
    /// The last message cannot be continued.
    #[error("\"continue_final_message\" is set, but {0}")]
    Continue(&'static str),
}

/// What a template renders.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chat {
    /// Messages, normalised.
    pub(crate) messages: Vec<Value>,
    /// Tools the model may call.
    pub(crate) tools: Option<Value>,
    /// Documents for retrieval templates.
    pub(crate) documents: Option<Value>,
    /// End with the beginning of the answer.
    pub(crate) add_generation_prompt: bool,
    /// End inside the last message.
    pub(crate) continue_final_message: bool,
    /// Further variables.
    pub(crate) variables: Map<String, Value>,
}

/// Templates of a checkpoint.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: Map<String, Value>,
    takes_parts: bool,
    takes_argument_text: bool,
    knows_developer: bool,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`. Nothing when there is neither.
    pub(crate) fn load(model_dir: &Path) -> Result<Option<Self>, GatewayError> {
        let path = model_dir.join("tokenizer_config.json");
        let mut config: Map<String, Value> = match read_optional(&path)? {
            Some(text) => {
                serde_json::from_str(&text).map_err(|source| GatewayError::Json { path, source })?
            }
            None => Map::new(),
        };
        let templates = match read_optional(&model_dir.join("chat_template.jinja"))? {
            Some(source) => vec![(DEFAULT.to_owned(), source)],
            None => named_templates(config.remove("chat_template")),
        };
        if templates.is_empty() {
            return Ok(None);
        }
        Ok(Some(Self::new(templates, special_tokens(&config))?))
    }

    fn new(
        templates: Vec<(String, String)>,
        special_tokens: Map<String, Value>,
    ) -> Result<Self, TemplateError> {
        let mut environment = environment();
        let knows_developer = templates.iter().any(|(_, source)| source.contains("developer"));
        for (name, source) in templates {
            environment
                .add_template_owned(name.clone(), without_generation_tags(&source))
                .map_err(|e| TemplateError::Syntax { name, reason: describe(&e) })?;
        }
        let mut template = Self {
            environment,
            special_tokens,
            takes_parts: false,
            takes_argument_text: false,
            knows_developer,
        };
        let parts = json!([{"role": "user", "content": [{"type": "text", "text": PROBE}]}]);
        template.takes_parts = template.shows_probe(&parts, "text");
        let call = |arguments: Value| {
            let call =
                json!({"type": "function", "function": {"name": "f", "arguments": arguments}});
            json!([
                {"role": "user", "content": ""},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ])
        };
        let object = call(json!({"key": PROBE}));
        let text = call(json!({"key": PROBE}).to_string().into());
        template.takes_argument_text =
            template.renders_probe(&object).is_none() && template.renders_probe(&text).is_some();
        Ok(template)
    }

    /// What the template makes of messages that hold the probe; nothing when it fails on them or leaves it out. So a
    /// template's expectations are found by asking it, whatever way it is written in.
    fn renders_probe(&self, messages: &Value) -> Option<String> {
        let messages = messages.as_array().cloned().unwrap_or_default();
        let text = self.render(Chat { messages, ..Chat::default() }).ok()?;
        text.contains(PROBE).then_some(text)
    }

    /// Whether the template reads the probe, instead of printing the object around it with its `key`.
    fn shows_probe(&self, messages: &Value, key: &str) -> bool {
        self.renders_probe(messages).is_some_and(|text| {
            !text.contains(&format!("'{key}'")) && !text.contains(&format!("\"{key}\""))
        })
    }

    /// Whether message content may stay a list of parts.
    pub(crate) fn takes_parts(&self) -> bool {
        self.takes_parts
    }

    /// Whether the template wants a call's arguments as the JSON text they are sent in, and not as an object.
    pub(crate) fn takes_argument_text(&self) -> bool {
        self.takes_argument_text
    }

    /// Whether the template has a role "developer" of its own.
    pub(crate) fn knows_developer(&self) -> bool {
        self.knows_developer
    }

    /// The prompt's text.
    pub(crate) fn render(&self, mut chat: Chat) -> Result<String, TemplateError> {
        let final_text = if chat.continue_final_message {
            let last = chat.messages.last_mut().ok_or(TemplateError::Continue("there is none"))?;
            Some(tag_final_text(last)?)
        } else {
            None
        };
        let name = match (&chat.tools, self.environment.get_template(TOOL_USE)) {
            (Some(_), Ok(_)) => TOOL_USE,
            _ => DEFAULT,
        };
        let failed = |e: Error| TemplateError::Render(describe(&e));
        let template = self.environment.get_template(name).map_err(failed)?;
        let mut context = self.special_tokens.clone();
        context.extend(chat.variables);
        context.insert("messages".into(), Value::Array(chat.messages));
        context.insert("tools".into(), chat.tools.unwrap_or_default());
        context.insert("documents".into(), chat.documents.unwrap_or_default());
        context.insert("add_generation_prompt".into(), chat.add_generation_prompt.into());
        let text = template.render(Serde(context)).map_err(failed)?;
        match final_text {
            Some(final_text) => cut_at_tag(text, &final_text),
            None => Ok(text),
        }
    }
}

/// Appends the tag to the message's text (the last part that has one) and returns that text.
fn tag_final_text(message: &mut Value) -> Result<String, TemplateError> {
    let missing = TemplateError::Continue("the last message has no text");
    let text = match message.get_mut("content") {
        Some(Value::Array(parts)) => parts.iter_mut().rev().find_map(|part| part.get_mut("text")),
        other => other,
    };
    match text {
        Some(Value::String(text)) => {
            let before = text.clone();
            text.push_str(CONTINUE_TAG);
            Ok(before)
        }
        _ => Err(missing),
    }
}

fn cut_at_tag(mut text: String, final_text: &str) -> Result<String, TemplateError> {
    let gone = TemplateError::Continue("the template does not keep the last message's text");
    if !text.contains(final_text.trim()) {
        return Err(gone);
    }
    let at = text.rfind(CONTINUE_TAG.trim_end()).ok_or(gone)?;
    let kept_space = text[at..].starts_with(CONTINUE_TAG);
    text.truncate(at);
    if !kept_space {
        // The template trims messages, so the space before the tag is not its own either.
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the standard delimiters do not clash"));
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", json::tojson);
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
        jiff::fmt::strtime::format(&format, &jiff::Zoned::now())
            .map_err(|e| Error::new(ErrorKind::InvalidOperation, e.to_string()))
    });
    environment
}

/// One sentence: the detail of the innermost cause, with its line.
fn describe(error: &Error) -> String {
    let mut innermost = error;
    while let Some(cause) = std::error::Error::source(innermost).and_then(|e| e.downcast_ref()) {
        innermost = cause;
    }
    let detail = innermost.detail().map_or_else(|| innermost.kind().to_string(), str::to_owned);
    match innermost.line() {
        Some(line) => format!("{detail} (line {line} of the template)"),
        None => detail,
    }
}

/// `{% generation %}` marks what the model wrote, for training masks; for rendering it is a block that always shows.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end);
        let name = tag.trim_start_matches("{%").trim_start_matches(['-', '+']);
        let name = name.trim_end_matches(['-', '+']).trim();
        match name {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// `chat_template` of a tokenizer config: one template, or a list of named ones.
fn named_templates(value: Option<Value>) -> Vec<(String, String)> {
    match value {
        Some(Value::String(source)) => vec![(DEFAULT.to_owned(), source)],
        Some(Value::Array(list)) => {
            let mut named: Vec<(String, String)> = list
                .iter()
                .filter_map(|entry| {
                    let text = |key: &str| entry.get(key)?.as_str().map(str::to_owned);
                    Some((text("name")?, text("template")?))
                })
                .collect();
            if let [(name, _)] = &mut named[..] {
                DEFAULT.clone_into(name);
            }
            named
        }
        _ => Vec::new(),
    }
}

/// `bos_token`, `eos_token` and so on, written as a string or as an object with its content.
fn special_tokens(config: &Map<String, Value>) -> Map<String, Value> {
    let token = |(name, value): (&String, &Value)| {
        let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
        name.ends_with("_token").then(|| (name.clone(), Value::from(text)))
    };
    config.iter().filter_map(token).collect()
}

#[cfg(test)]
mod tests;
