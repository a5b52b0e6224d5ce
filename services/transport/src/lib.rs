//! The hand-off between two stages: its frame, its checks and the links that carry it.

pub mod handoff;

pub use handoff::{Accepted, Carry, ExpectedStep, HandOff, HandOffError, SentCarry};
