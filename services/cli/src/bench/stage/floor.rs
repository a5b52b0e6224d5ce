//! The least time a step can take: bytes over bandwidth, or arithmetic over throughput, whichever is more.

use std::ops::Range;

use baton_plan::tensors::{Storage, layer_tensors};
use baton_plan::{KvLayout, ModelConfig};

/// FP8 matrix products per second that dense kernels reach.
const FP8_FLOPS: f64 = 1500e12;
/// bf16 matrix products per second that dense kernels reach.
const BF16_FLOPS: f64 = 790e12;

/// Counts a step's floor on some layers.
pub(super) struct Floor<'a> {
    config: &'a ModelConfig,
    layers: Range<usize>,
    /// Bytes per second.
    bandwidth: f64,
}

impl<'a> Floor<'a> {
    pub(super) fn new(config: &'a ModelConfig, layers: Range<usize>, terabytes: f64) -> Self {
        Self { config, layers, bandwidth: terabytes * 1e12 }
    }

    /// Seconds of a step of `rows` rows, each with `context` tokens before it; `sequences` of them have caches of their own.
    pub(super) fn seconds(&self, rows: usize, sequences: usize, context: usize) -> f64 {
        self.layers.clone().map(|layer| self.layer(layer, rows, sequences, context)).sum()
    }

    fn layer(&self, layer: usize, rows: usize, sequences: usize, context: usize) -> f64 {
        let config = self.config;
        let storage = Storage::of(config);
        let (mut experts, mut rest, mut expert_values, mut values) = (0, 0, 0, 0);
        for tensor in layer_tensors(config, layer) {
            if tensor.name.contains(".mlp.experts.") {
                experts += tensor.bytes(storage);
                expert_values += tensor.elements();
            } else {
                // Absorption splits this one per head, which FP8 blocks do not allow: it is read as bf16.
                let absorbed = tensor.name.contains("kv_b_proj");
                rest += if absorbed { 2 * tensor.elements() } else { tensor.bytes(storage) };
                values += if tensor.cols.is_some() { tensor.elements() } else { 0 };
            }
        }
        let (count, chosen) =
            (config.num_routed_experts.max(1) as f64, config.experts_per_token as f64);
        // Experts that at least one row chooses, when rows choose at random.
        let read = 1.0 - (1.0 - chosen / count).powi(rows as i32);
        let topk = config.index_topk.min(context) as f64;
        let latents = topk * rows as f64 * KvLayout::Fp8.latent_bytes(config) as f64;
        // Rows of one sequence share what they read.
        let latents = latents
            .min(sequences as f64 * context as f64 * KvLayout::Fp8.latent_bytes(config) as f64);
        let full = config.schedule.is_full(layer);
        let keys = if full {
            context as f64 * sequences as f64 * KvLayout::Fp8.index_key_bytes(config) as f64
        } else {
            0.0
        };
        let bytes = rest as f64 + experts as f64 * read + latents + keys;
        let rows = rows as f64;
        let scores = if full {
            context as f64 * (config.index_heads * config.index_head_dim) as f64
        } else {
            0.0
        };
        let fp8 = 2.0 * rows * (values as f64 + expert_values as f64 * chosen / count + scores);
        let latent = config.kv_lora_rank as f64;
        let heads = config.num_heads as f64;
        let bf16 = 2.0 * rows * heads * topk * (2.0 * latent + config.qk_rope_head_dim as f64);
        f64::max(bytes / self.bandwidth, fp8 / FP8_FLOPS + bf16 / BF16_FLOPS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn glm() -> ModelConfig {
        ModelConfig::from_json(include_str!("../../../../plan/src/published/glm-5.3.json")).unwrap()
    }

    #[test]
    fn a_decode_step_is_bound_by_the_experts_it_reads() {
        let config = glm();
        // Layers 31..34 share an earlier layer's rows.
        let floor = Floor::new(&config, 31..32, 4.3);
        let micros = |batch: usize| floor.seconds(batch, batch, 32_768) * 1e6;
        // 8 experts of 37.75 MB and 220.6 MB of the rest: 70 + 51 us; then 163 and 252 distinct experts.
        assert!((micros(1) - 122.0).abs() < 2.0, "{}", micros(1));
        assert!((micros(32) - 1500.0).abs() < 30.0, "{}", micros(32));
        assert!((micros(128) - 2310.0).abs() < 60.0, "{}", micros(128));
    }

    #[test]
    fn a_large_prefill_is_bound_by_arithmetic() {
        let config = glm();
        let floor = Floor::new(&config, 31..32, 4.3);
        let per_token = floor.seconds(8192, 1, 32_768) / 8192.0 * 1e6;
        assert!((0.7..1.3).contains(&per_token), "{per_token}");
    }
}
