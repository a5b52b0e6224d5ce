//! Why a verification could not be made.

use std::path::PathBuf;

use thiserror::Error;

/// A verification that ended without a verdict.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// The model's config.
    #[error(transparent)]
    Config(#[from] baton_plan::ConfigError),
    /// No contract can be made for the split.
    #[error(transparent)]
    Contract(#[from] baton_plan::ContractError),
    /// The split.
    #[error(transparent)]
    Partition(#[from] baton_plan::PartitionError),
    /// The checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] baton_model::CheckpointError),
    /// A slice could not be loaded or run.
    #[error(transparent)]
    Slice(#[from] baton_model::SliceError),
    /// The device.
    #[error(transparent)]
    Kernel(#[from] baton_kernels::KernelError),
    /// A GPU was asked of a build that has none.
    #[error("this binary was built without the feature `cuda`")]
    NoCuda,
    /// A hand-off was refused.
    #[error("stage {stage}: {reason}")]
    HandOff {
        /// The receiving stage.
        stage: usize,
        /// Why.
        reason: String,
    },
    /// A file of the model or of the user.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Text that is too short to show anything.
    #[error(
        "the text has {found} tokens, expected at least {expected}: wrong index rows show only past index_topk"
    )]
    ShortText {
        /// Tokens there are.
        found: usize,
        /// Tokens wanted.
        expected: usize,
    },
    /// A server did not answer as OpenAI's API has it.
    #[error("{url}: {reason}")]
    Server {
        /// The server.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// The servers cannot be compared.
    #[error("the servers differ before any comparison: {0}")]
    Incomparable(String),
}
