//! What every answer of one request has in common, whole or in pieces.

use serde_json::{Map, Value, json};

use crate::app::{AppState, unix_time};
use crate::params::Params;

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

    fn usage(&self, completion_tokens: usize) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        })
    }

    /// The whole answer.
    pub(crate) fn whole(
        &self,
        object: &str,
        choices: Vec<Value>,
        completion_tokens: usize,
    ) -> Map<String, Value> {
        let mut body = self.body(object, choices);
        body.insert("usage".into(), self.usage(completion_tokens));
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
    pub(crate) fn closing(&self, object: &str, completion_tokens: usize) -> Option<Value> {
        self.include_usage.then(|| self.whole(object, Vec::new(), completion_tokens).into())
    }
}
