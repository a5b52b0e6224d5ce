//! What a layer costs in time and memory.

use std::ops::Range;

use crate::config::{MlpKind, ModelConfig};
use crate::kv::KvLayout;
use crate::tensors::{
    Storage, first_stage_tensors, last_stage_tensors, layer_tensors, total_bytes,
};

/// Context for which the parts of a layer are weighed against each other when nothing else is said. Longer ones make full
/// layers dearer, since the indexer scores every earlier token.
const TYPICAL_CONTEXT: usize = 16_384;

/// What to balance for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BalanceOptions {
    /// Stages to cut into.
    pub stages: usize,
    /// Bytes each stage may use for weights and KV: none, one limit for all, or one per stage.
    pub memory: Vec<u64>,
    /// How the stages keep their weights.
    pub storage: Storage,
    /// How they keep their KV.
    pub kv_layout: KvLayout,
    /// Tokens whose KV each stage must have room for beside its weights.
    pub kv_tokens: usize,
    /// Context at which the time of a layer is counted.
    pub context: usize,
}

impl BalanceOptions {
    /// Without memory limits, weights as the config announces them, KV in the config's type, and room for one sequence of
    /// 16,384 tokens or the longest that the model takes.
    #[must_use]
    pub fn new(config: &ModelConfig, stages: usize) -> Self {
        let context = config.max_positions.min(TYPICAL_CONTEXT);
        Self {
            stages,
            memory: Vec::new(),
            storage: Storage::of(config),
            kv_layout: KvLayout::Plain(config.dtype.activations()),
            kv_tokens: context,
            context,
        }
    }
}

/// Multiply-adds of one decoded token on one layer, by part.
///
/// They stand for time in both regimes: in a large prefill arithmetic is what takes time, and when few tokens are decoded it
/// is the reading of weights, of which each costs one multiply-add per token that uses it. For GLM-5.3 at 16,384 tokens a
/// shared MoE layer costs 649 million, an indexer another 76 million, a dense layer in place of MoE 115 million less, the head
/// 952 million and the embedding next to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerCost {
    /// Projections, and attention over the chosen positions.
    pub attention: u64,
    /// Projections and scores of the indexer; 0 on shared layers.
    pub indexer: u64,
    /// Dense MLP, or router, chosen experts and shared experts.
    pub mlp: u64,
}

impl LayerCost {
    /// All parts.
    #[must_use]
    pub fn total(self) -> u64 {
        self.attention + self.indexer + self.mlp
    }
}

/// Cost of a layer at the given context.
///
/// # Panics
/// When the model has no such layer.
#[must_use]
pub fn layer_cost(config: &ModelConfig, layer: usize, context: usize) -> LayerCost {
    let product = |factors: &[usize]| factors.iter().map(|&factor| factor as u64).product::<u64>();
    let c = config;
    let latent_key = c.kv_lora_rank + c.qk_rope_head_dim;
    let chosen = context.min(c.index_topk);
    let attention = product(&[c.q_lora_rank, c.hidden_size])
        + product(&[c.num_heads, c.qk_nope_head_dim + c.qk_rope_head_dim, c.q_lora_rank])
        + product(&[latent_key, c.hidden_size])
        // The key-value expansion, applied to queries and to the weighted latent.
        + product(&[c.num_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank])
        + product(&[c.hidden_size, c.num_heads, c.v_head_dim])
        + product(&[c.num_heads, chosen, latent_key + c.kv_lora_rank]);
    let indexer = if c.schedule.is_full(layer) {
        product(&[c.index_heads, c.index_head_dim, c.q_lora_rank])
            + product(&[c.index_head_dim + c.index_heads, c.hidden_size])
            + product(&[context, c.index_heads, c.index_head_dim])
    } else {
        0
    };
    let mlp = match c.mlp_kinds[layer] {
        MlpKind::Dense => product(&[3, c.hidden_size, c.intermediate_size]),
        MlpKind::Moe => {
            let experts = c.experts_per_token + c.num_shared_experts;
            product(&[experts, 3, c.hidden_size, c.moe_intermediate_size])
                + product(&[c.num_routed_experts, c.hidden_size])
        }
    };
    LayerCost { attention, indexer, mlp }
}

/// Sums over slices; prefix sums make each one a subtraction.
#[derive(Clone, Debug)]
pub(super) struct Loads {
    time: Vec<u64>,
    memory: Vec<u64>,
}

impl Loads {
    pub(super) fn new(config: &ModelConfig, options: &BalanceOptions) -> Self {
        let last = config.num_layers - 1;
        let kv_tokens = options.kv_tokens as u64;
        let (mut time, mut memory) = (Vec::new(), Vec::new());
        for layer in 0..config.num_layers {
            let mut tensors = layer_tensors(config, layer);
            let mut cost = layer_cost(config, layer, options.context).total();
            if layer == 0 {
                tensors.extend(first_stage_tensors(config));
                cost += config.hidden_size as u64;
            }
            if layer == last {
                tensors.extend(last_stage_tensors(config));
                cost += (config.vocab_size * config.hidden_size) as u64;
            }
            time.push(cost);
            memory.push(
                total_bytes(&tensors, options.storage)
                    + kv_tokens * options.kv_layout.layer_bytes(config, layer),
            );
        }
        Self::from_layers(&time, &memory)
    }

    pub(super) fn from_layers(time: &[u64], memory: &[u64]) -> Self {
        let sums = |values: &[u64]| {
            let running = values.iter().scan(0, |sum: &mut u64, value| {
                *sum += value;
                Some(*sum)
            });
            std::iter::once(0).chain(running).collect()
        };
        Self { time: sums(time), memory: sums(memory) }
    }

    pub(super) fn layers(&self) -> usize {
        self.time.len() - 1
    }

    pub(super) fn time(&self, slice: Range<usize>) -> u64 {
        self.time[slice.end] - self.time[slice.start]
    }

    pub(super) fn memory(&self, slice: Range<usize>) -> u64 {
        self.memory[slice.end] - self.memory[slice.start]
    }
}
