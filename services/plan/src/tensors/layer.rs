//! The tensors of one layer.

use super::{Precision, TensorSpec};
use crate::config::{MlpKind, ModelConfig};

/// Tensors of a decoder layer; those of the indexer on full layers only.
///
/// # Panics
/// When the model has no such layer.
#[must_use]
pub fn layer_tensors(config: &ModelConfig, layer: usize) -> Vec<TensorSpec> {
    let mut list = LayerList::new(layer);
    list.attention(config);
    if config.schedule.is_full(layer) {
        list.indexer(config);
    }
    match config.mlp_kinds[layer] {
        MlpKind::Dense => list.gated_mlp("mlp", config.hidden_size, config.intermediate_size),
        MlpKind::Moe => list.experts(config),
    }
    list.tensors
}

/// Tensors of the MTP layers, which follow the decoder layers in numbering. Each is a MoE layer with an indexer of its own,
/// whatever the schedule, and reads the main embedding and head. They are in the checkpoint's size and are not served.
#[must_use]
pub fn mtp_tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    let hidden = config.hidden_size;
    (config.num_layers..config.num_layers + config.num_mtp_layers)
        .flat_map(|layer| {
            let mut list = LayerList::new(layer);
            list.attention(config);
            list.indexer(config);
            list.experts(config);
            list.matrix("eh_proj.weight", hidden, 2 * hidden, Precision::Model);
            for norm in ["enorm", "hnorm", "shared_head.norm"] {
                list.vector(&format!("{norm}.weight"), hidden, Precision::Model);
            }
            list.tensors
        })
        .collect()
}

struct LayerList {
    layer: usize,
    tensors: Vec<TensorSpec>,
}

impl LayerList {
    fn new(layer: usize) -> Self {
        Self { layer, tensors: Vec::new() }
    }

    fn push(&mut self, name: &str, rows: usize, cols: Option<usize>, precision: Precision) {
        let name = format!("model.layers.{}.{name}", self.layer);
        self.tensors.push(TensorSpec { name, rows, cols, precision });
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize, precision: Precision) {
        self.push(name, rows, Some(cols), precision);
    }

    fn vector(&mut self, name: &str, length: usize, precision: Precision) {
        self.push(name, length, None, precision);
    }

    /// A weight that FP8 checkpoints quantise.
    fn linear(&mut self, module: &str, rows: usize, cols: usize) {
        self.matrix(&format!("{module}.weight"), rows, cols, Precision::Quantisable);
    }

    fn norm(&mut self, module: &str, length: usize) {
        self.vector(&format!("{module}.weight"), length, Precision::Model);
    }

    fn attention(&mut self, config: &ModelConfig) {
        let ModelConfig { hidden_size: hidden, num_heads: heads, .. } = *config;
        let ModelConfig { q_lora_rank: query, kv_lora_rank: latent, .. } = *config;
        let (nope, rope, value) =
            (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim);
        self.norm("input_layernorm", hidden);
        self.norm("post_attention_layernorm", hidden);
        self.linear("self_attn.q_a_proj", query, hidden);
        self.norm("self_attn.q_a_layernorm", query);
        self.linear("self_attn.q_b_proj", heads * (nope + rope), query);
        self.linear("self_attn.kv_a_proj_with_mqa", latent + rope, hidden);
        self.norm("self_attn.kv_a_layernorm", latent);
        self.linear("self_attn.kv_b_proj", heads * (nope + value), latent);
        self.linear("self_attn.o_proj", hidden, heads * value);
    }

    fn indexer(&mut self, config: &ModelConfig) {
        let (heads, width) = (config.index_heads, config.index_head_dim);
        self.linear("self_attn.indexer.wq_b", heads * width, config.q_lora_rank);
        self.linear("self_attn.indexer.wk", width, config.hidden_size);
        self.norm("self_attn.indexer.k_norm", width);
        self.vector("self_attn.indexer.k_norm.bias", width, Precision::Model);
        let weights = "self_attn.indexer.weights_proj.weight";
        self.matrix(weights, heads, config.hidden_size, Precision::Model);
    }

    fn experts(&mut self, config: &ModelConfig) {
        let ModelConfig { hidden_size: hidden, moe_intermediate_size: width, .. } = *config;
        let experts = config.num_routed_experts;
        self.matrix("mlp.gate.weight", experts, hidden, Precision::Model);
        self.vector("mlp.gate.e_score_correction_bias", experts, Precision::Single);
        for expert in 0..experts {
            self.gated_mlp(&format!("mlp.experts.{expert}"), hidden, width);
        }
        if config.num_shared_experts > 0 {
            self.gated_mlp("mlp.shared_experts", hidden, config.num_shared_experts * width);
        }
    }

    fn gated_mlp(&mut self, module: &str, hidden: usize, width: usize) {
        self.linear(&format!("{module}.gate_proj"), width, hidden);
        self.linear(&format!("{module}.up_proj"), width, hidden);
        self.linear(&format!("{module}.down_proj"), hidden, width);
    }
}
