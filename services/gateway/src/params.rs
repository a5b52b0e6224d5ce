//! What completions and chats have in common: sampling, ends, and the shape of the answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_coordinator::{GenerateRequest, Grammar, SamplingParams};
use serde_json::Value;

use crate::choice::TextOptions;
use crate::config::{GatewayConfig, Limits};
use crate::error::ApiError;
use crate::fields::{Fields, whole};
use crate::sampling_fields;

/// Parameters of a generation, checked.
#[derive(Clone, Debug)]
pub(crate) struct Params {
    /// How tokens are drawn, but for the seed.
    pub(crate) sampling: SamplingParams,
    /// The client's seed; without one every choice draws its own.
    pub(crate) seed: Option<u64>,
    pub(crate) n: usize,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) min_tokens: usize,
    pub(crate) ignore_eos: bool,
    /// What the text must follow.
    pub(crate) grammar: Option<Arc<dyn Grammar>>,
    pub(crate) priority: i32,
    pub(crate) deadline: Option<Instant>,
    pub(crate) cache_salt: String,
    pub(crate) skip_special_tokens: bool,
    pub(crate) return_token_ids: bool,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
}

impl Params {
    /// Reads and checks the common fields.
    pub(crate) fn read(fields: &Fields, config: &GatewayConfig) -> Result<Self, ApiError> {
        check_model(fields, config)?;
        refuse_unsupported(fields)?;
        let limits = &config.limits;
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let positions = i64::try_from(config.max_positions).unwrap_or(i64::MAX);
        let max_tokens = |name| fields.integer_in(name, 0..=positions);
        let max_tokens = match max_tokens("max_completion_tokens")? {
            Some(tokens) => Some(tokens),
            None => max_tokens("max_tokens")?,
        };
        Ok(Self {
            sampling: sampling_fields::read(fields, config)?,
            seed: fields.integer("seed")?.map(i64::cast_unsigned),
            n: fields
                .integer_in("n", 1..=limits.choices_per_prompt as i64)?
                .map_or(1, |n| n as usize),
            stop: stop_strings(fields, limits)?,
            stop_token_ids: stop_token_ids(fields, config.vocab_size)?,
            max_tokens: max_tokens.map(|n| n as usize),
            min_tokens: fields.integer_in("min_tokens", 0..=positions)?.map_or(0, |n| n as usize),
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
            grammar: None,
            priority: fields
                .integer_in("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?
                .map_or(0, |n| n as i32),
            deadline: deadline(fields, limits)?,
            cache_salt: fields.string("cache_salt")?.unwrap_or_default().to_owned(),
            skip_special_tokens: fields.boolean("skip_special_tokens")?.unwrap_or(true),
            return_token_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
            include_usage: include_usage(fields, stream)?,
            stream,
        })
    }

    /// The request for the `i`th choice of a prompt, without prompt scores.
    pub(crate) fn request(
        &self,
        config: &GatewayConfig,
        (prompt, max_tokens): (&[u32], usize),
        i: usize,
        logprobs: Option<usize>,
        traceparent: &str,
    ) -> GenerateRequest {
        GenerateRequest {
            prompt: prompt.to_vec(),
            max_tokens,
            sampling: SamplingParams {
                seed: self.seed.map_or_else(rand::random, |seed| seed.wrapping_add(i as u64)),
                ..self.sampling.clone()
            },
            logprobs,
            prompt_logprobs: None,
            stop_token_ids: self.end_ids(config),
            ignore_eos: self.ignore_eos,
            min_tokens: self.min_tokens,
            grammar: self.grammar.clone(),
            priority: self.priority,
            deadline: self.deadline,
            cache_salt: self.cache_salt.clone(),
            traceparent: traceparent.to_owned(),
        }
    }

    /// How its tokens become text.
    pub(crate) fn text_options(&self, config: &GatewayConfig, scores: bool) -> TextOptions {
        let mut terminators = self.end_ids(config);
        if !self.ignore_eos {
            terminators.extend(&config.eos_token_ids);
        }
        TextOptions {
            stop: self.stop.clone(),
            terminators,
            skip_special_tokens: self.skip_special_tokens,
            scores,
        }
    }

    /// Ids for the coordinator to end at beside the model's own: the client's, and those of `generation_config.json`.
    fn end_ids(&self, config: &GatewayConfig) -> Vec<u32> {
        let mut ids = self.stop_token_ids.clone();
        if !self.ignore_eos {
            let more = config.defaults.stop_token_ids.iter();
            ids.extend(more.filter(|id| !config.eos_token_ids.contains(id)));
        }
        ids
    }
}

/// Refuses another model's name; requests may leave the name out.
pub(crate) fn check_model(fields: &Fields, config: &GatewayConfig) -> Result<(), ApiError> {
    match fields.string("model")? {
        Some(name) if name != config.model_name => {
            Err(ApiError::unknown_model(name, &config.model_name))
        }
        _ => Ok(()),
    }
}

/// When the client's `timeout` in seconds is over, or the server's own.
fn deadline(fields: &Fields, limits: &Limits) -> Result<Option<Instant>, ApiError> {
    let own = fields.number_in("timeout", 0.0..=86_400.0)?.map(Duration::from_secs_f64);
    let shorter = own.into_iter().chain(limits.request_timeout).min();
    Ok(shorter.map(|timeout| Instant::now() + timeout))
}

fn stop_strings(fields: &Fields, limits: &Limits) -> Result<Vec<String>, ApiError> {
    let wrong = || {
        ApiError::field(
            "stop",
            format!(
                "\"stop\" is neither a string nor a list of at most {} strings, none of them empty",
                limits.stop_strings
            ),
        )
    };
    let list = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(value @ Value::String(_)) => std::slice::from_ref(value),
        Some(Value::Array(list)) if list.len() <= limits.stop_strings => list,
        Some(_) => return Err(wrong()),
    };
    let text = |v: &Value| v.as_str().filter(|s| !s.is_empty()).map(str::to_owned);
    list.iter().map(|v| text(v).ok_or_else(wrong)).collect()
}

