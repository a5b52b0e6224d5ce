//! Metrics of a process: counted once, shown to Prometheus as text and, if wanted, sent over OTLP.
//!
//! [`catalog`] lists every metric with its meaning; `deploy/metrics.md` shows the same list. Values that change with every
//! step are plain atomics beside the code that changes them, and are read when somebody asks.

pub mod catalog;
mod server;
mod vllm;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry::InstrumentationScope;
use opentelemetry::metrics::{AsyncInstrument, Counter, Histogram, Meter, MeterProvider as _};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::metrics::data::ResourceMetrics;
use opentelemetry_sdk::metrics::exporter::PushMetricExporter;
use opentelemetry_sdk::metrics::{PeriodicReader, SdkMeterProvider, Temporality};
use prometheus::{Encoder as _, TextEncoder};

use crate::TelemetryError;
use crate::otlp::{OtlpConfig, Outage, Signal};
use catalog::Metric;

pub use opentelemetry::KeyValue;
pub use opentelemetry::metrics;
pub use server::serve;

/// Type of [`Metrics::render`]'s text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The metrics of one process. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Kept alive by this: without it the meter counts nothing.
    provider: SdkMeterProvider,
    meter: Meter,
    registry: prometheus::Registry,
    /// Name of the served model, when vLLM's names are shown too.
    vllm: Option<Arc<str>>,
}

/// What metrics are made with.
#[derive(Clone, Debug, Default)]
pub struct MetricsConfig {
    /// Show what vLLM's dashboards and autoscalers read under its names too, with this `model_name`.
    pub vllm_model_name: Option<String>,
    /// Where they are sent, beside being shown; nowhere when it names no collector.
    pub otlp: OtlpConfig,
}

/// An exporter that reports an outage once.
#[derive(Debug)]
struct Watched {
    exporter: opentelemetry_otlp::MetricExporter,
    outage: Outage,
}

impl PushMetricExporter for Watched {
    async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
        self.outage.note(self.exporter.export(metrics).await)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn temporality(&self) -> Temporality {
        self.exporter.temporality()
    }
}

impl Metrics {
    /// Metrics that nobody has counted yet.
    ///
    /// # Errors
    /// When an exporter cannot be made.
    pub fn new(config: MetricsConfig) -> Result<Self, TelemetryError> {
        let registry = prometheus::Registry::new();
        let exporter = opentelemetry_prometheus::exporter()
            .with_registry(registry.clone())
            .scope_info_enabled(false)
            .without_target_info()
            .build()
            .map_err(|e| TelemetryError::Metrics(e.to_string()))?;
        let mut builder = SdkMeterProvider::builder().with_reader(exporter);
        if config.otlp.exports(Signal::Metrics)? {
            let exporter = Watched {
                exporter: config.otlp.metric_exporter()?,
                outage: Outage::new("metrics"),
            };
            builder = builder
                .with_resource(config.otlp.resource())
                .with_reader(PeriodicReader::builder(exporter).build());
        }
        let provider = builder.build();
        let meter = provider.meter_with_scope(InstrumentationScope::builder("baton").build());
        let metrics =
            Self { provider, meter, registry, vllm: config.vllm_model_name.map(Arc::from) };
        let version = [KeyValue::new("version", env!("CARGO_PKG_VERSION"))];
        metrics.observe_u64(&catalog::BUILD_INFO, move |to| to.observe(1, &version));
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        metrics
            .observe_f64(&catalog::PROCESS_START, move |to| to.observe(started.as_secs_f64(), &[]));
        Ok(metrics)
    }

    /// A counter that code adds to.
    #[must_use]
    pub fn counter(&self, metric: &Metric) -> Counter<u64> {
        self.meter
            .u64_counter(metric.name)
            .with_unit(metric.unit)
            .with_description(metric.meaning)
            .build()
    }

    /// A histogram that code records to.
    #[must_use]
    pub fn histogram(&self, metric: &Metric) -> Histogram<f64> {
        self.meter
            .f64_histogram(metric.name)
            .with_unit(metric.unit)
            .with_description(metric.meaning)
            .with_boundaries(metric.buckets.to_vec())
            .build()
    }

    /// A counter or gauge of whole numbers that is read when somebody asks.
    pub fn observe_u64(
        &self,
        metric: &Metric,
        read: impl Fn(&dyn AsyncInstrument<u64>) + Send + Sync + 'static,
    ) {
        // The provider keeps the callback; the handle is of no further use.
        match metric.kind {
            catalog::Kind::Counter => drop(
                self.meter
                    .u64_observable_counter(metric.name)
                    .with_unit(metric.unit)
                    .with_description(metric.meaning)
                    .with_callback(read)
                    .build(),
            ),
            _ => drop(
                self.meter
                    .u64_observable_gauge(metric.name)
                    .with_unit(metric.unit)
                    .with_description(metric.meaning)
                    .with_callback(read)
                    .build(),
            ),
        }
    }

