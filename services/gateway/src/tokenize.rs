//! `/tokenize` and `/detokenize`, in vLLM's shapes.

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::app::AppState;
use crate::body::JsonFields;
use crate::chat;
use crate::error::ApiError;
use crate::params::{check_model, token_id};
use crate::prompt::{blocking, encode_text};

/// Ids of a prompt, or of a chat as the template renders it.
pub(crate) async fn tokenize(
    State(app): State<AppState>,
    JsonFields(mut fields): JsonFields,
) -> Result<Json<Value>, ApiError> {
    check_model(&fields, &app.config)?;
    let add_special = fields.boolean("add_special_tokens")?;
    let strings = fields.boolean("return_token_strs")?.unwrap_or(false);
    let tokens = if fields.get("messages").is_some() {
        if fields.get("prompt").is_some() {
            return Err(ApiError::field("prompt", "send \"prompt\" or \"messages\", not both"));
        }
        let text = chat::render(&app, &mut fields).await?;
        encode_text(&app.tokenizer, text, add_special.unwrap_or(false)).await?
    } else {
        let Some(text) = fields.string("prompt")? else {
            return Err(ApiError::field("prompt", "\"prompt\" or \"messages\" is missing"));
        };
        encode_text(&app.tokenizer, text.to_owned(), add_special.unwrap_or(true)).await?
    };
    let token_strs: Option<Vec<String>> =
        strings.then(|| tokens.iter().map(|&id| app.tokenizer.raw_token(id)).collect());
    Ok(Json(json!({
        "count": tokens.len(),
        "max_model_len": app.config.max_positions,
        "tokens": tokens,
        "token_strs": token_strs,
    })))
}

/// The text of ids.
pub(crate) async fn detokenize(
    State(app): State<AppState>,
    JsonFields(fields): JsonFields,
) -> Result<Json<Value>, ApiError> {
    check_model(&fields, &app.config)?;
    let list = fields.list("tokens")?.ok_or_else(|| {
        ApiError::field("tokens", "\"tokens\" is missing, expected a list of ids")
    })?;
    let vocab_size = app.config.vocab_size;
    let ids = list.iter().enumerate().map(|(i, v)| token_id("tokens", i, v, vocab_size));
    let ids = ids.collect::<Result<Vec<u32>, ApiError>>()?;
    let tokenizer = app.tokenizer.clone();
    let text = blocking(move || tokenizer.decode(&ids, false))
        .await?
        .map_err(|e| ApiError::field("tokens", e.to_string()))?;
    Ok(Json(json!({"prompt": text})))
}
