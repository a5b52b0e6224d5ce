//! The model's config, normalised: one form whatever the file's spelling.

mod error;
mod fields;
mod parse;
mod rope;

use std::path::Path;

pub use error::ConfigError;
pub(crate) use fields::Fields;

use crate::contract::HiddenDtype;
use crate::schedule::IndexSchedule;

/// Model families that baton serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// `GlmMoeDsaForCausalLM`.
    GlmMoeDsa,
    /// `DeepseekV32ForCausalLM`.
    DeepseekV32,
}

/// Feed-forward part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpKind {
    /// One gated MLP.
    Dense,
    /// Routed experts and shared ones.
    Moe,
}

/// How pairs of a rotated vector are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// `(v[2i], v[2i + 1])`.
    Interleaved,
    /// `(v[i], v[i + n / 2])`.
    HalfSplit,
}

/// Rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeParameters {
    /// Base.
    pub theta: f64,
    /// Context extension, when the model has one.
    pub yarn: Option<Yarn>,
}

/// YaRN context extension.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// Extension factor.
    pub factor: f64,
    /// Context before the extension.
    pub original_max_positions: usize,
    /// Rotations above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by `factor`.
    pub beta_slow: f64,
    /// Magnitude factor of cos and sin.
    pub mscale: f64,
    /// Magnitude factor of the softmax scale.
    pub mscale_all_dim: f64,
    /// Explicit cos/sin multiplier, when the file gives one.
    pub attention_factor: Option<f64>,
}

/// Block sizes of an FP8 checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Block {
    /// Rows a scale covers.
    pub rows: usize,
    /// Columns a scale covers.
    pub cols: usize,
}

/// Type of a model's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightDtype {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
    /// 2 bytes.
    F16,
}

impl WeightDtype {
    /// Bytes per value.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The residual stream of a model with such weights. Half-precision activations overflow where bf16 ones do not, so
    /// those of half-precision weights are f32, which holds both.
    #[must_use]
    pub fn activations(self) -> HiddenDtype {
        match self {
            Self::Bf16 => HiddenDtype::Bf16,
            Self::F32 | Self::F16 => HiddenDtype::F32,
        }
    }
}

/// A model, as its config describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Family.
    pub architecture: Architecture,
    /// Rows of the embedding table and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers, without the MTP layer.
    pub num_layers: usize,
    /// MTP layers stored after the decoder layers; they are not served.
    pub num_mtp_layers: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Width of the query latent.
    pub q_lora_rank: usize,
    /// Width of the key-value latent.
    pub kv_lora_rank: usize,
    /// Unrotated width of a query or key head.
    pub qk_nope_head_dim: usize,
    /// Rotated width.
    pub qk_rope_head_dim: usize,
    /// Width of a value head.
    pub v_head_dim: usize,
    /// Width of a dense MLP.
    pub intermediate_size: usize,
    /// Width of one expert.
    pub moe_intermediate_size: usize,
    /// Routed experts per MoE layer.
    pub num_routed_experts: usize,
    /// Routed experts a token uses.
    pub experts_per_token: usize,
    /// Shared experts; they are stored as one MLP of that many times the expert width.
    pub num_shared_experts: usize,
    /// One per layer.
    pub mlp_kinds: Vec<MlpKind>,
    /// Router groups.
    pub num_groups: usize,
    /// Groups a token may use.
    pub topk_groups: usize,
    /// Divide the chosen router scores by their sum.
    pub normalise_topk: bool,
    /// Factor on the router weights.
    pub routed_scaling_factor: f64,
    /// Index heads.
    pub index_heads: usize,
    /// Width of one.
    pub index_head_dim: usize,
    /// Positions a row may attend to.
    pub index_topk: usize,
    /// Pair layout of the main attention.
    pub rope_layout: RopeLayout,
    /// Pair layout of the indexer.
    pub indexer_rope_layout: RopeLayout,
    /// Rotary embedding, of attention and indexer alike.
    pub rope: RopeParameters,
    /// Longest context.
    pub max_positions: usize,
    /// Epsilon of the RMS norms.
    pub rms_norm_eps: f64,
    /// Epsilon of the two latent norms; `rms_norm_eps` unless overridden to compare with an implementation that fixes it.
    pub latent_norm_eps: f64,
    /// Ids that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Type of the weights that are not quantised, from `dtype` / `torch_dtype`.
    pub dtype: WeightDtype,
    /// FP8 block sizes, when the config announces FP8. Whether a tensor is FP8 is decided by its header, not by this.
    pub fp8: Option<Fp8Block>,
    /// Which layers run their indexer.
    pub schedule: IndexSchedule,
}

impl ModelConfig {
    /// Reads a config from its JSON text.
    ///
    /// # Errors
    /// When a field is missing, cannot be used, or contradicts another one.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        parse::parse(text)
    }

    /// Reads `config.json` of a model directory, or the given file.
    ///
    /// # Errors
    /// As [`ModelConfig::from_json`], and when the file cannot be read.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let text =
            std::fs::read_to_string(&path).map_err(|source| ConfigError::Read { path, source })?;
        Self::from_json(&text)
    }

    /// The same model with another epsilon for the two latent norms. `None` changes nothing.
    #[must_use]
    pub fn with_latent_norm_eps(mut self, eps: Option<f64>) -> Self {
        self.latent_norm_eps = eps.unwrap_or(self.latent_norm_eps);
        self
    }

    /// Width of a query or key head.
    #[must_use]
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Whether the layer has routed experts.
    ///
    /// # Panics
    /// When there is no such layer.
    #[must_use]
    pub fn is_moe(&self, layer: usize) -> bool {
        self.mlp_kinds[layer] == MlpKind::Moe
    }

    /// Hex digest of everything that decides an answer. Two files that spell the same model differently have the same
    /// one; fields that no computation reads do not count.
    #[must_use]
    pub fn digest(&self) -> String {
        // `Debug` of the normalised form names every field and prints floats exactly.
        let canonical = format!("{self:?}");
        blake3::hash(canonical.as_bytes()).to_hex()[..32].to_owned()
    }
}
