//! What both ends of every cut must agree on.

use std::fmt;
use std::ops::Range;

use thiserror::Error;

use crate::config::ModelConfig;
use crate::partition::Partition;

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
    /// Layers that choose positions, ascending; the others reuse the choice of the nearest one before them.
    pub full_layers: Vec<usize>,
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

/// What is chosen for a pipeline beside where it is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContractOptions {
    /// Type of the residual stream.
    pub hidden_dtype: HiddenDtype,
    /// Type of index entries on the wire.
    pub index_dtype: IndexDtype,
    /// Most rows in one step.
    pub row_capacity: usize,
    /// Tokens per KV block.
    pub block_size: usize,
}

/// A contract that cannot be made.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ContractError {
    /// Positions do not fit the index type.
    #[error("u16 index entries hold positions up to 65535, the model's context is {max_positions}")]
    IndexWidth {
        /// Longest context.
        max_positions: usize,
    },
    /// Nothing can run in no rows or no tokens.
    #[error("{what} is 0, expected at least 1")]
    Zero {
        /// Which size.
        what: &'static str,
    },
}

impl Contract {
    /// The contract of every stage of a partition.
    ///
    /// # Errors
    /// When the options cannot hold for the model.
    pub fn new(
        config: &ModelConfig,
        partition: &Partition,
        options: &ContractOptions,
    ) -> Result<Self, ContractError> {
        if options.index_dtype == IndexDtype::U16 && config.max_positions > usize::from(u16::MAX) {
            return Err(ContractError::IndexWidth { max_positions: config.max_positions });
        }
        for (what, size) in
            [("row capacity", options.row_capacity), ("block size", options.block_size)]
        {
            if size == 0 {
                return Err(ContractError::Zero { what });
            }
        }
        // A slice that starts on a shared layer needs the rows of that layer's source, however many stages back it is.
        let carry_into = |start: usize| {
            (start < config.num_layers && !config.schedule.is_full(start))
                .then(|| config.schedule.source(start))
        };
        let config_digest = config.digest();
        let stages = partition
            .slices()
            .iter()
            .enumerate()
            .map(|(stage, layers)| StageContract {
                stage,
                stages: partition.stages(),
                layers: layers.clone(),
                hidden_size: config.hidden_size,
                hidden_dtype: options.hidden_dtype,
                index_topk: config.index_topk,
                index_dtype: options.index_dtype,
                row_capacity: options.row_capacity,
                block_size: options.block_size,
                receives_from_layer: carry_into(layers.start),
                sends_from_layer: carry_into(layers.end),
                config_digest: config_digest.clone(),
            })
            .collect();
        let full_layers =
            (0..config.num_layers).filter(|&layer| config.schedule.is_full(layer)).collect();
        Ok(Self { stages, full_layers })
    }

    /// Hex digest over every stage's contract; both ends of a cut compare it before the first step.
    #[must_use]
    pub fn digest(&self) -> String {
        blake3::hash(format!("{self:?}").as_bytes()).to_hex()[..32].to_owned()
    }
}

impl std::str::FromStr for HiddenDtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            _ => Err(format!("hidden dtype {text:?}, expected \"f32\" or \"bf16\"")),
        }
    }
}

impl std::str::FromStr for IndexDtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "i32" => Ok(Self::I32),
            "u16" => Ok(Self::U16),
            _ => Err(format!("index dtype {text:?}, expected \"i32\" or \"u16\"")),
        }
    }
}
