//! Where a slice's weights come from.

use std::collections::BTreeMap;
use std::ops::Range;

use baton_kernels::{MatrixData, MatrixView};
use baton_plan::tensors::{Precision, slice_tensors};
use baton_plan::{Fp8Block, ModelConfig};

use crate::checkpoint::{Checkpoint, CheckpointError};

/// A checkpoint, or values that the backend makes up.
#[derive(Debug)]
pub(crate) enum Weights<'a> {
    Checkpoint(&'a Checkpoint),
    MadeUp(MadeUp),
}

/// Weights for measurements: stored types as the config says, values drawn by the backend.
#[derive(Debug)]
pub(crate) struct MadeUp {
    precisions: BTreeMap<String, Precision>,
    fp8: Option<Fp8Block>,
}

impl MadeUp {
    pub(crate) fn new(config: &ModelConfig, layers: Range<usize>) -> Self {
        let tensors = slice_tensors(config, layers);
        let precisions = tensors.into_iter().map(|t| (t.name, t.precision)).collect();
        Self { precisions, fp8: config.fp8 }
    }

    fn matrix(&self, name: &str, rows: usize, cols: usize) -> MatrixView<'static> {
        let quantised = self.precisions.get(name) == Some(&Precision::Quantisable);
        let blocks = self.fp8.filter(|_| quantised).map(|b| (b.rows, b.cols));
        // The same name has the same values in every run.
        let digest = blake3::hash(name.as_bytes());
        let seed = digest.as_bytes().iter().take(8).fold(0, |sum, b| sum << 8 | u64::from(*b));
        MatrixView { rows, cols, data: MatrixData::MadeUp { seed, blocks } }
    }
}

impl<'a> Weights<'a> {
    pub(crate) fn bytes_read(&self) -> u64 {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.bytes_read(),
            Self::MadeUp(_) => 0,
        }
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.has(name),
            Self::MadeUp(made_up) => made_up.precisions.contains_key(name),
        }
    }

    pub(crate) fn matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
        fp8: Option<Fp8Block>,
    ) -> Result<MatrixView<'a>, CheckpointError> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.matrix(name, rows, cols, fp8),
            Self::MadeUp(made_up) => Ok(made_up.matrix(name, rows, cols)),
        }
    }

    pub(crate) fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, CheckpointError> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.vector(name, len),
            // Norms of one; biases near nothing, which spreads the choice of experts evenly.
            Self::MadeUp(_) if name.ends_with("bias") => Ok(vec![0.0; len]),
            Self::MadeUp(_) => Ok(vec![1.0; len]),
        }
    }

    pub(crate) fn fused(
        &self,
        name: &str,
        shape: [usize; 3],
        expert: usize,
        range: Range<usize>,
    ) -> Result<MatrixView<'a>, CheckpointError> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.fused(name, shape, expert, range),
            Self::MadeUp(made_up) => Ok(made_up.matrix(
                &format!("{name}.{expert}.{}", range.start),
                range.len(),
                shape[2],
            )),
        }
    }
}
