//! `/v1/chat/completions`: messages through the checkpoint's own template, answers taken apart into reasoning, content and
//! tool calls.

pub(crate) mod message;
mod tools;

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value};

use crate::answer::{Answer, Used};
use crate::app::AppState;
use crate::body::JsonFields;
use crate::chat_template::{self, Chat};
use crate::choice::Choice;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generate::{self, Pieces, Plan};
use crate::output::{OutputParser, Tools};
use crate::params::Params;
use crate::trace::RequestTrace;
use crate::{constraint, prompt, sse};

use message::{OBJECT, Shape, Stream};
use tools::ToolChoice;

/// Template variables that a request sets through fields of its own.
const OWN_VARIABLES: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

pub(crate) async fn complete(
    State(app): State<AppState>,
    trace: RequestTrace,
    JsonFields(mut fields): JsonFields,
) -> Result<Response, ApiError> {
    let asked = Asked::read(&app, &mut fields, &trace).await?;
    let pieces = asked.start(&app, &trace)?;
    let params = &asked.params;
    let shape = Shape {
        answer: Answer::new(&app, "chatcmpl", params, asked.prompt.len()),
        tokenizer: app.tokenizer.clone(),
        logprobs: asked.logprobs,
        prompt_ids: params.return_token_ids.then(|| asked.prompt.clone()),
    };
    let parsers: Vec<OutputParser> = (0..params.n).map(|_| asked.parser()).collect();
    if params.stream {
        return sse::respond(pieces, Stream::new(shape, parsers)).await;
    }
    let finished = generate::collect(pieces, params.n).await?;
    let used = Used::of(&finished, params.n);
    let choices = finished.into_iter().zip(parsers).enumerate();
    let choices = choices.map(|(index, (piece, parser))| shape.choice(index, piece, parser));
    let mut body = shape.answer.whole(OBJECT, choices.collect(), used);
    if let Some(ids) = &shape.prompt_ids {
        body.insert("prompt_token_ids".into(), ids.as_slice().into());
    }
    Ok(Json(body).into_response())
}

/// A chat, checked and rendered.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) params: Params,
    pub(crate) prompt: Vec<u32>,
    /// Whether the prompt has opened the model's reasoning.
    pub(crate) thinking: bool,
    max_tokens: usize,
    logprobs: Option<usize>,
    /// Functions that the answer may call.
    tools: Option<Arc<Tools>>,
}

impl Asked {
    /// Reads the fields of a chat.
    pub(crate) async fn read(
        app: &AppState,
        fields: &mut Fields,
        trace: &RequestTrace,
    ) -> Result<Self, ApiError> {
        let mut params = Params::read(fields, &app.config)?;
        let logprobs = read_logprobs(fields, app.config.limits.logprobs)?;
        refuse_unsupported(fields)?;
        if params.max_tokens == Some(0) {
            let message = "\"max_tokens\" is 0, expected at least 1";
            return Err(ApiError::field("max_tokens", message));
        }
        let add_special_tokens = fields.boolean("add_special_tokens")?.unwrap_or(false);
        let continues = fields.boolean("continue_final_message")?.unwrap_or(false);
        let tools = tools::read(fields)?;
        let choice = ToolChoice::read(fields, tools.as_deref())?;
        let several = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        let asked = constraint::read(fields)?;
        let tokenizing = SystemTime::now();
        let text = render(app, fields).await?;
        let thinking = opens_reasoning(&text, continues);
        let grammar = match (choice.demanded(tools.as_deref()), asked) {
            (Some(demanded), _) => {
                let grammar = constraint::call_grammar(&app.tokenizer, &demanded, several);
                Some(("tool_choice", grammar, true))
            }
            (None, Some((field, grammar))) => Some((field, grammar, false)),
            (None, None) => None,
        };
        if let Some((field, grammar, calls)) = grammar {
            let app = app.clone();
            let compile = move || app.compile(field, grammar, thinking, calls);
            params.grammar = Some(prompt::blocking(compile).await??);
        }
        let prompt = prompt::encode_text(&app.tokenizer, text, add_special_tokens).await?;
        trace.tokenized(tokenizing);
        trace.asks("chat", &app.config.model_name, &params, prompt.len());
        let most = app.config.max_positions;
        let max_tokens = prompt::room("messages", &prompt, params.max_tokens, most, most)?;
        let tools = tools.filter(|_| choice != ToolChoice::None);
        Ok(Self { params, prompt, thinking, max_tokens, logprobs, tools })
    }

    /// Hands it to the coordinator.
    pub(crate) fn start(&self, app: &AppState, trace: &RequestTrace) -> Result<Pieces, ApiError> {
        let room = (self.prompt.as_slice(), self.max_tokens);
        let plans = (0..self.params.n)
            .map(|i| {
                let parent = trace.traceparent();
                let request = self.params.request(&app.config, room, i, self.logprobs, parent);
                let options = self.params.text_options(&app.config, self.logprobs.is_some());
                Plan { request, choice: Choice::new(app.tokenizer.clone(), options, None) }
            })
            .collect();
        generate::start(app, plans, trace)
    }

    /// Takes one choice's text apart.
    pub(crate) fn parser(&self) -> OutputParser {
        OutputParser::new(self.thinking, self.tools.clone())
    }
}

/// Whether the prompt ends inside the model's reasoning.
fn opens_reasoning(prompt: &str, continues: bool) -> bool {
    if continues {
        // The message to go on with may stop within its reasoning.
        return prompt.rfind("<think>") > prompt.rfind("</think>");
    }
    prompt.trim_end().ends_with("<think>")
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
    let tools = tools::shown(fields)?;
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

fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
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
