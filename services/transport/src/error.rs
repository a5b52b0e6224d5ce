//! Hand-offs that must not be used.

use thiserror::Error;

/// Every message names the stage and the step; those about the carry also the layer that needs it and the layer it should
/// come from.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandOffError {
    /// The frame belongs to another wiring.
    #[error(
        "stage {stage}, step {step_id}: hand-off of epoch {found}, the pipeline is in epoch {expected}"
    )]
    WrongEpoch {
        /// Receiving stage.
        stage: usize,
        /// Step being run.
        step_id: u64,
        /// Epoch of the frame.
        found: u64,
        /// Epoch of the wiring.
        expected: u64,
    },
    /// The frame belongs to another step.
    #[error("stage {stage}, step {step_id}: hand-off of step {found} arrived instead")]
    WrongStep {
        /// Receiving stage.
        stage: usize,
        /// Step being run.
        step_id: u64,
        /// Step of the frame.
        found: u64,
    },
    /// Another number of rows than the step has.
    #[error("stage {stage}, step {step_id}: hand-off has {found} rows, the step has {expected}")]
    RowCount {
        /// Receiving stage.
        stage: usize,
        /// Step being run.
        step_id: u64,
        /// Rows of the frame.
        found: usize,
        /// Rows of the step.
        expected: usize,
    },
    /// More rows than agreed.
    #[error("stage {stage}, step {step_id}: {rows} rows, the contract allows {capacity}")]
    OverCapacity {
        /// Receiving stage.
        stage: usize,
        /// Step being run.
        step_id: u64,
        /// Rows of the step.
        rows: usize,
        /// Rows allowed.
        capacity: usize,
    },
    /// A tensor has another size than its shape and the contract's dtype give.
    #[error(
        "stage {stage}, step {step_id}: {tensor} has {found} bytes, expected {expected} ({dtype})"
    )]
    TensorSize {
        /// Receiving stage.
        stage: usize,
        /// Step being run.
        step_id: u64,
        /// Which tensor.
        tensor: &'static str,
        /// Bytes that came.
        found: usize,
        /// Bytes expected.
        expected: usize,
        /// Expected shape and type.
        dtype: String,
    },
    /// The slice starts on a shared layer and no rows came.
    #[error(
        "stage {stage}, step {step_id}: layer {layer} reuses the index rows of layer {source_layer}, and the hand-off \
         brought none"
    )]
    MissingCarry {
        /// Receiving stage.
        stage: usize,
        /// Step being run.
        step_id: u64,
        /// First layer of the stage.
        layer: usize,
        /// Layer whose rows it needs.
        source_layer: usize,
    },
    /// The slice starts on a full layer and rows came.
    #[error(
        "stage {stage}, step {step_id}: layer {layer} chooses for itself, and the hand-off brought index rows of layer \
         {source_layer}"
    )]
    UnexpectedCarry {
        /// Receiving stage.
        stage: usize,
        /// Step being run.
        step_id: u64,
        /// First layer of the stage.
        layer: usize,
        /// Layer whose rows came.
        source_layer: usize,
    },
    /// The rows were computed in another step or epoch.
    #[error(
        "stage {stage}, step {step_id} of epoch {epoch}: layer {layer} needs the index rows of layer {source_layer} of \
         this step, the hand-off brought those of step {found_step} of epoch {found_epoch}"
    )]
    StaleCarry {
        /// Receiving stage.
        stage: usize,
        /// Step being run.
        step_id: u64,
        /// Epoch of the wiring.
        epoch: u64,
        /// First layer of the stage.
        layer: usize,
        /// Layer whose rows it needs.
        source_layer: usize,
        /// Step of the rows.
        found_step: u64,
        /// Epoch of the rows.
        found_epoch: u64,
    },
    /// The rows come from another layer.
    #[error(
        "stage {stage}, step {step_id}: layer {layer} needs the index rows of layer {source_layer}, the hand-off brought \
         those of layer {found}"
    )]
    WrongCarrySource {
        /// Receiving stage.
        stage: usize,
        /// Step being run.
        step_id: u64,
        /// First layer of the stage.
        layer: usize,
        /// Layer whose rows it needs.
        source_layer: usize,
        /// Layer whose rows came.
        found: usize,
    },
    /// Another number of rows than the step has long ones.
    #[error(
        "stage {stage}, step {step_id}: layer {layer} needs {expected} index entries of layer {source_layer}, the hand-off \
         brought {found}"
    )]
    CarrySize {
        /// Receiving stage.
        stage: usize,
        /// Step being run.
        step_id: u64,
        /// First layer of the stage.
        layer: usize,
        /// Layer whose rows it needs.
        source_layer: usize,
        /// Entries that came.
        found: usize,
        /// Entries expected: long rows times top-k.
        expected: usize,
    },
    /// An entry is not a position of its row's context, or out of order.
    #[error(
        "stage {stage}, step {step_id}: layer {layer}, index row of layer {source_layer} for position {position}: entry \
         {entry} is {value}, expected ascending positions from 0 to {position}"
    )]
    CarryEntry {
        /// Receiving stage.
        stage: usize,
        /// Step being run.
        step_id: u64,
        /// First layer of the stage.
        layer: usize,
        /// Layer whose rows these are.
        source_layer: usize,
        /// Position of the row.
        position: u32,
        /// Which entry.
        entry: usize,
        /// What it holds.
        value: i32,
    },
}

impl HandOffError {
    /// A stable word for the kind of error.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::WrongEpoch { .. } => "wrong-epoch",
            Self::WrongStep { .. } => "wrong-step",
            Self::RowCount { .. } => "row-count",
            Self::OverCapacity { .. } => "over-capacity",
            Self::TensorSize { .. } => "tensor-size",
            Self::MissingCarry { .. } => "missing-carry",
            Self::UnexpectedCarry { .. } => "unexpected-carry",
            Self::StaleCarry { .. } => "stale-carry",
            Self::WrongCarrySource { .. } => "wrong-carry-source",
            Self::CarrySize { .. } => "carry-size",
            Self::CarryEntry { .. } => "carry-entry",
        }
    }
}
