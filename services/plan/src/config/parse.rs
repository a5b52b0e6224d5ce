//! From the many spellings of `config.json` to one [`ModelConfig`].

use serde_json::{Map, Value};

use super::error::ConfigError;
use super::fields::Fields;
use super::rope;
use super::{Architecture, Fp8Block, MlpKind, ModelConfig, RopeLayout, WeightDtype};
use crate::schedule::IndexSchedule;

/// What differs between the families where a saved config leaves a field out.
struct Defaults {
    n_group: usize,
    topk_group: usize,
    rms_norm_eps: f64,
    indexer_interleaved: bool,
}

const GLM: Defaults =
    Defaults { n_group: 1, topk_group: 1, rms_norm_eps: 1e-5, indexer_interleaved: true };
const DEEPSEEK: Defaults =
    Defaults { n_group: 8, topk_group: 4, rms_norm_eps: 1e-6, indexer_interleaved: false };

pub(super) fn parse(text: &str) -> Result<ModelConfig, ConfigError> {
    let value: Value = serde_json::from_str(text).map_err(|e| ConfigError::Json(e.to_string()))?;
    let Value::Object(object) = value else {
        return Err(ConfigError::Json("it is some other JSON value".into()));
    };
    model(&object)
}

fn model(object: &Map<String, Value>) -> Result<ModelConfig, ConfigError> {
    let fields = Fields::new(object, "");
    let architecture = architecture(&fields)?;
    let defaults = match architecture {
        Architecture::GlmMoeDsa => GLM,
        Architecture::DeepseekV32 => DEEPSEEK,
    };
    refuse_what_would_change_the_answer(&fields)?;

    let num_layers = fields.size("num_hidden_layers")?;
    let qk_nope_head_dim = fields.size("qk_nope_head_dim")?;
    let qk_rope_head_dim = fields.size("qk_rope_head_dim")?;
    if !qk_rope_head_dim.is_multiple_of(2) {
        return Err(fields.invalid("qk_rope_head_dim", "an even number"));
    }
    if let Some(width) = fields.count("qk_head_dim")?
        && width != qk_nope_head_dim + qk_rope_head_dim
    {
        return Err(fields.invalid(
            "qk_head_dim",
            format!(
                "qk_nope_head_dim + qk_rope_head_dim = {}",
                qk_nope_head_dim + qk_rope_head_dim
            ),
        ));
    }
    let index_head_dim = fields.size("index_head_dim")?;
    if index_head_dim < qk_rope_head_dim {
        return Err(fields.invalid(
            "index_head_dim",
            format!("at least qk_rope_head_dim = {qk_rope_head_dim}, which is rotated in it"),
        ));
    }
    let num_routed_experts = fields
        .aliased(&["n_routed_experts", "num_experts", "num_local_experts"])?
        .filter(|&n| n > 0)
        .ok_or_else(|| fields.missing("n_routed_experts", "a whole number above 0"))?;
    let num_groups = fields.size_or("n_group", defaults.n_group)?;
    if !num_routed_experts.is_multiple_of(num_groups) {
        return Err(fields.invalid("n_group", format!("a divisor of {num_routed_experts} experts")));
    }
    let topk_groups = fields.size_or("topk_group", defaults.topk_group)?;
    if topk_groups > num_groups {
        return Err(fields.invalid("topk_group", format!("at most n_group = {num_groups}")));
    }
    let experts_per_token = fields.size("num_experts_per_tok")?;
    let reachable = num_routed_experts / num_groups * topk_groups;
    if experts_per_token > reachable {
        return Err(fields.invalid(
            "num_experts_per_tok",
            format!("at most the {reachable} experts of {topk_groups} groups"),
        ));
    }
    let rms_norm_eps = fields.positive("rms_norm_eps")?.unwrap_or(defaults.rms_norm_eps);
    Ok(ModelConfig {
        architecture,
        vocab_size: fields.size("vocab_size")?,
        hidden_size: fields.size("hidden_size")?,
        num_layers,
        num_mtp_layers: fields.count("num_nextn_predict_layers")?.unwrap_or(0),
        num_heads: fields.size("num_attention_heads")?,
        q_lora_rank: fields.size("q_lora_rank")?,
        kv_lora_rank: fields.size("kv_lora_rank")?,
        qk_nope_head_dim,
        qk_rope_head_dim,
        v_head_dim: fields.size("v_head_dim")?,
        intermediate_size: fields.size("intermediate_size")?,
        moe_intermediate_size: fields.size("moe_intermediate_size")?,
        num_routed_experts,
        experts_per_token,
        num_shared_experts: fields.count("n_shared_experts")?.unwrap_or(1),
        mlp_kinds: mlp_kinds(&fields, num_layers)?,
        num_groups,
        topk_groups,
        normalise_topk: fields.flag("norm_topk_prob", true)?,
        routed_scaling_factor: fields.positive("routed_scaling_factor")?.unwrap_or(2.5),
        index_heads: fields.size("index_n_heads")?,
        index_head_dim,
        index_topk: fields.size("index_topk")?,
        rope_layout: layout(&fields, "rope_interleave", true)?,
        indexer_rope_layout: layout(
            &fields,
            "indexer_rope_interleave",
            defaults.indexer_interleaved,
        )?,
        rope: rope::parse(&fields)?,
        max_positions: fields.size("max_position_embeddings")?,
        rms_norm_eps,
        latent_norm_eps: rms_norm_eps,
        eos_token_ids: token_ids(&fields, "eos_token_id")?,
        dtype: dtype(&fields)?,
        fp8: fp8(&fields)?,
        schedule: IndexSchedule::parse(&fields, num_layers)?,
    })
}

