//! Models that the tests of this crate plan for.

use crate::config::WeightDtype;
use crate::config::{
    Architecture, Fp8Block, MlpKind, ModelConfig, RopeLayout, RopeParameters, Yarn,
};
use crate::schedule::{IndexSchedule, LayerKind};

/// `F` and `S` per layer.
pub(crate) fn schedule(letters: &str) -> IndexSchedule {
    let kind = |letter| if letter == 'F' { LayerKind::Full } else { LayerKind::Shared };
    IndexSchedule { kinds: letters.chars().map(kind).collect() }
}

/// GLM-5.2 and 5.3 in bf16.
pub(crate) fn glm_5_3() -> ModelConfig {
    let letters = format!("FFF{}", "SSSF".repeat(19));
    ModelConfig {
        architecture: Architecture::GlmMoeDsa,
        vocab_size: 154_880,
        hidden_size: 6144,
        num_layers: 78,
        num_mtp_layers: 1,
        num_heads: 64,
        q_lora_rank: 2048,
        kv_lora_rank: 512,
        qk_nope_head_dim: 192,
        qk_rope_head_dim: 64,
        v_head_dim: 256,
        intermediate_size: 12_288,
        moe_intermediate_size: 2048,
        num_routed_experts: 256,
        experts_per_token: 8,
        num_shared_experts: 1,
        mlp_kinds: dense_then_moe(3, 78),
        num_groups: 1,
        topk_groups: 1,
        normalise_topk: true,
        routed_scaling_factor: 2.5,
        index_heads: 32,
        index_head_dim: 128,
        index_topk: 2048,
        rope_layout: RopeLayout::Interleaved,
        indexer_rope_layout: RopeLayout::Interleaved,
        rope: RopeParameters { theta: 8e6, yarn: None },
        max_positions: 1_048_576,
        rms_norm_eps: 1e-5,
        latent_norm_eps: 1e-5,
        eos_token_ids: vec![154_820, 154_827, 154_829],
        dtype: WeightDtype::Bf16,
        fp8: None,
        schedule: schedule(&letters[..78]),
    }
}

/// GLM-5.1 in bf16: every layer has an indexer.
pub(crate) fn glm_5_1() -> ModelConfig {
    ModelConfig {
        schedule: schedule(&"F".repeat(78)),
        max_positions: 202_752,
        rope: RopeParameters { theta: 1e6, yarn: None },
        ..glm_5_3()
    }
}

/// DeepSeek-V3.2 in FP8.
pub(crate) fn deepseek_v32() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::DeepseekV32,
        vocab_size: 129_280,
        hidden_size: 7168,
        num_layers: 61,
        num_heads: 128,
        q_lora_rank: 1536,
        qk_nope_head_dim: 128,
        v_head_dim: 128,
        intermediate_size: 18_432,
        mlp_kinds: dense_then_moe(3, 61),
        num_groups: 8,
        topk_groups: 4,
        index_heads: 64,
        indexer_rope_layout: RopeLayout::HalfSplit,
        rope: RopeParameters {
            theta: 1e4,
            yarn: Some(Yarn {
                factor: 40.0,
                original_max_positions: 4096,
                beta_fast: 32.0,
                beta_slow: 1.0,
                mscale: 1.0,
                mscale_all_dim: 1.0,
                attention_factor: None,
            }),
        },
        max_positions: 163_840,
        rms_norm_eps: 1e-6,
        latent_norm_eps: 1e-6,
        eos_token_ids: vec![1],
        fp8: Some(BLOCK),
        schedule: schedule(&"F".repeat(61)),
        ..glm_5_3()
    }
}

/// The block of every released FP8 checkpoint.
pub(crate) const BLOCK: Fp8Block = Fp8Block { rows: 128, cols: 128 };

/// A model of the given layers with small dimensions; all layers are MoE but the first.
pub(crate) fn tiny(letters: &str) -> ModelConfig {
    let layers = letters.len();
    ModelConfig {
        vocab_size: 96,
        hidden_size: 64,
        num_layers: layers,
        num_mtp_layers: 0,
        num_heads: 4,
        q_lora_rank: 32,
        kv_lora_rank: 24,
        qk_nope_head_dim: 12,
        qk_rope_head_dim: 8,
        v_head_dim: 10,
        intermediate_size: 96,
        moe_intermediate_size: 20,
        num_routed_experts: 8,
        experts_per_token: 2,
        mlp_kinds: dense_then_moe(1, layers),
        index_heads: 16,
        index_head_dim: 16,
        index_topk: 8,
        max_positions: 128,
        schedule: schedule(letters),
        ..glm_5_3()
    }
}

fn dense_then_moe(dense: usize, layers: usize) -> Vec<MlpKind> {
    (0..layers).map(|layer| if layer < dense { MlpKind::Dense } else { MlpKind::Moe }).collect()
}
