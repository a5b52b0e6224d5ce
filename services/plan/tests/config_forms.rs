//! Every spelling of a config, and every refusal.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use baton_plan::{HiddenDtype, LayerKind, ModelConfig, RopeLayout, WeightDtype};
use serde_json::{Value, json};

fn base() -> Value {
    json!({
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 320,
        "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
        "num_hidden_layers": 10, "num_attention_heads": 4, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "index_n_heads": 16, "index_head_dim": 16,
        "index_topk": 8, "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}
    })
}

fn with(changes: Value) -> Result<ModelConfig, String> {
    let mut config = base();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    ModelConfig::from_json(&config.to_string()).map_err(|e| e.to_string())
}

fn without(field: &str) -> Result<ModelConfig, String> {
    let mut config = base();
    config.as_object_mut().unwrap().remove(field);
    ModelConfig::from_json(&config.to_string()).map_err(|e| e.to_string())
}

#[track_caller]
fn refused(changes: Value, words: &[&str]) {
    let message = with(changes.clone()).expect_err(&changes.to_string());
    for word in words {
        assert!(message.contains(word), "{message:?} does not name {word:?}");
    }
}

fn full(config: &ModelConfig) -> Vec<usize> {
    config.schedule.full()
}

#[test]
fn defaults_that_saved_files_leave_out() {
    let config = with(json!({})).unwrap();
    assert_eq!(config.rope_layout, RopeLayout::Interleaved);
    assert_eq!(config.indexer_rope_layout, RopeLayout::Interleaved);
    assert_eq!(config.num_mtp_layers, 0);
    assert_eq!(config.dtype, WeightDtype::Bf16);
    assert_eq!(config.latent_norm_eps, config.rms_norm_eps);
    assert_eq!(full(&config).len(), 10);
    let deepseek = with(json!({"model_type": "deepseek_v32", "n_group": 4, "topk_group": 2,
        "architectures": ["DeepseekV32ForCausalLM"]}))
    .unwrap();
    assert_eq!(deepseek.indexer_rope_layout, RopeLayout::HalfSplit);
    assert_eq!(deepseek.rms_norm_eps, 1e-6);
}

#[test]
fn schedule_forms() {
    let freq = with(json!({"index_topk_freq": 4, "index_skip_topk_offset": 3})).unwrap();
    assert_eq!(full(&freq), [0, 1, 2, 6]);
    let default_offset = with(json!({"index_topk_freq": 4})).unwrap();
    assert_eq!(full(&default_offset), [0, 1, 5, 9]);
    let null = with(json!({"index_topk_freq": null, "index_skip_topk_offset": null})).unwrap();
    assert_eq!(full(&null).len(), 10);
    let pattern = with(json!({"index_topk_pattern": "FFSSSFSFSS"})).unwrap();
    assert_eq!(full(&pattern), [0, 1, 5, 7]);
    let types: Vec<&str> =
        "FFSSSFSFSS".chars().map(|c| if c == 'F' { "full" } else { "shared" }).collect();
    let listed = with(json!({"indexer_types": types, "index_topk_pattern": types})).unwrap();
    assert_eq!(listed.schedule, pattern.schedule);
    assert_eq!(listed.schedule.kind(2), LayerKind::Shared);
    assert_eq!(listed.schedule.source(4), 1);
    assert_eq!(listed.digest(), pattern.digest());
    assert_ne!(listed.digest(), freq.digest());
}

#[test]
fn schedules_that_cannot_be() {
    let shared_first: Vec<&str> = std::iter::repeat_n("shared", 10).collect();
    refused(json!({"indexer_types": shared_first}), &["layer 0", "indexer_types"]);
    refused(json!({"indexer_types": ["full", "shared"]}), &["indexer_types", "2", "10"]);
    let mut unknown = vec!["full"; 10];
    unknown[7] = "sliding";
    refused(json!({"indexer_types": unknown}), &["layer 7", "indexer_types", "sliding"]);
    refused(json!({"index_topk_pattern": "FFX"}), &["index_topk_pattern", "3", "10"]);
    refused(json!({"index_topk_pattern": "FFSSSXSFSS"}), &["layer 5", "\"X\""]);
    refused(
        json!({"index_topk_pattern": "FFSSSFSFSS", "index_topk_freq": 4, "index_skip_topk_offset": 3}),
        &["layer 2", "index_topk_pattern", "index_topk_freq", "shared", "full"],
    );
}

