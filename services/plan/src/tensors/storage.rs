//! What a checkpoint stores its values as.

use super::{Precision, TensorSpec};
use crate::config::{Fp8Block, ModelConfig, WeightDtype};

const SINGLE_BYTES: u64 = 4;

/// The types of a checkpoint's values, as far as its config tells. The headers of its files have the last word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Storage {
    /// Type of the values that are not quantised.
    pub dtype: WeightDtype,
    /// Blocks of the quantised ones: one byte a value and one F32 scale a block.
    pub fp8: Option<Fp8Block>,
}

impl Storage {
    /// What the config announces.
    #[must_use]
    pub fn of(config: &ModelConfig) -> Self {
        Self { dtype: config.dtype, fp8: config.fp8 }
    }

    pub(super) fn bytes(self, tensor: &TensorSpec) -> u64 {
        match (tensor.precision, self.scales(tensor)) {
            (_, Some(scales)) => tensor.elements() + scales.elements() * SINGLE_BYTES,
            (Precision::Single, None) => tensor.elements() * SINGLE_BYTES,
            (Precision::Quantisable | Precision::Model, None) => {
                tensor.elements() * self.dtype.size() as u64
            }
        }
    }

    pub(super) fn scales(self, tensor: &TensorSpec) -> Option<TensorSpec> {
        let (Precision::Quantisable, Some(block), Some(cols)) =
            (tensor.precision, self.fp8, tensor.cols)
        else {
            return None;
        };
        Some(TensorSpec {
            name: format!("{}_scale_inv", tensor.name),
            // A block that the edge cuts short has a scale too.
            rows: tensor.rows.div_ceil(block.rows),
            cols: Some(cols.div_ceil(block.cols)),
            precision: Precision::Single,
        })
    }
}
