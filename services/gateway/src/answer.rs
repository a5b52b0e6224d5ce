//! What every answer of one request has in common, whole or in pieces.

use serde_json::{Map, Value, json};

use crate::app::{AppState, unix_time};
use crate::choice::Piece;
use crate::params::Params;

/// What the choices of an answer used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Used {
    pub(crate) completion_tokens: usize,
    pub(crate) cached_tokens: usize,
}

impl Used {
    /// Adds a piece of the choice at `index`; of the choices of one prompt the first says what was cached.
    pub(crate) fn add(&mut self, index: usize, n: usize, piece: &Piece) {
        self.completion_tokens += piece.token_ids.len();
        if index.is_multiple_of(n) && piece.finish.is_some() {
            self.cached_tokens += piece.cached_tokens;
        }
    }

    /// What whole choices used, `n` for each prompt.
    pub(crate) fn of(choices: &[Piece], n: usize) -> Self {
        let mut used = Self::default();
        for (index, piece) in choices.iter().enumerate() {
            used.add(index, n, piece);
        }
        used
    }
}

/// Head and count of an answer.
#[derive(Debug)]
pub(crate) struct Answer {
    id: String,
    created: u64,
    model: String,
    prompt_tokens: usize,
    include_usage: bool,
}

impl Answer {
    /// `prefix` begins the answer's id.
    pub(crate) fn new(app: &AppState, prefix: &str, params: &Params, prompt_tokens: usize) -> Self {
        Self {
            // Unique enough to find the answer in a log.
            id: format!("{prefix}-{:032x}", rand::random::<u128>()),
            created: unix_time(),
            model: app.config.model_name.clone(),
            prompt_tokens,
            include_usage: params.include_usage,
        }
    }

    fn body(&self, object: &str, choices: Vec<Value>) -> Map<String, Value> {
        let mut body = Map::new();
        body.insert("id".into(), self.id.as_str().into());
        body.insert("object".into(), object.into());
        body.insert("created".into(), self.created.into());
        body.insert("model".into(), self.model.as_str().into());
        body.insert("choices".into(), choices.into());
        body
    }

    fn usage(&self, used: Used) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": used.completion_tokens,
            "total_tokens": self.prompt_tokens + used.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        })
    }

    /// The whole answer.
    pub(crate) fn whole(
        &self,
        object: &str,
        choices: Vec<Value>,
        used: Used,
    ) -> Map<String, Value> {
        let mut body = self.body(object, choices);
        body.insert("usage".into(), self.usage(used));
        body
    }

    /// One piece of a streamed answer.
    pub(crate) fn chunk(&self, object: &str, choice: Value) -> Map<String, Value> {
        let mut chunk = self.body(object, vec![choice]);
        if self.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        chunk
    }

    /// The last piece of a streamed answer, when the client wants to know what it used.
    pub(crate) fn closing(&self, object: &str, used: Used) -> Option<Value> {
        self.include_usage.then(|| self.whole(object, Vec::new(), used).into())
    }
}