fn architecture(fields: &Fields<'_>) -> Result<Architecture, ConfigError> {
    let named = fields.list("architectures")?.and_then(|list| list.first()).and_then(Value::as_str);
    let by_type = fields.text("model_type")?;
    match (by_type, named) {
        (Some("glm_moe_dsa"), None | Some("GlmMoeDsaForCausalLM"))
        | (None, Some("GlmMoeDsaForCausalLM")) => Ok(Architecture::GlmMoeDsa),
        (Some("deepseek_v32"), None | Some("DeepseekV32ForCausalLM"))
        | (None, Some("DeepseekV32ForCausalLM")) => Ok(Architecture::DeepseekV32),
        (Some("glm_moe_dsa" | "deepseek_v32"), Some(other)) => Err(ConfigError::Invalid {
            field: "architectures".into(),
            found: format!("{other:?}"),
            expected: "GlmMoeDsaForCausalLM or DeepseekV32ForCausalLM, matching model_type".into(),
        }),
        (Some("glm5_next"), _) => Err(fields.invalid(
            "model_type",
            "\"glm_moe_dsa\" or \"deepseek_v32\" (glm5_next has linear-attention layers and four \
             residual streams, which baton does not serve)",
        )),
        (Some(_), _) => Err(fields.invalid("model_type", "\"glm_moe_dsa\" or \"deepseek_v32\"")),
        (None, _) => Err(fields.missing("model_type", "\"glm_moe_dsa\" or \"deepseek_v32\"")),
    }
}

/// Settings that baton does not implement; serving the model without them would give other answers.
fn refuse_what_would_change_the_answer(fields: &Fields<'_>) -> Result<(), ConfigError> {
    for flag in ["attention_bias", "mlp_bias", "tie_word_embeddings"] {
        if fields.flag(flag, false)? {
            return Err(fields.invalid(flag, "false"));
        }
    }
    fields.only("scoring_func", "sigmoid")?;
    fields.only("topk_method", "noaux_tc")?;
    fields.only("hidden_act", "silu")?;
    Ok(())
}

fn layout(fields: &Fields<'_>, field: &str, default: bool) -> Result<RopeLayout, ConfigError> {
    Ok(match fields.flag(field, default)? {
        true => RopeLayout::Interleaved,
        false => RopeLayout::HalfSplit,
    })
}

