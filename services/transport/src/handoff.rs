//! What crosses a cut in one step, and the only way to take it in.
//!
//! A [`HandOff`] is what a peer claims. [`HandOff::accept`] checks it against the contract and the step; what it returns
//! is the only value a slice runs on, and the only place a [`Carry`] can come from. There is no buffer that outlives the
//! step.

use baton_plan::StageContract;

use crate::error::HandOffError;

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
        let (stage, step_id) = (contract.stage, step.step_id);
        if self.epoch != step.epoch {
            let (found, expected) = (self.epoch, step.epoch);
            return Err(HandOffError::WrongEpoch { stage, step_id, found, expected });
        }
        if self.step_id != step_id {
            return Err(HandOffError::WrongStep { stage, step_id, found: self.step_id });
        }
        let rows = step.rows();
        if rows > contract.row_capacity {
            let capacity = contract.row_capacity;
            return Err(HandOffError::OverCapacity { stage, step_id, rows, capacity });
        }
        if self.rows != rows {
            let (found, expected) = (self.rows, rows);
            return Err(HandOffError::RowCount { stage, step_id, found, expected });
        }
        let expected = rows * contract.hidden_size * contract.hidden_dtype.size();
        let tensors = [("hidden_states", Some(&self.hidden)), ("residual", self.residual.as_ref())];
        for (tensor, bytes) in tensors {
            if let Some(found) = bytes.map(Vec::len).filter(|&found| found != expected) {
                let dtype = format!("{rows} x {} {}", contract.hidden_size, contract.hidden_dtype);
                return Err(HandOffError::TensorSize {
                    stage,
                    step_id,
                    tensor,
                    found,
                    expected,
                    dtype,
                });
            }
        }
        let carry = accept_carry(self.carry, contract, step)?;
        Ok(Accepted { hidden: self.hidden, residual: self.residual, carry })
    }
}

fn accept_carry(
    sent: Option<SentCarry>,
    contract: &StageContract,
    step: &ExpectedStep,
) -> Result<Option<Carry>, HandOffError> {
    let (stage, step_id, layer) = (contract.stage, step.step_id, contract.layers.start);
    let (source_layer, sent) = match (contract.receives_from_layer, sent) {
        (None, None) => return Ok(None),
        (Some(source_layer), None) => {
            return Err(HandOffError::MissingCarry { stage, step_id, layer, source_layer });
        }
        (None, Some(sent)) => {
            let source_layer = sent.source_layer;
            return Err(HandOffError::UnexpectedCarry { stage, step_id, layer, source_layer });
        }
        (Some(source_layer), Some(sent)) => (source_layer, sent),
    };
    if (sent.epoch, sent.step_id) != (step.epoch, step_id) {
        return Err(HandOffError::StaleCarry {
            stage,
            step_id,
            epoch: step.epoch,
            layer,
            source_layer,
            found_step: sent.step_id,
            found_epoch: sent.epoch,
        });
    }
    if sent.source_layer != source_layer {
        let found = sent.source_layer;
        return Err(HandOffError::WrongCarrySource { stage, step_id, layer, source_layer, found });
    }
    let topk = contract.index_topk;
    let (found, expected) = (sent.indices.len(), step.long_rows(topk) * topk);
    if found != expected {
        return Err(HandOffError::CarrySize {
            stage,
            step_id,
            layer,
            source_layer,
            found,
            expected,
        });
    }
    let long = step.positions.iter().filter(|&&p| p as usize >= topk);
    for (&position, row) in long.zip(sent.indices.chunks_exact(topk.max(1))) {
        let mut above = -1;
        for (entry, &value) in row.iter().enumerate() {
            if value <= above || i64::from(value) > i64::from(position) {
                return Err(HandOffError::CarryEntry {
                    stage,
                    step_id,
                    layer,
                    source_layer,
                    position,
                    entry,
                    value,
                });
            }
            above = value;
        }
    }
    Ok(Some(Carry { epoch: sent.epoch, step_id, source_layer, indices: sent.indices }))
}
