//! What crosses a cut in one step, and the only way to take it in.
//!
//! A [`HandOff`] is what a peer claims. [`HandOff::accept`] checks it against the contract and the step; what it returns
//! is the only value a slice runs on, and the only place a [`Carry`] can come from. There is no buffer that outlives the
//! step.

use baton_plan::StageContract;
use thiserror::Error;

/// What one stage sends the next in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandOff {
    /// The wiring it belongs to.
    pub epoch: u64,
    /// The step it belongs to.
    pub step_id: u64,
    /// Rows, padding included.
    pub rows: usize,
    /// `[rows, hidden_size]` in the contract's dtype, little-endian.
    pub hidden: Vec<u8>,
    /// The not yet added residual, same shape, from peers that send it unfolded.
    pub residual: Option<Vec<u8>>,
    /// Index rows of the rows whose context is longer than `index_topk`, when the next slice starts on a shared layer.
    pub carry: Option<SentCarry>,
}

/// Index rows as sent. They name the step they were computed in, so that rows of another step are known as such even
/// inside a frame that is otherwise right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentCarry {
    /// Epoch in which the source layer computed them.
    pub epoch: u64,
    /// Step in which it did.
    pub step_id: u64,
    /// The full layer that computed them.
    pub source_layer: usize,
    /// `[long rows, index_topk]`, each row ascending, no -1 (a long row always has `index_topk` entries).
    pub indices: Vec<i32>,
}

/// What the receiver knows of a step before its hand-off arrives, from the coordinator's metadata alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedStep {
    /// The current wiring.
    pub epoch: u64,
    /// The step to run now.
    pub step_id: u64,
    /// Position of every real row, in row order.
    pub positions: Vec<u32>,
    /// Padding rows after them.
    pub padding: usize,
}

/// A hand-off that was checked. Only [`HandOff::accept`] makes one.
#[derive(Debug)]
pub struct Accepted {
    hidden: Vec<u8>,
    residual: Option<Vec<u8>>,
    carry: Option<Carry>,
}

/// Index rows that a received hand-off of this very step brought. A slice that starts on a shared layer cannot run
/// without one, and nothing but [`HandOff::accept`] makes one.
#[derive(Debug)]
pub struct Carry {
    epoch: u64,
    step_id: u64,
    source_layer: usize,
    indices: Vec<i32>,
}

impl Carry {
    /// The full layer that computed the rows.
    #[must_use]
    pub fn source_layer(&self) -> usize {
        self.source_layer
    }

    /// The step they were computed in.
    #[must_use]
    pub fn step_id(&self) -> u64 {
        self.step_id
    }

    /// `[long rows, index_topk]`.
    #[must_use]
    pub fn indices(&self) -> &[i32] {
        &self.indices
    }

    /// The same rows, to be sent on unchanged to a stage that still depends on them.
    #[must_use]
    pub fn relay(&self) -> SentCarry {
        SentCarry {
            epoch: self.epoch,
            step_id: self.step_id,
            source_layer: self.source_layer,
            indices: self.indices.clone(),
        }
    }
}

impl Accepted {
    /// `[rows, hidden_size]` in the contract's dtype.
    #[must_use]
    pub fn hidden(&self) -> &[u8] {
        &self.hidden
    }

    /// The residual of a peer that sends it unfolded; to be added to `hidden` before the first layer.
    #[must_use]
    pub fn residual(&self) -> Option<&[u8]> {
        self.residual.as_deref()
    }

    /// The index rows, present exactly when the contract says that this stage receives them.
    #[must_use]
    pub fn carry(&self) -> Option<&Carry> {
        self.carry.as_ref()
    }
}

impl ExpectedStep {
    /// Rows of the step, padding included.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.positions.len() + self.padding
    }

    /// Rows whose context (`position + 1`) is longer than `index_topk`; only they carry indices.
    #[must_use]
    pub fn long_rows(&self, index_topk: usize) -> usize {
        self.positions.iter().filter(|&&p| p as usize >= index_topk).count()
    }
}

/// A hand-off that must not be used. Every message names the stage and the step; those about the carry also name the
/// layer that needs it and the layer it should come from.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandOffError {
    /// The slice starts on a shared layer and no rows came.
    #[error(
        "stage {stage}, step {step_id}: layer {layer} reuses the index rows of layer {source_layer}, and the hand-off brought none"
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
}

impl HandOff {
    /// Checks everything the receiver can know: epoch, step, row count, capacity, sizes, and that index rows are there
    /// exactly when `contract` says so, from the right layer, of this step, for exactly the long rows, each ascending
    /// and within its row's context.
    ///
    /// # Errors
    /// A [`HandOffError`] that names what differs. Nothing is defaulted.
    pub fn accept(
        self,
        contract: &StageContract,
        step: &ExpectedStep,
    ) -> Result<Accepted, HandOffError> {
        let _ = step;
        match (contract.receives_from_layer, self.carry) {
            (Some(source_layer), None) => Err(HandOffError::MissingCarry {
                stage: contract.stage,
                step_id: self.step_id,
                layer: contract.layers.start,
                source_layer,
            }),
            (_, carry) => Ok(Accepted {
                hidden: self.hidden,
                residual: self.residual,
                carry: carry.map(|c| Carry {
                    epoch: c.epoch,
                    step_id: c.step_id,
                    source_layer: c.source_layer,
                    indices: c.indices,
                }),
            }),
        }
    }
}
