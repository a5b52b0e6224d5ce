//! The hand-off between two stages: its frame, its checks and the links that carry it.
//!
//! - [`handoff`]: what crosses a cut and the one way to take it in (pure).
//! - [`frame`]: its bytes (pure).
//! - [`link`]: who moves the bytes.

pub mod error;
pub mod frame;
pub mod handoff;
pub mod link;

pub use error::HandOffError;
pub use frame::{FrameError, FrameLimits};
pub use handoff::{Accepted, Carry, ExpectedStep, HandOff, SentCarry};
pub use link::{LinkError, LinkStats};
