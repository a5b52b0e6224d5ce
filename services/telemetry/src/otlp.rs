//! Whether and how traces and metrics go to an OpenTelemetry collector.
//!
//! The standard variables say it (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_PROTOCOL`, `OTEL_TRACES_EXPORTER`, ...);
//! the command line overrules them. Without an endpoint nothing is exported.

use std::sync::atomic::{AtomicBool, Ordering};

use opentelemetry_otlp::{ExporterBuildError, MetricExporter, SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;

use crate::TelemetryError;

/// How the collector is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// OTLP over gRPC, usually port 4317.
    Grpc,
    /// OTLP over HTTP in protobuf, usually port 4318.
    Http,
}

/// What the command line says of the export; the environment says the rest.
#[derive(Clone, Debug, Default)]
pub struct OtlpConfig {
    /// The collector's URL, without a path.
    pub endpoint: Option<String>,
    /// How it is spoken to; gRPC when neither this nor the environment says.
    pub protocol: Option<Protocol>,
    /// Name of the process in traces; `OTEL_SERVICE_NAME` overrules it.
    pub service: &'static str,
}

/// What is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    Traces,
    Metrics,
}

impl Signal {
    fn name(self) -> &'static str {
        match self {
            Self::Traces => "TRACES",
            Self::Metrics => "METRICS",
        }
    }

    fn path(self) -> &'static str {
        match self {
            Self::Traces => "v1/traces",
            Self::Metrics => "v1/metrics",
        }
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl OtlpConfig {
    /// Whether this signal is exported at all.
    pub(crate) fn exports(&self, signal: Signal) -> Result<bool, TelemetryError> {
        self.decide(signal, &variable)
    }

    fn decide(
        &self,
        signal: Signal,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<bool, TelemetryError> {
        if variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(false);
        }
        let name = format!("OTEL_{}_EXPORTER", signal.name());
        let endpoint = self.endpoint.is_some()
            || variable("OTEL_EXPORTER_OTLP_ENDPOINT").is_some()
            || variable(&format!("OTEL_EXPORTER_OTLP_{}_ENDPOINT", signal.name())).is_some();
        match variable(&name).as_deref() {
            None => Ok(endpoint),
            Some("otlp") => Ok(true),
            Some("none") => Ok(false),
            Some(other) => {
                let message = format!("{name}={other:?}, expected \"otlp\" or \"none\"");
                Err(TelemetryError::Otlp(message))
            }
        }
    }

    fn protocol(&self, signal: Signal) -> Result<Protocol, TelemetryError> {
        if let Some(protocol) = self.protocol {
            return Ok(protocol);
        }
        let names = [
            format!("OTEL_EXPORTER_OTLP_{}_PROTOCOL", signal.name()),
            "OTEL_EXPORTER_OTLP_PROTOCOL".to_owned(),
        ];
        let Some((name, value)) = names.into_iter().find_map(|n| Some((variable(&n)?, n))) else {
            return Ok(Protocol::Grpc);
        };
        let (value, name) = (name, value);
        match value.as_str() {
            "grpc" => Ok(Protocol::Grpc),
            "http/protobuf" => Ok(Protocol::Http),
            _ => Err(TelemetryError::Otlp(format!(
                "{name}={value:?}, expected \"grpc\" or \"http/protobuf\""
            ))),
        }
    }

    fn http_endpoint(&self, signal: Signal) -> Option<String> {
        let endpoint = self.endpoint.as_ref()?;
        Some(format!("{}/{}", endpoint.trim_end_matches('/'), signal.path()))
    }

    pub(crate) fn span_exporter(&self) -> Result<SpanExporter, TelemetryError> {
        let built = match self.protocol(Signal::Traces)? {
            Protocol::Grpc => {
                let builder = SpanExporter::builder().with_tonic();
                match &self.endpoint {
                    Some(endpoint) => builder.with_endpoint(endpoint).build(),
                    None => builder.build(),
                }
            }
            Protocol::Http => {
                let builder = SpanExporter::builder().with_http();
                match self.http_endpoint(Signal::Traces) {
                    Some(endpoint) => builder.with_endpoint(endpoint).build(),
                    None => builder.build(),
                }
            }
        };
        built.map_err(unusable)
    }

    pub(crate) fn metric_exporter(&self) -> Result<MetricExporter, TelemetryError> {
        let built = match self.protocol(Signal::Metrics)? {
            Protocol::Grpc => {
                let builder = MetricExporter::builder().with_tonic();
                match &self.endpoint {
                    Some(endpoint) => builder.with_endpoint(endpoint).build(),
                    None => builder.build(),
                }
            }
            Protocol::Http => {
                let builder = MetricExporter::builder().with_http();
                match self.http_endpoint(Signal::Metrics) {
                    Some(endpoint) => builder.with_endpoint(endpoint).build(),
                    None => builder.build(),
                }
            }
        };
        built.map_err(unusable)
    }

    /// Who this process is, for the collector.
    pub(crate) fn resource(&self) -> Resource {
        let mut builder = Resource::builder();
        if variable("OTEL_SERVICE_NAME").is_none() && !self.service.is_empty() {
            builder = builder.with_service_name(self.service);
        }
        builder.build()
    }
}

fn unusable(error: ExporterBuildError) -> TelemetryError {
    TelemetryError::Otlp(error.to_string())
}

/// Says once that the collector is out of reach, and once that it is back.
#[derive(Debug)]
pub(crate) struct Outage {
    what: &'static str,
    lasts: AtomicBool,
}

impl Outage {
    pub(crate) fn new(what: &'static str) -> Self {
        Self { what, lasts: AtomicBool::new(false) }
    }

    /// Takes an export's result. Never an error: the SDK would report every single one.
    pub(crate) fn note(&self, result: OTelSdkResult) -> OTelSdkResult {
        match result {
            Ok(()) if self.lasts.swap(false, Ordering::Relaxed) => {
                tracing::info!("{} are exported again", self.what);
            }
            Ok(()) => {}
            Err(error) => {
                if !self.lasts.swap(true, Ordering::Relaxed) {
                    tracing::warn!("{} cannot be exported and are dropped: {error}", self.what);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use super::*;

    fn decided(endpoint: bool, variables: &[(&str, &str)]) -> Result<bool, TelemetryError> {
        let config = OtlpConfig {
            endpoint: endpoint.then(|| "http://collector:4317".to_owned()),
            ..Default::default()
        };
        let variable = |name: &str| {
            variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned())
        };
        config.decide(Signal::Traces, &variable)
    }

    #[test]
    fn nothing_is_exported_unless_somebody_names_a_collector() {
        assert!(!decided(false, &[]).unwrap());
        assert!(decided(true, &[]).unwrap());
        assert!(decided(false, &[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317")]).unwrap());
        assert!(!decided(false, &[("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://c")]).unwrap());
        assert!(decided(false, &[("OTEL_TRACES_EXPORTER", "otlp")]).unwrap());
        assert!(!decided(true, &[("OTEL_TRACES_EXPORTER", "none")]).unwrap());
        assert!(!decided(true, &[("OTEL_SDK_DISABLED", "true")]).unwrap());
        let error = decided(true, &[("OTEL_TRACES_EXPORTER", "zipkin")]).unwrap_err();
        assert!(error.to_string().contains("zipkin"), "{error}");
    }
}
