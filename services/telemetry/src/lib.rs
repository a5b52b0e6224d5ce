//! Logs, metrics, traces, and the names of spans and their attributes, shared by every process.

pub mod logs;
pub mod metrics;
pub mod names;
pub mod otlp;
pub mod traces;

pub use logs::{LogConfig, LogFormat, TelemetryError};
pub use metrics::{Metrics, MetricsConfig};
pub use otlp::OtlpConfig;
pub use traces::{TraceConfig, Traces};
