//! What one token occupies in the KV caches.

use crate::config::ModelConfig;
use crate::contract::HiddenDtype;

/// Latent values that share a scale in the FP8 layout.
const LATENTS_PER_SCALE: usize = 128;
const SCALE_BYTES: usize = 4;

/// How cached values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// Latents, rotated keys and index keys in one type.
    Plain(HiddenDtype),
    /// Latents as e4m3 with an F32 scale for every 128, rotated keys in bf16, index keys as e4m3 with one F32 scale.
    Fp8,
}

impl KvLayout {
    /// Bytes of a token's latent and rotated key; every layer has them.
    #[must_use]
    pub fn latent_bytes(self, config: &ModelConfig) -> u64 {
        let (latent, rope) = (config.kv_lora_rank, config.qk_rope_head_dim);
        let bytes = match self {
            Self::Plain(dtype) => (latent + rope) * dtype.size(),
            Self::Fp8 => {
                let scales = latent.div_ceil(LATENTS_PER_SCALE) * SCALE_BYTES;
                latent + scales + rope * HiddenDtype::Bf16.size()
            }
        };
        bytes as u64
    }

    /// Bytes of a token's index key; only full layers have one.
    #[must_use]
    pub fn index_key_bytes(self, config: &ModelConfig) -> u64 {
        let bytes = match self {
            Self::Plain(dtype) => config.index_head_dim * dtype.size(),
            Self::Fp8 => config.index_head_dim + SCALE_BYTES,
        };
        bytes as u64
    }

    /// Bytes that a token occupies on a layer.
    ///
    /// # Panics
    /// When the model has no such layer.
    #[must_use]
    pub fn layer_bytes(self, config: &ModelConfig, layer: usize) -> u64 {
        let index_key =
            if config.schedule.is_full(layer) { self.index_key_bytes(config) } else { 0 };
        self.latent_bytes(config) + index_key
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_models::{deepseek_v32, glm_5_1, glm_5_3};

    fn per_token(layout: KvLayout, config: &ModelConfig) -> u64 {
        (0..config.num_layers).map(|layer| layout.layer_bytes(config, layer)).sum()
    }

    #[test]
    fn a_token_of_a_whole_model_occupies_what_the_layouts_say() {
        let bf16 = KvLayout::Plain(HiddenDtype::Bf16);
        assert_eq!(per_token(KvLayout::Fp8, &glm_5_3()), 53_940);
        assert_eq!(per_token(bf16, &glm_5_3()), 95_232);
        assert_eq!(per_token(KvLayout::Plain(HiddenDtype::F32), &glm_5_3()), 2 * 95_232);
        assert_eq!(per_token(KvLayout::Fp8, &glm_5_1()), 61_464);
        assert_eq!(per_token(KvLayout::Fp8, &deepseek_v32()), 48_068);
    }

    #[test]
    fn only_full_layers_cache_index_keys() {
        let bf16 = KvLayout::Plain(HiddenDtype::Bf16);
        assert_eq!(bf16.layer_bytes(&glm_5_3(), 2), 1152 + 256);
        assert_eq!(bf16.layer_bytes(&glm_5_3(), 3), 1152);
    }
}