fn stop_token_ids(fields: &Fields, vocab_size: usize) -> Result<Vec<u32>, ApiError> {
    let ids = fields.list("stop_token_ids")?.map_or(&[][..], Vec::as_slice);
    ids.iter().enumerate().map(|(i, v)| token_id("stop_token_ids", i, v, vocab_size)).collect()
}

/// A token id of the model, in a list of this name.
pub(crate) fn token_id(
    list: &str,
    i: usize,
    value: &Value,
    vocab_size: usize,
) -> Result<u32, ApiError> {
    let known = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < vocab_size);
    whole(value).filter(known).and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
        ApiError::field(
            list,
            format!("{list}[{i}] is {value}, expected a token id from 0 to {}", vocab_size - 1),
        )
    })
}

fn include_usage(fields: &Fields, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = fields.object("stream_options")? else { return Ok(false) };
    if !stream {
        return Err(ApiError::field(
            "stream_options",
            "\"stream_options\" is only allowed with \"stream\": true",
        ));
    }
    Fields::new(Value::Object(options.clone()))?
        .boolean("include_usage")
        .map(|v| v.unwrap_or(false))
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// Fields that would change the answer if they were ignored.
fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    let number = |expected: f64| move |v: &Value| v.as_f64() == Some(expected);
    fields.refuse_unless("length_penalty", number(1.0), "1")?;
    for name in ["bad_words", "logits_processors", "allowed_token_ids"] {
        fields.refuse_unless(name, is_empty, "an empty value")?;
    }
    for name in [
        "use_beam_search",
        "include_stop_str_in_output",
        "return_tokens_as_token_ids",
        "truncate_prompt_tokens",
        "prompt_logprobs",
        "prompt_embeds",
        "chat_template",
    ] {
        fields.refuse_unless(name, |v| v == &Value::Bool(false), "null")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::GenerationDefaults;
    use crate::tokenizer::tests::fixture;

    fn config() -> GatewayConfig {
        GatewayConfig {
            traces: baton_telemetry::Traces::off(),
            model_dir: fixture(),
            model_name: "tiny".into(),
            max_positions: 128,
            vocab_size: 500,
            eos_token_ids: vec![476],
            defaults: GenerationDefaults { top_p: 0.95, ..GenerationDefaults::default() },
            limits: Limits::default(),
        }
    }

    fn read(value: Value) -> Result<Params, ApiError> {
        Params::read(&Fields::new(value).unwrap(), &config())
    }

    #[test]
    fn the_checkpoint_s_defaults_hold_unless_the_request_says_otherwise() {
        assert_eq!(read(json!({})).unwrap().sampling.top_p, 0.95);
        assert_eq!(read(json!({"top_p": 0.5})).unwrap().sampling.top_p, 0.5);
        assert_eq!(read(json!({"temperature": null})).unwrap().sampling.temperature, 1.0);
    }

    #[test]
    fn each_choice_has_its_own_seed() {
        let seed =
            |params: &Params, i| params.request(&config(), (&[1], 1), i, None, "").sampling.seed;
        let fixed = read(json!({"seed": -1})).unwrap();
        assert_eq!((seed(&fixed, 0), seed(&fixed, 1)), (u64::MAX, 0));
        let drawn = read(json!({})).unwrap();
        assert_ne!(seed(&drawn, 0), seed(&drawn, 0));
    }

    #[test]
    fn the_checkpoint_s_further_ends_are_passed_on_unless_ends_are_ignored() {
        let mut config = config();
        config.defaults.stop_token_ids = vec![476, 477];
        let ends = |value: Value| {
            let params = Params::read(&Fields::new(value).unwrap(), &config).unwrap();
            let request = params.request(&config, (&[1], 1), 0, None, "");
            (request.stop_token_ids, params.text_options(&config, false).terminators)
        };
        assert_eq!(ends(json!({"stop_token_ids": [5]})), (vec![5, 477], vec![5, 477, 476]));
        let ignoring = json!({"stop_token_ids": [5], "ignore_eos": true});
        assert_eq!(ends(ignoring), (vec![5], vec![5]));
    }

    #[test]
    fn values_out_of_range_name_their_field() {
        for (value, param) in [
            (json!({"temperature": -0.1}), "temperature"),
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"top_p": 0}), "top_p"),
            (json!({"top_p": 1.01}), "top_p"),
            (json!({"top_k": -2}), "top_k"),
            (json!({"min_p": 2}), "min_p"),
            (json!({"seed": 1.5}), "seed"),
            (json!({"n": 0}), "n"),
            (json!({"n": 129}), "n"),
            (json!({"max_tokens": -1}), "max_tokens"),
            (json!({"max_tokens": 129}), "max_tokens"),
            (json!({"stop": ["a", ""]}), "stop"),
            (json!({"stop": vec!["a"; 17]}), "stop"),
            (json!({"stop": 3}), "stop"),
            (json!({"stop_token_ids": [500]}), "stop_token_ids"),
            (json!({"stop_token_ids": [-1]}), "stop_token_ids"),
            (json!({"stream": "yes"}), "stream"),
            (json!({"stream_options": {"include_usage": true}}), "stream_options"),
            (json!({"model": "gpt-4"}), "model"),
            (json!({"presence_penalty": 2.5}), "presence_penalty"),
            (json!({"frequency_penalty": -3}), "frequency_penalty"),
            (json!({"repetition_penalty": 0}), "repetition_penalty"),
            (json!({"logit_bias": {"500": 10}}), "logit_bias"),
            (json!({"logit_bias": {"5": 101}}), "logit_bias"),
            (json!({"logit_bias": {"x": 1}}), "logit_bias"),
            (json!({"timeout": -1}), "timeout"),
            (json!({"priority": 1e10}), "priority"),
            (json!({"min_tokens": -1}), "min_tokens"),
        ] {
            let error = read(value.clone()).unwrap_err();
            assert_eq!(error.body()["error"]["param"], param, "{value}");
        }
    }

    #[test]
    fn what_decides_the_draw_reaches_the_request() {
        let params = read(json!({
            "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.25,
            "logit_bias": {"5": 10, "7": -100}, "min_tokens": 3, "priority": -2,
            "timeout": 5, "cache_salt": "tenant",
        }))
        .unwrap();
        let request = params.request(&config(), (&[1], 1), 0, None, "");
        let sampling = &request.sampling;
        assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (0.5, -1.0));
        assert_eq!(sampling.repetition_penalty, 1.25);
        assert_eq!(sampling.logit_bias, [(5, 10.0), (7, -100.0)]);
        assert_eq!((request.min_tokens, request.priority), (3, -2));
        assert_eq!(request.cache_salt, "tenant");
        let left = request.deadline.unwrap() - Instant::now();
        assert!(left > Duration::from_secs(4) && left <= Duration::from_secs(5), "{left:?}");
    }

    #[test]
    fn neutral_values_of_unsupported_fields_are_fine() {
        read(json!({
            "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
            "logit_bias": {}, "response_format": {"type": "text"}, "suffix": null,
            "use_beam_search": false, "user": "me", "something_else": [1],
        }))
        .unwrap();
    }
}
