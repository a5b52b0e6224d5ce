//! The prompts of a completion request: one or many, as text or as token ids.

use std::sync::Arc;

use serde_json::Value;

use crate::error::ApiError;
use crate::fields::kind;
use crate::params::token_id;
use crate::tokenizer::TextTokenizer;

/// Texts longer than this are tokenized away from the threads that serve connections.
const INLINE_BYTES: usize = 4096;

/// One prompt as the client sent it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// Reads `prompt`: a string, a list of strings, a list of token ids, or a list of such lists.
pub(crate) fn read(value: Option<Value>, vocab_size: usize) -> Result<Vec<Prompt>, ApiError> {
    let wrong = |value: &Value| {
        ApiError::field(
            "prompt",
            format!(
                "\"prompt\" holds {}, expected a string, a list of strings, a list of token ids or a list of such lists",
                kind(value)
            ),
        )
    };
    let list = match value {
        None => return Err(ApiError::field("prompt", "\"prompt\" is missing")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong(&other)),
    };
    match list.first() {
        None => Err(ApiError::field("prompt", "\"prompt\" is an empty list")),
        Some(Value::Number(_)) => Ok(vec![Prompt::Ids(ids("prompt", &list, vocab_size)?)]),
        Some(Value::String(_)) => list
            .into_iter()
            .map(|v| match v {
                Value::String(text) => Ok(Prompt::Text(text)),
                other => Err(wrong(&other)),
            })
            .collect(),
        Some(Value::Array(_)) => list
            .iter()
            .enumerate()
            .map(|(i, v)| match v {
                Value::Array(list) => {
                    ids(&format!("prompt[{i}]"), list, vocab_size).map(Prompt::Ids)
                }
                other => Err(wrong(other)),
            })
            .collect(),
        Some(other) => Err(wrong(other)),
    }
}

fn ids(name: &str, list: &[Value], vocab_size: usize) -> Result<Vec<u32>, ApiError> {
    list.iter().enumerate().map(|(i, v)| token_id(name, i, v, vocab_size)).collect()
}

/// The ids of every prompt. Texts that are long together are tokenized on a thread of their own.
pub(crate) async fn encode(
    tokenizer: &Arc<TextTokenizer>,
    prompts: Vec<Prompt>,
    add_special_tokens: bool,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let length = |prompt: &Prompt| match prompt {
        Prompt::Text(text) => text.len(),
        Prompt::Ids(_) => 0,
    };
    let long = prompts.iter().map(length).sum::<usize>() > INLINE_BYTES;
    let tokenizer = tokenizer.clone();
    let encode = move || {
        let ids = |prompt| match prompt {
            Prompt::Ids(ids) => Ok(ids),
            Prompt::Text(text) => tokenizer.encode(&text, add_special_tokens),
        };
        prompts.into_iter().map(ids).collect::<Result<Vec<_>, _>>()
    };
    let ids = if long { blocking(encode).await? } else { encode() };
    ids.map_err(|e| ApiError::field("prompt", e.to_string()))
}

/// The ids of one text.
pub(crate) async fn encode_text(
    tokenizer: &Arc<TextTokenizer>,
    text: String,
    add_special_tokens: bool,
) -> Result<Vec<u32>, ApiError> {
    let ids = encode(tokenizer, vec![Prompt::Text(text)], add_special_tokens).await?;
    Ok(ids.into_iter().flatten().collect())
}

/// Runs work that takes long on a thread for such work.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| ApiError::internal(format!("a worker thread failed: {e}")))
}

/// Checks that a prompt leaves room for `max_tokens` and returns how many tokens may follow it. Without `max_tokens`
/// it is `default`, at most what is left.
pub(crate) fn room(
    param: &str,
    prompt: &[u32],
    max_tokens: Option<usize>,
    default: usize,
    max_positions: usize,
) -> Result<usize, ApiError> {
    if prompt.is_empty() {
        return Err(ApiError::field(
            param,
            format!("{param:?} is empty, expected at least 1 token"),
        ));
    }
    let left = max_positions.saturating_sub(prompt.len());
    let wanted = max_tokens.unwrap_or_else(|| default.min(left.max(1)));
    if prompt.len() > max_positions || wanted > left {
        return Err(ApiError::too_long(
            param,
            format!(
                "the prompt has {} tokens and {wanted} may follow; this model's longest context is {max_positions} tokens",
                prompt.len()
            ),
        ));
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn all_four_forms() {
        let read = |v| read(Some(v), 10).unwrap();
        assert_eq!(read(json!("a")), [Prompt::Text("a".into())]);
        assert_eq!(read(json!(["a", "b"])), [Prompt::Text("a".into()), Prompt::Text("b".into())]);
        assert_eq!(read(json!([1, 2])), [Prompt::Ids(vec![1, 2])]);
        assert_eq!(read(json!([[1], [2, 3]])), [Prompt::Ids(vec![1]), Prompt::Ids(vec![2, 3])]);
    }

    #[test]
    fn mixed_missing_and_unknown() {
        for bad in [
            json!([]),
            json!(["a", 1]),
            json!([1, "a"]),
            json!([[1], "a"]),
            json!([1.5]),
            json!([true]),
            json!({"a": 1}),
            json!(5),
            json!([10]),
            json!([-1]),
            json!([[0], [10]]),
            json!([4294967296u64]),
        ] {
            assert!(read(Some(bad.clone()), 10).is_err(), "{bad}");
        }
        assert!(read(None, 10).is_err());
    }

    #[test]
    fn room_is_counted_to_the_last_position() {
        let prompt = [1; 8];
        assert_eq!(room("prompt", &prompt, Some(2), 16, 10), Ok(2));
        assert!(room("prompt", &prompt, Some(3), 16, 10).is_err());
        assert_eq!(room("prompt", &prompt, None, 16, 10), Ok(2));
        assert_eq!(room("prompt", &prompt, Some(0), 16, 8), Ok(0));
        assert!(room("prompt", &prompt, None, 16, 8).is_err());
        assert!(room("prompt", &prompt, Some(0), 16, 7).is_err());
        assert!(room("prompt", &[], Some(1), 16, 7).is_err());
    }
}
