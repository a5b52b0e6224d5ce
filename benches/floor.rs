//! The least a step can take: the weights it must read at the bandwidth there is, and its operations at the peak rate.

use baton_kernels::cpu::Ceiling;
use baton_plan::ModelConfig;
use baton_plan::tensors::{TensorSpec, slice_tensors};

/// Bytes and operations of one pass.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Weights read, each once.
    pub bytes: f64,
    /// Single-precision operations.
    pub flops: f64,
}

impl Work {
    /// One pass over `rows` rows that end at position `context` of each of `sequences` sequences, the head on the last row of each.
    #[must_use]
    pub fn count(config: &ModelConfig, sequences: usize, rows: usize, context: usize) -> Self {
        let (experts, chosen) = (config.num_routed_experts as f64, config.experts_per_token as f64);
        let all_rows = (sequences * rows) as f64;
        // With a random router, the experts that at least one row chooses.
        let read_share = 1.0 - (1.0 - chosen / experts).powf(all_rows);
        let (mut bytes, mut flops) = (0.0, 0.0);
        for tensor in slice_tensors(config, 0..config.num_layers) {
            let values = tensor.elements() as f64;
            let (read, times) = match kind(&tensor) {
                Kind::Embedding => (all_rows * config.hidden_size as f64 / values, 0.0),
                Kind::Expert => (read_share, all_rows * chosen / experts),
                Kind::Head => (1.0, sequences as f64),
                Kind::Other => (1.0, all_rows),
            };
            bytes += 4.0 * values * read;
            flops += 2.0 * values * times;
        }
        // What the rows look at: every earlier position in the indexer, the selected ones in attention.
        let first = context - rows;
        let (mut scored, mut attended) = (0.0, 0.0);
        for position in first..context {
            if position >= config.index_topk {
                scored += (position + 1) as f64;
            }
            attended += (position + 1).min(config.index_topk) as f64;
        }
        let full = config.schedule.full().len() as f64;
        let index = 2.0 * (config.index_heads * config.index_head_dim) as f64 * full;
        let width = 2 * config.kv_lora_rank + config.qk_rope_head_dim;
        let attention = 2.0 * (config.num_heads * width * config.num_layers) as f64;
        flops += sequences as f64 * (scored * index + attended * attention);
        Self { bytes, flops }
    }

    /// Seconds at the given rates, when reading and computing overlap.
    #[must_use]
    pub fn seconds(self, ceiling: Ceiling) -> f64 {
        (self.bytes / ceiling.read).max(self.flops / ceiling.flops)
    }
}

enum Kind {
    Embedding,
    Expert,
    Head,
    Other,
}

fn kind(tensor: &TensorSpec) -> Kind {
    match tensor.name.as_str() {
        "model.embed_tokens.weight" => Kind::Embedding,
        "lm_head.weight" => Kind::Head,
        name if name.contains(".mlp.experts.") => Kind::Expert,
        _ => Kind::Other,
    }
}