    /// As [`Self::observe_u64`], for seconds and shares.
    pub fn observe_f64(
        &self,
        metric: &Metric,
        read: impl Fn(&dyn AsyncInstrument<f64>) + Send + Sync + 'static,
    ) {
        match metric.kind {
            catalog::Kind::Counter => drop(
                self.meter
                    .f64_observable_counter(metric.name)
                    .with_unit(metric.unit)
                    .with_description(metric.meaning)
                    .with_callback(read)
                    .build(),
            ),
            _ => drop(
                self.meter
                    .f64_observable_gauge(metric.name)
                    .with_unit(metric.unit)
                    .with_description(metric.meaning)
                    .with_callback(read)
                    .build(),
            ),
        }
    }

    /// Sends the last values, for two seconds at most. Blocks.
    pub fn shutdown(&self) {
        // What the collector does not take by then is lost.
        let _ = self.provider.shutdown_with_timeout(Duration::from_secs(2));
    }

    /// All values now, in Prometheus' text format.
    #[must_use]
    pub fn render(&self) -> String {
        let mut families = self.registry.gather();
        if let Some(model) = &self.vllm {
            families.extend(vllm::aliases(&families, model));
        }
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&families, &mut text) {
            tracing::error!("metrics cannot be shown: {error}");
        }
        String::from_utf8_lossy(&text).into_owned()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use super::*;

    /// Names of the families in a text, with their types.
    fn families(text: &str) -> Vec<(String, String)> {
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        types.map(|line| line.split_once(' ').unwrap()).map(|(n, t)| (n.into(), t.into())).collect()
    }

    #[test]
    fn the_exporter_derives_the_names_that_the_catalog_foretells() {
        let metrics = Metrics::new(MetricsConfig::default()).unwrap();
        for metric in
            catalog::ALL.iter().filter(|metric| metric.shown != catalog::Shown::Everywhere)
        {
            match metric.kind {
                catalog::Kind::Histogram => metrics.histogram(metric).record(1.0, &[]),
                catalog::Kind::Counter => metrics.counter(metric).add(1, &[]),
                catalog::Kind::Gauge => metrics.observe_f64(metric, |to| to.observe(1.0, &[])),
            }
        }
        let mut expected: Vec<_> = catalog::ALL
            .iter()
            .map(|metric| (metric.prometheus(), format!("{:?}", metric.kind).to_lowercase()))
            .collect();
        expected.sort();
        assert_eq!(families(&metrics.render()), expected);
    }

    #[test]
    fn vllm_names_have_the_same_values_and_only_when_asked_for() {
        let plain = Metrics::new(MetricsConfig::default()).unwrap();
        let both =
            Metrics::new(MetricsConfig { vllm_model_name: Some("m".into()), ..Default::default() })
                .unwrap();
        for metrics in [&plain, &both] {
            metrics.histogram(&catalog::TIME_TO_FIRST_TOKEN).record(0.2, &[]);
            let requests = metrics.counter(&catalog::REQUESTS);
            for (outcome, count) in [("stop", 2), ("cancelled", 3), ("rejected", 5)] {
                requests.add(count, &[KeyValue::new("outcome", outcome)]);
            }
        }
        assert!(!plain.render().contains("vllm:"));
        let text = both.render();
        let labels = "engine=\"0\",finished_reason";
        for line in [
            "# TYPE vllm:time_to_first_token_seconds histogram".to_owned(),
            "vllm:time_to_first_token_seconds_sum{engine=\"0\",model_name=\"m\"} 0.2".to_owned(),
            format!("vllm:request_success_total{{{labels}=\"stop\",model_name=\"m\"}} 2"),
            format!("vllm:request_success_total{{{labels}=\"abort\",model_name=\"m\"}} 3"),
        ] {
            assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
        }
        assert_eq!(text.lines().filter(|l| l.starts_with("vllm:request_success")).count(), 2);
    }

    #[test]
    fn durations_are_spread_over_buckets() {
        let metrics = Metrics::new(MetricsConfig::default()).unwrap();
        let latency = metrics.histogram(&catalog::INTER_TOKEN_LATENCY);
        for value in [0.001, 0.012, 0.4] {
            latency.record(value, &[]);
        }
        let text = metrics.render();
        let count = |bound: &str| {
            let series = format!("baton_inter_token_latency_seconds_bucket{{le=\"{bound}\"}} ");
            text.lines().find_map(|line| line.strip_prefix(&series)).unwrap().to_owned()
        };
        assert_eq!([count("0.001"), count("0.015"), count("0.5")], ["1", "2", "3"]);
    }
}