fn mlp_kinds(fields: &Fields<'_>, layers: usize) -> Result<Vec<MlpKind>, ConfigError> {
    const LIST: &str = "mlp_layer_types";
    let first_dense = fields.count("first_k_dense_replace")?;
    let frequency = fields.size_or("moe_layer_freq", 1)?;
    let by_rule = |layer: usize, first_dense: usize| match layer >= first_dense
        && layer.is_multiple_of(frequency)
    {
        true => MlpKind::Moe,
        false => MlpKind::Dense,
    };
    let Some(list) = fields.list(LIST)? else {
        let first_dense = first_dense.unwrap_or(3);
        return Ok((0..layers).map(|layer| by_rule(layer, first_dense)).collect());
    };
    if list.len() != layers {
        return Err(ConfigError::ListLength { field: LIST, found: list.len(), layers });
    }
    let mut kinds = Vec::with_capacity(layers);
    for (layer, entry) in list.iter().enumerate() {
        let kind = match entry.as_str() {
            Some("dense") => MlpKind::Dense,
            Some("sparse") => MlpKind::Moe,
            _ => {
                return Err(ConfigError::LayerKind {
                    layer,
                    field: LIST,
                    found: entry.to_string(),
                    expected: "\"dense\" or \"sparse\"",
                });
            }
        };
        kinds.push(kind);
    }
    // transformers writes its default first_k_dense_replace beside any list, but never moe_layer_freq: only a file that
    // has both halves of the rule means it.
    if let Some(first_dense) = first_dense
        && fields.get("moe_layer_freq").is_some()
        && let Some(layer) = (0..layers).find(|&l| kinds[l] != by_rule(l, first_dense))
    {
        let name = |kind| if kind == MlpKind::Dense { "dense" } else { "sparse" };
        return Err(ConfigError::Disagree {
            first_field: format!("mlp_layer_types[{layer}]"),
            first: name(kinds[layer]).into(),
            second_field: format!(
                "first_k_dense_replace {first_dense}, moe_layer_freq {frequency}"
            ),
            second: name(by_rule(layer, first_dense)).into(),
        });
    }
    Ok(kinds)
}

/// One id, a list of ids, or nothing.
fn token_ids(fields: &Fields<'_>, field: &str) -> Result<Vec<u32>, ConfigError> {
    let expected = "a token id or a list of token ids";
    let id = |value: &Value| {
        value
            .as_u64()
            .and_then(|n| u32::try_from(n).ok())
            .ok_or_else(|| fields.invalid(field, expected))
    };
    match fields.get(field) {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(value) => Ok(vec![id(value)?]),
    }
}

fn dtype(fields: &Fields<'_>) -> Result<WeightDtype, ConfigError> {
    let field = if fields.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match fields.text(field)?.map(|name| name.trim_start_matches("torch.")) {
        None | Some("bfloat16") => Ok(WeightDtype::Bf16),
        Some("float16") => Ok(WeightDtype::F16),
        Some("float32") => Ok(WeightDtype::F32),
        Some(_) => Err(fields.invalid(field, "\"bfloat16\", \"float16\" or \"float32\"")),
    }
}

fn fp8(fields: &Fields<'_>) -> Result<Option<Fp8Block>, ConfigError> {
    let Some(object) = fields.object("quantization_config")? else { return Ok(None) };
    let quantization = Fields::new(object, "quantization_config.");
    let unsupported =
        "\"fp8\" with e4m3 weight blocks (NVFP4 and other formats are not served by this version)";
    match quantization.text("quant_method")? {
        Some("fp8") => {}
        _ => return Err(quantization.invalid("quant_method", unsupported)),
    }
    quantization.only("fmt", "e4m3")?;
    let Some(block) = quantization.list("weight_block_size")? else {
        return Err(quantization.missing("weight_block_size", "two whole numbers, [rows, columns]"));
    };
    let sizes: Vec<usize> =
        block.iter().filter_map(|v| v.as_u64().and_then(|n| usize::try_from(n).ok())).collect();
    match sizes[..] {
        [rows, cols] if rows > 0 && cols > 0 && block.len() == 2 => {
            Ok(Some(Fp8Block { rows, cols }))
        }
        _ => Err(quantization.invalid("weight_block_size", "two whole numbers, [rows, columns]")),
    }
}
