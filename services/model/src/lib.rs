//! Reads a checkpoint's slice and runs it.
//!
//! [`Checkpoint`] finds and checks tensors; [`Slice`] holds the layers of one stage on a `Backend` and runs steps. The
//! arithmetic is written down in `docs/model.md`.

pub mod checkpoint;
mod layer;
pub mod observer;
pub mod slice;
pub mod step;
pub mod synthetic;
mod weights;

pub use checkpoint::{Checkpoint, CheckpointError};
pub use observer::Observer;
pub use slice::{LoadProgress, Slice, SliceError};
pub use step::{StepInput, StepOutput, StepRequest};
