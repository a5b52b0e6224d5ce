//! Logs, and the names of spans and their attributes, shared by every process.

pub mod logs;
pub mod names;

pub use logs::{LogConfig, LogFormat, TelemetryError};
