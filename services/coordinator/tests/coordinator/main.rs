//! The coordinator against stages that speak the real protocol and misbehave.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod fake_stage;
mod running;
mod starting;
