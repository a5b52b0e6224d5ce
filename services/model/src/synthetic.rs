//! Checkpoints of random weights, for measurements of models whose weights are not at hand.
//!
//! The same config and seed give the same bytes on every machine.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use baton_plan::config::ConfigError;
use baton_plan::tensors::{Precision, TensorSpec, slice_tensors};
use baton_plan::{ModelConfig, WeightDtype};
use half::{bf16, f16};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError};
use thiserror::Error;

/// A checkpoint that cannot be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SyntheticError {
    /// The config is not one of a model.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Random FP8 codes would need scales of their own.
    #[error("random weights: expected a config without quantisation, found FP8 blocks")]
    Quantised,
    /// A file cannot be written.
    #[error("{path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The weights' file cannot be written.
    #[error("{path}: {source}")]
    Weights {
        /// The file.
        path: PathBuf,
        /// Why.
        source: SafeTensorError,
    },
}

/// Writes `config.json` and `model.safetensors` with random weights to `dir`, which is made when absent.
///
/// Matrices are scaled so that a row of unit variance keeps it, norms lie around 1 and biases around 0.
///
/// # Errors
/// When the config is refused or a file cannot be written.
pub fn write_checkpoint(config: &str, seed: u64, dir: &Path) -> Result<(), SyntheticError> {
    let parsed = ModelConfig::from_json(config)?;
    if parsed.fp8.is_some() {
        return Err(SyntheticError::Quantised);
    }
    let written = |path: &Path, result: io::Result<()>| {
        result.map_err(|source| SyntheticError::Write { path: path.to_owned(), source })
    };
    written(dir, std::fs::create_dir_all(dir))?;
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> =
        slice_tensors(&parsed, 0..parsed.num_layers)
            .iter()
            .map(|spec| {
                let dtype = match parsed.dtype {
                    _ if spec.precision == Precision::Single => Dtype::F32,
                    WeightDtype::F32 => Dtype::F32,
                    WeightDtype::Bf16 => Dtype::BF16,
                    WeightDtype::F16 => Dtype::F16,
                };
                let bytes = values(spec, &mut random)
                    .flat_map(|v| match dtype {
                        Dtype::F32 => v.to_le_bytes().to_vec(),
                        Dtype::F16 => f16::from_f32(v).to_le_bytes().to_vec(),
                        _ => bf16::from_f32(v).to_le_bytes().to_vec(),
                    })
                    .collect();
                (spec.name.clone(), (dtype, spec.shape(), bytes))
            })
            .collect();
    let weights = dir.join("model.safetensors");
    let failed = |source| SyntheticError::Weights { path: weights.clone(), source };
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| {
            Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?))
        })
        .collect::<Result<Vec<_>, SafeTensorError>>()
        .map_err(failed)?;
    safetensors::serialize_to_file(views, None, &weights).map_err(failed)?;
    // Written last: a directory with a config is a whole checkpoint.
    let path = dir.join("config.json");
    written(&path, std::fs::write(&path, config))
}

/// One tensor's values.
fn values<'a>(spec: &TensorSpec, random: &'a mut ChaCha8Rng) -> impl Iterator<Item = f32> + 'a {
    let (middle, reach) = match spec.cols {
        // Uniform values in +-sqrt(3) have unit variance.
        Some(_) if spec.name == "model.embed_tokens.weight" => (0.0, 3.0_f32.sqrt()),
        Some(cols) => (0.0, (3.0 / cols as f32).sqrt()),
        None if spec.name.ends_with("norm.weight") => (1.0, 0.1),
        None => (0.0, 0.1),
    };
    (0..spec.elements()).map(move |_| middle + reach * random.random_range(-1.0..1.0_f32))
}
