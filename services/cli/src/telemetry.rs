//! What the command line says of logs, traces and metrics.

use std::ffi::OsString;

use baton_telemetry::otlp::Protocol;
use baton_telemetry::{LogConfig, LogFormat, OtlpConfig, TraceConfig, Traces};
use clap::ValueEnum as _;

use crate::args::{LogFormatArg, OtlpProtocol, TelemetryArgs};

/// What is logged when nothing else is said. The exporters would report every failed export: `Outage` in
/// baton-telemetry says it once.
const FILTER: &str = "info,opentelemetry=off,opentelemetry_sdk=off,opentelemetry-otlp=off";

impl TelemetryArgs {
    /// Sets log lines up for this process.
    pub(crate) fn install_logs(&self) -> anyhow::Result<()> {
        let format = self.log_format.map(|format| match format {
            LogFormatArg::Text => LogFormat::Text,
            LogFormatArg::Json => LogFormat::Json,
        });
        Ok(LogConfig::from_env(FILTER)?.with_format(format).install()?)
    }

    /// Where traces and metrics go.
    pub(crate) fn otlp(&self, service: &'static str) -> OtlpConfig {
        let protocol = self.otlp_protocol.map(|protocol| match protocol {
            OtlpProtocol::Grpc => Protocol::Grpc,
            OtlpProtocol::Http => Protocol::Http,
        });
        OtlpConfig { endpoint: self.otlp_endpoint.clone(), protocol, service }
    }

    /// Spans of this process. Call it within the runtime.
    pub(crate) fn traces(&self, service: &'static str) -> anyhow::Result<Traces> {
        let config = TraceConfig { ratio: self.trace_ratio, decode_every: self.trace_decode_every };
        Ok(Traces::new(config, &self.otlp(service))?)
    }

    /// The same for a stage process that this one starts. It follows the spans that reach it, so it needs no ratio.
    pub(crate) fn forward(&self) -> Vec<OsString> {
        let mut arguments = Vec::new();
        let mut option = |name: &str, value: Option<OsString>| {
            arguments.extend(value.map(|value| [name.into(), value]).into_iter().flatten());
        };
        let name = |value: clap::builder::PossibleValue| value.get_name().into();
        let format = self.log_format.and_then(|format| format.to_possible_value());
        option("--log-format", format.map(name));
        option("--otlp-endpoint", self.otlp_endpoint.as_ref().map(Into::into));
        let protocol = self.otlp_protocol.and_then(|protocol| protocol.to_possible_value());
        option("--otlp-protocol", protocol.map(name));
        arguments
    }
}

/// Sends what is queued, for a moment at most.
pub(crate) async fn farewell(traces: Traces, metrics: baton_telemetry::Metrics) {
    // It only fails when the process ends anyway.
    let _ = tokio::task::spawn_blocking(move || {
        traces.shutdown();
        metrics.shutdown();
    })
    .await;
}
