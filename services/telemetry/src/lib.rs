//! Logs, metrics, and the names of spans and their attributes, shared by every process.

pub mod logs;
pub mod metrics;
pub mod names;

pub use logs::{LogConfig, LogFormat, TelemetryError};
pub use metrics::{Metrics, MetricsConfig};
