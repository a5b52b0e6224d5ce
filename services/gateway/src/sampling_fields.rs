//! The fields of a request that decide how tokens are drawn.

use baton_coordinator::SamplingParams;
use serde_json::Value;

use crate::config::GatewayConfig;
use crate::error::ApiError;
use crate::fields::{Fields, whole};

/// Most entries of `logit_bias`, as at OpenAI.
const MOST_BIASES: usize = 300;

/// Reads and checks them; the seed is left to the choice.
pub(crate) fn read(fields: &Fields, config: &GatewayConfig) -> Result<SamplingParams, ApiError> {
    let defaults = &config.defaults;
    let number = |name, range| fields.number_in(name, range).map(|v| v.map(|v| v as f32));
    Ok(SamplingParams {
        temperature: number("temperature", 0.0..=2.0)?.unwrap_or(defaults.temperature),
        top_p: above_zero(fields, "top_p", 1.0)?.unwrap_or(defaults.top_p),
        top_k: fields
            .integer_in("top_k", -1..=i64::from(u32::MAX))?
            .map_or(defaults.top_k, |v| u32::try_from(v).unwrap_or(0)),
        min_p: number("min_p", 0.0..=1.0)?.unwrap_or(defaults.min_p),
        seed: 0,
        presence_penalty: number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        frequency_penalty: number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        repetition_penalty: above_zero(fields, "repetition_penalty", 2.0)?.unwrap_or(1.0),
        logit_bias: logit_bias(fields, config.vocab_size)?,
    })
}

fn above_zero(fields: &Fields, name: &str, most: f64) -> Result<Option<f32>, ApiError> {
    let value = fields.number_in(name, 0.0..=most)?;
    if value == Some(0.0) {
        let message = format!("{name:?} is 0, expected more than 0, at most {most}");
        return Err(ApiError::field(name, message));
    }
    Ok(value.map(|v| v as f32))
}

/// `{"token id": bias}`, from -100 (never, as good as) to 100 (always).
fn logit_bias(fields: &Fields, vocab_size: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    if map.len() > MOST_BIASES {
        let message = format!("\"logit_bias\" has {} entries, at most {MOST_BIASES}", map.len());
        return Err(ApiError::field("logit_bias", message));
    }
    map.iter().map(|(token, bias)| one_bias(token, bias, vocab_size)).collect()
}

fn one_bias(token: &str, bias: &Value, vocab_size: usize) -> Result<(u32, f32), ApiError> {
    let id = token.parse::<u32>().ok().filter(|id| (*id as usize) < vocab_size);
    let id = id.ok_or_else(|| {
        let message =
            format!("\"logit_bias\" names token {token:?}, expected an id below {vocab_size}");
        ApiError::field("logit_bias", message)
    })?;
    let bias = bias.as_f64().or_else(|| whole(bias).map(|v| v as f64));
    let bias = bias.filter(|bias| (-100.0..=100.0).contains(bias)).ok_or_else(|| {
        let message = format!("the bias of token {id} is not a number from -100 to 100");
        ApiError::field("logit_bias", message)
    })?;
    Ok((id, bias as f32))
}
