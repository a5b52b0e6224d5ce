//! Rotary embedding: its spellings and its frequencies.

use std::f64::consts::PI;

use super::error::ConfigError;
use super::fields::Fields;
use super::{ModelConfig, RopeParameters, Yarn};

/// `rope_parameters` (nested), or `rope_theta` at top level with yarn under `rope_scaling`.
pub(super) fn parse(fields: &Fields<'_>) -> Result<RopeParameters, ConfigError> {
    let nested = fields.object("rope_parameters")?;
    let scaling = fields.object("rope_scaling")?;
    let inner = nested.map(|object| Fields::new(object, "rope_parameters."));
    let flat_theta = fields.positive("rope_theta")?;
    let nested_theta = match &inner {
        Some(inner) => inner.positive("rope_theta")?,
        None => None,
    };
    let theta = match (nested_theta, flat_theta) {
        (Some(nested), Some(flat)) if nested != flat => {
            return Err(ConfigError::Disagree {
                first_field: "rope_parameters.rope_theta".into(),
                first: nested.to_string(),
                second_field: "rope_theta".into(),
                second: flat.to_string(),
            });
        }
        // Never a silent default: a wrong base is fluent and wrong.
        (None, None) => return Err(fields.missing("rope_theta", "the rotary base, a number")),
        (nested, flat) => nested.or(flat).unwrap_or_default(),
    };
    // The scaling lives in `rope_parameters` when that names a type, or in `rope_scaling`; both may be there and must agree.
    let described = inner.filter(|f| f.get("rope_type").is_some() || f.get("type").is_some());
    let described = described.map(|fields| yarn(&fields)).transpose()?;
    let scaling = scaling.map(|object| yarn(&Fields::new(object, "rope_scaling."))).transpose()?;
    let yarn = match (described, scaling) {
        (Some(first), Some(second)) if first != second => {
            return Err(ConfigError::Disagree {
                first_field: "rope_parameters".into(),
                first: format!("{first:?}"),
                second_field: "rope_scaling".into(),
                second: format!("{second:?}"),
            });
        }
        (first, second) => first.or(second).flatten(),
    };
    Ok(RopeParameters { theta, yarn })
}

fn yarn(fields: &Fields<'_>) -> Result<Option<Yarn>, ConfigError> {
    let field = if fields.get("rope_type").is_some() { "rope_type" } else { "type" };
    match fields.text(field)? {
        None | Some("default") => return Ok(None),
        Some("yarn") => {}
        Some(_) => return Err(fields.invalid(field, "\"default\" or \"yarn\"")),
    }
    if fields.get("truncate").is_some() && !fields.flag("truncate", true)? {
        return Err(fields.invalid("truncate", "true"));
    }
    let factor =
        fields.positive("factor")?.ok_or_else(|| fields.missing("factor", "a number above 0"))?;
    Ok(Some(Yarn {
        factor,
        original_max_positions: fields.size("original_max_position_embeddings")?,
        beta_fast: fields.positive("beta_fast")?.unwrap_or(32.0),
        beta_slow: fields.positive("beta_slow")?.unwrap_or(1.0),
        mscale: fields.number("mscale")?.unwrap_or(0.0),
        mscale_all_dim: fields.number("mscale_all_dim")?.unwrap_or(0.0),
        attention_factor: fields.positive("attention_factor")?,
    }))
}

/// `0.1 * mscale * ln(factor) + 1`, and 1 for contexts that are not extended.
fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

impl ModelConfig {
    /// One frequency per rotated pair, and the factor on cos and sin.
    #[must_use]
    pub fn rope_inv_freq(&self) -> (Vec<f32>, f32) {
        let width = self.qk_rope_head_dim;
        let base = self.rope.theta as f32;
        // f32 powers, as torch computes them: at position 1,000,000 the last bit of a frequency is visible.
        let powers = (0..width / 2).map(|i| base.powf((2 * i) as f32 / width as f32));
        let Some(yarn) = &self.rope.yarn else {
            return (powers.map(|power| 1.0 / power).collect(), 1.0);
        };

        let pair_with_rotations = |rotations: f64| {
            let wavelength = yarn.original_max_positions as f64 / (rotations * 2.0 * PI);
            width as f64 * wavelength.ln() / (2.0 * self.rope.theta.ln())
        };
        let low = pair_with_rotations(yarn.beta_fast).floor().max(0.0);
        let mut high = pair_with_rotations(yarn.beta_slow).ceil().min(width as f64 - 1.0);
        if low == high {
            high += 0.001; // A ramp of no width would divide by zero.
        }
        let frequencies = powers
            .enumerate()
            .map(|(i, power)| {
                let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                let extended = 1.0 / (yarn.factor as f32 * power);
                let kept = 1.0 - ramp;
                extended * (1.0 - kept) + 1.0 / power * kept
            })
            .collect();
        let magnitude = yarn.attention_factor.unwrap_or_else(|| {
            if yarn.mscale != 0.0 && yarn.mscale_all_dim != 0.0 {
                yarn_mscale(yarn.factor, yarn.mscale)
                    / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
            } else {
                yarn_mscale(yarn.factor, 1.0)
            }
        });
        (frequencies, magnitude as f32)
    }

    /// Factor on attention logits: `qk_head_dim^-1/2`, times the squared yarn magnitude.
    #[must_use]
    pub fn softmax_scale(&self) -> f32 {
        let plain = (self.qk_head_dim() as f64).powf(-0.5);
        let magnitude = match &self.rope.yarn {
            Some(yarn) if yarn.mscale_all_dim != 0.0 => {
                yarn_mscale(yarn.factor, yarn.mscale_all_dim)
            }
            _ => 1.0,
        };
        (plain * magnitude * magnitude) as f32
    }
}