#[test]
fn rope_forms() {
    let nested = with(json!({})).unwrap();
    let flat = with(json!({"rope_parameters": null, "rope_theta": 10000})).unwrap();
    assert_eq!(nested.rope, flat.rope);
    assert_eq!(nested.digest(), flat.digest());
    refused(json!({"rope_parameters": null}), &["rope_theta"]);
    refused(json!({"rope_theta": 5}), &["10000", "5"]);
    refused(
        json!({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}}),
        &["rope_type", "llama3"],
    );
    let yarn = json!({"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0});
    refused(json!({"rope_scaling": yarn}), &["rope_parameters", "rope_scaling", "disagree"]);
    let flat_yarn = with(json!({"rope_parameters": null, "rope_theta": 1e4, "rope_scaling": yarn,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 128}))
    .unwrap();
    assert!((flat_yarn.softmax_scale() - 0.135_234).abs() < 1e-6);
    let (frequencies, magnitude) = flat_yarn.rope_inv_freq();
    assert_eq!((frequencies.len(), magnitude), (32, 1.0));
    // The first pairs keep their frequency, the last are divided by the factor.
    assert_eq!(frequencies[0], 1.0);
    let last = 10_000f64.powf(-62.0 / 64.0) / 40.0;
    assert!((f64::from(frequencies[31]) / last - 1.0).abs() < 1e-5);
}

#[test]
fn what_would_change_the_answer_is_refused() {
    refused(json!({"attention_bias": true}), &["attention_bias", "true", "false"]);
    refused(json!({"tie_word_embeddings": true}), &["tie_word_embeddings"]);
    refused(json!({"scoring_func": "softmax"}), &["scoring_func", "softmax", "sigmoid"]);
    refused(json!({"topk_method": "greedy"}), &["topk_method"]);
    refused(json!({"hidden_act": "gelu"}), &["hidden_act", "gelu"]);
    refused(json!({"model_type": "glm5_next"}), &["glm5_next", "glm_moe_dsa"]);
    refused(json!({"model_type": "llama", "architectures": null}), &["llama"]);
    refused(json!({"n_group": 3}), &["n_group", "3", "8"]);
    refused(json!({"num_experts": 16}), &["n_routed_experts", "num_experts", "8", "16"]);
    refused(json!({"kv_lora_rank": 0}), &["kv_lora_rank", "above 0"]);
    refused(json!({"hidden_size": "64"}), &["hidden_size", "whole number"]);
    refused(json!({"dtype": "int8"}), &["dtype", "int8"]);
    refused(json!({"quantization_config": {"quant_method": "modelopt"}}), &["modelopt", "fp8"]);
    for field in ["q_lora_rank", "kv_lora_rank", "v_head_dim", "index_topk", "model_type"] {
        let message = without(field).map(|_| ());
        if field == "model_type" {
            assert!(message.is_ok(), "architectures alone name the family");
        } else {
            assert!(message.unwrap_err().contains(field));
        }
    }
    assert!(ModelConfig::from_json("[1]").unwrap_err().to_string().contains("JSON object"));
    assert!(ModelConfig::from_json("{").unwrap_err().to_string().contains("JSON"));
}

#[test]
fn half_precision_weights_are_counted_as_such_and_compute_in_f32() {
    let config = with(json!({"dtype": "float16"})).unwrap();
    assert_eq!(config.dtype, WeightDtype::F16);
    assert_eq!((config.dtype.size(), config.dtype.activations()), (2, HiddenDtype::F32));
}

#[test]
fn mlp_layers_and_other_spellings() {
    let config = with(json!({"first_k_dense_replace": 2, "torch_dtype": "float32",
        "head_dim": 192, "layer_types": ["indexed_attention"], "eos_token_id": [7, 9]}))
    .unwrap();
    assert!(!config.is_moe(1) && config.is_moe(2));
    assert_eq!(config.dtype, WeightDtype::F32);
    assert_eq!(config.eos_token_ids, [7, 9]);
    refused(json!({"mlp_layer_types": ["dense"]}), &["mlp_layer_types", "1", "10"]);
    let mut kinds = vec!["sparse"; 10];
    kinds[0] = "dense";
    refused(
        json!({"mlp_layer_types": kinds, "first_k_dense_replace": 2, "moe_layer_freq": 1}),
        &["mlp_layer_types[1]", "first_k_dense_replace 2"],
    );
    let fp8 = with(json!({"quantization_config":
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}));
    assert_eq!(fp8.unwrap().fp8.unwrap().rows, 128);
}
