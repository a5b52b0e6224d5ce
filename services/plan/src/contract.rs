//! What both ends of every cut must agree on.

use std::fmt;
use std::ops::Range;

/// Type of `hidden_states` on the wire. The residual stream is rounded to it after every addition, on every layer, so
/// that where the model is cut does not change its answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HiddenDtype {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
}

/// Type of an index row's entries on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexDtype {
    /// 4 bytes, any context.
    I32,
    /// 2 bytes, contexts up to 65,535 only.
    U16,
}

/// One stage's side of the agreement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageContract {
    /// Index of the stage.
    pub stage: usize,
    /// Stages in the pipeline.
    pub stages: usize,
    /// Its layers.
    pub layers: Range<usize>,
    /// Width of `hidden_states`.
    pub hidden_size: usize,
    /// Its type on the wire.
    pub hidden_dtype: HiddenDtype,
    /// Positions per index row.
    pub index_topk: usize,
    /// Their type on the wire.
    pub index_dtype: IndexDtype,
    /// Most rows in one step.
    pub row_capacity: usize,
    /// Tokens per KV block.
    pub block_size: usize,
    /// The full layer whose rows arrive with every step, when the slice starts on a shared layer.
    pub receives_from_layer: Option<usize>,
    /// The full layer whose rows leave with every step, when the next slice starts on a shared layer.
    pub sends_from_layer: Option<usize>,
    /// Digest of the config the contract was made from.
    pub config_digest: String,
}

/// The contracts of all stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contract {
    /// In stage order.
    pub stages: Vec<StageContract>,
}

impl HiddenDtype {
    /// Bytes per value.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

impl IndexDtype {
    /// Bytes per entry.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::I32 => 4,
            Self::U16 => 2,
        }
    }
}

impl StageContract {
    /// Whether this is the first stage: it embeds token ids and receives no hand-off.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.stage == 0
    }

    /// Whether this is the last stage: it samples and sends no hand-off.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.stage + 1 == self.stages
    }

    /// Bytes that a row whose context is longer than `index_topk` costs on the link to the next stage; 0 on the last.
    #[must_use]
    pub fn handoff_bytes_per_row(&self) -> usize {
        if self.is_last() {
            return 0;
        }
        let carry = self.sends_from_layer.map_or(0, |_| self.index_topk * self.index_dtype.size());
        self.hidden_size * self.hidden_dtype.size() + carry
    }
}

impl fmt::Display for HiddenDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

impl fmt::Display for IndexDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::I32 => "i32",
            Self::U16 => "u16",
        })
    }
}
