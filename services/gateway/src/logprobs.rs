//! Scores in the two shapes that OpenAI's endpoints have.

use baton_coordinator::TokenLogprob;
use serde_json::{Map, Value, json};

use crate::choice::ScoredToken;
use crate::tokenizer::TextTokenizer;

/// JSON has no infinity; a token that could not be chosen gets this.
const LOWEST: f32 = -9999.0;

fn number(logprob: f32) -> Value {
    if logprob.is_finite() { logprob.max(LOWEST).into() } else { LOWEST.into() }
}

/// A token as a JSON string. Tokens that are no whole characters are written by their bytes, ids without any text by
/// their number, so that two tokens are never spelled alike.
fn spelling(tokenizer: &TextTokenizer, id: u32) -> String {
    match String::from_utf8(tokenizer.token_bytes(id)) {
        Ok(text) if text.is_empty() => {
            let raw = tokenizer.raw_token(id);
            if raw.is_empty() { format!("token_id:{id}") } else { raw }
        }
        Ok(text) => text,
        Err(error) => error.as_bytes().iter().fold("bytes:".to_owned(), |mut out, byte| {
            out.push_str(&format!("\\x{byte:02x}"));
            out
        }),
    }
}

/// `logprobs` of `/v1/completions`. The chosen token is always among its `top_logprobs`.
pub(crate) fn completion(tokenizer: &TextTokenizer, tokens: &[ScoredToken], top: usize) -> Value {
    let top_of = |token: &ScoredToken| {
        let Some(own) = token.logprob else { return Value::Null };
        let mut best = Map::new();
        let own = TokenLogprob { token: token.id, logprob: own };
        for entry in token.top.iter().take(top).chain([&own]) {
            best.entry(spelling(tokenizer, entry.token)).or_insert_with(|| number(entry.logprob));
        }
        best.into()
    };
    let spell = |t: &ScoredToken| spelling(tokenizer, t.id);
    json!({
        "tokens": tokens.iter().map(spell).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|t| t.logprob.map(number)).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top_of).collect::<Vec<_>>(),
        "text_offset": tokens.iter().map(|t| t.offset).collect::<Vec<_>>(),
    })
}

/// `logprobs` of `/v1/chat/completions`.
pub(crate) fn chat(tokenizer: &TextTokenizer, tokens: &[ScoredToken], top: usize) -> Value {
    let entry = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(id);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let mut entry = Map::new();
        entry.insert("token".into(), text.into());
        entry.insert("logprob".into(), number(logprob));
        entry.insert("bytes".into(), bytes.into());
        entry
    };
    let content = tokens.iter().map(|token| {
        let mut whole = entry(token.id, token.logprob.unwrap_or(LOWEST));
        let best = token.top.iter().take(top).map(|t| entry(t.token, t.logprob).into());
        whole.insert("top_logprobs".into(), Value::Array(best.collect()));
        Value::Object(whole)
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::tests::tokenizer;

    fn scored(id: u32, top: Vec<TokenLogprob>) -> ScoredToken {
        ScoredToken { id, logprob: Some(-3.0), top, offset: 0 }
    }

    #[test]
    fn the_chosen_token_joins_the_best_when_it_is_not_among_them() {
        let tokenizer = tokenizer();
        let the = tokenizer.encode(" the", false).unwrap()[0];
        let best = TokenLogprob { token: 5, logprob: -0.1 };
        let value = completion(&tokenizer, &[scored(the, vec![best])], 1);
        let top = value["top_logprobs"][0].as_object().unwrap();
        assert_eq!(top.len(), 2);
        assert_eq!(top[" the"], json!(-3.0));
        let value = completion(&tokenizer, &[scored(the, vec![best])], 0);
        assert_eq!(value["top_logprobs"][0], json!({" the": -3.0}));
    }

    #[test]
    fn pieces_of_characters_are_spelled_by_their_bytes() {
        let tokenizer = tokenizer();
        let crab = tokenizer.encode("🦀", false).unwrap();
        assert!(crab.len() > 1);
        assert!(spelling(&tokenizer, crab[0]).starts_with("bytes:\\xf0"));
        assert_eq!(spelling(&tokenizer, 60_000), "token_id:60000");
        let value = chat(&tokenizer, &[scored(crab[0], vec![])], 0);
        assert_eq!(value["content"][0]["bytes"][0], 0xf0);
    }

    #[test]
    fn infinities_are_numbers_in_json() {
        assert_eq!(number(f32::NEG_INFINITY), json!(-9999.0));
        assert_eq!(number(f32::NAN), json!(-9999.0));
    }
}
