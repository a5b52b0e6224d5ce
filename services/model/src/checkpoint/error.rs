//! Why a checkpoint cannot be served.

use std::path::PathBuf;

use safetensors::Dtype;
use thiserror::Error;

/// A checkpoint that baton refuses.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// Neither an index nor a single file.
    #[error("{dir} has neither model.safetensors.index.json nor model.safetensors")]
    NoWeights {
        /// The directory.
        dir: PathBuf,
    },
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file's header or index does not parse.
    #[error("{path} is not a sound checkpoint file: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Tensors that the slice needs are not there.
    #[error("{count} tensors are missing: {}", listed(.names, *.count))]
    Missing {
        /// The first few.
        names: Vec<String>,
        /// How many there are.
        count: usize,
    },
    /// Tensors that no part of the model uses.
    #[error("{count} tensors are not part of the model: {}", listed(.names, *.count))]
    Unexpected {
        /// The first few.
        names: Vec<String>,
        /// How many there are.
        count: usize,
    },
    /// A tensor has another shape than the config gives it.
    #[error("{name} has shape {found:?}, expected {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape that the config gives it.
        expected: Vec<usize>,
    },
    /// FP8 without blocks to scale by.
    #[error(
        "{name} is stored as FP8, but config.json names no quantization_config.weight_block_size"
    )]
    NoBlocks {
        /// The tensor.
        name: String,
    },
    /// A tensor is stored as something that is not served.
    #[error("{name} is stored as {found}, expected F32, BF16, F16 or F8_E4M3 with F32 scales")]
    Dtype {
        /// The tensor.
        name: String,
        /// Its type.
        found: String,
    },
}

impl CheckpointError {
    pub(super) fn unserved(name: &str, found: Dtype) -> Self {
        Self::Dtype { name: name.to_owned(), found: format!("{found:?}") }
    }
}

fn listed(names: &[String], count: usize) -> String {
    let more = count - names.len().min(count);
    let list = names.join(", ");
    if more == 0 { list } else { format!("{list} and {more} more") }
}
