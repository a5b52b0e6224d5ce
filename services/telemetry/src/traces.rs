//! Spans of requests, made from explicit times and exported in the background.
//!
//! Nothing here is called while a stage computes: a span is made when its times are known, and queued for the exporter's
//! own thread. Switched off, nothing is made at all.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{TraceContextExt as _, Tracer as _, TracerProvider as _};
use opentelemetry::{Context, InstrumentationScope};
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider, SpanData};

use crate::TelemetryError;
use crate::otlp::{OtlpConfig, Outage, Signal};

pub use opentelemetry::trace::{Span as SpanExt, SpanContext, SpanKind, Status};
pub use opentelemetry::{Array, Value};
pub use opentelemetry_sdk::trace::Span;

/// How long the end of a process waits for the collector.
const FAREWELL: Duration = Duration::from_secs(2);
/// Of how many decode steps one gets a span, when nothing else is said.
pub const DECODE_EVERY: u64 = 16;

/// Which spans are made.
#[derive(Clone, Copy, Debug)]
pub struct TraceConfig {
    /// Share of the requests without a trace of their own that are traced; `OTEL_TRACES_SAMPLER` says when absent.
    pub ratio: Option<f64>,
    /// Of how many decode steps of a request one gets a span: the first, and then every so many.
    pub decode_every: u64,
}

impl Default for TraceConfig {
    fn default() -> Self {
        Self { ratio: None, decode_every: DECODE_EVERY }
    }
}

/// The spans of one process. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Traces(Option<Arc<On>>);

#[derive(Debug)]
struct On {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    decode_every: u64,
}

/// An exporter that reports an outage once.
#[derive(Debug)]
struct Watched {
    exporter: SpanExporter,
    outage: Outage,
}

impl opentelemetry_sdk::trace::SpanExporter for Watched {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.outage.note(self.exporter.export(batch).await)
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

impl Traces {
    /// No spans at all.
    #[must_use]
    pub fn off() -> Self {
        Self(None)
    }

    /// Spans go where `otlp` says; nowhere when it names no collector. Call it within a tokio runtime.
    ///
    /// # Errors
    /// When the collector's address or a variable cannot be used.
    pub fn new(config: TraceConfig, otlp: &OtlpConfig) -> Result<Self, TelemetryError> {
        if !otlp.exports(Signal::Traces)? {
            return Ok(Self::off());
        }
        let exporter = Watched { exporter: otlp.span_exporter()?, outage: Outage::new("traces") };
        let mut builder = SdkTracerProvider::builder()
            .with_resource(otlp.resource())
            .with_batch_exporter(exporter);
        if let Some(ratio) = config.ratio {
            builder = builder
                .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(ratio))));
        }
        let provider = builder.build();
        let scope = InstrumentationScope::builder("baton").with_version(env!("CARGO_PKG_VERSION"));
        let tracer = provider.tracer_with_scope(scope.build());
        let decode_every = config.decode_every.max(1);
        Ok(Self(Some(Arc::new(On { provider, tracer, decode_every }))))
    }

    /// Whether spans are made.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Whether this decode step of a request, from 1, gets a span.
    #[must_use]
    pub fn wants_decode(&self, step: u64) -> bool {
        self.0.as_ref().is_some_and(|on| step.saturating_sub(1).is_multiple_of(on.decode_every))
    }

    /// Begins a span, unless spans are off or the parent is not sampled. Without a parent it is a root, which the
    /// sampler decides about: then the span has a context even when it is not recorded.
    #[must_use]
    pub fn start(
        &self,
        name: impl Into<std::borrow::Cow<'static, str>>,
        kind: SpanKind,
        parent: Option<&SpanContext>,
        start: SystemTime,
    ) -> Option<Span> {
        let on = self.0.as_ref()?;
        let parent = parent
            .map_or_else(Context::new, |p| Context::new().with_remote_span_context(p.clone()));
        let builder = on.tracer.span_builder(name).with_kind(kind).with_start_time(start);
        Some(on.tracer.build_with_context(builder, &parent))
    }

    /// Sends what is queued, for two seconds at most. Blocks.
    pub fn shutdown(&self) {
        if let Some(on) = &self.0 {
            // What the collector does not take by then is lost.
            let _ = on.provider.shutdown_with_timeout(FAREWELL);
        }
    }
}

/// The context in a `traceparent` (and `tracestate`); none when it is empty or malformed.
#[must_use]
pub fn parse(traceparent: &str, tracestate: Option<&str>) -> Option<SpanContext> {
    let mut headers = HashMap::from([("traceparent".to_owned(), traceparent.to_owned())]);
    if let Some(state) = tracestate {
        headers.insert("tracestate".to_owned(), state.to_owned());
    }
    let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &headers);
    let context = context.span().span_context().clone();
    context.is_valid().then_some(context)
}

/// The `traceparent` of a context.
#[must_use]
pub fn format(context: &SpanContext) -> String {
    let flags = context.trace_flags().to_u8() & 1;
    format!("00-{}-{}-{flags:02x}", context.trace_id(), context.span_id())
}

/// The same, telling whoever gets it to make no spans.
#[must_use]
pub fn unsampled(context: &SpanContext) -> String {
    format!("00-{}-{}-00", context.trace_id(), context.span_id())
}

/// The trace id in a `traceparent`; empty without one.
#[must_use]
pub fn trace_id(traceparent: &str) -> &str {
    traceparent.split('-').nth(1).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_context_survives_being_written_and_read() {
        let context = parse(PARENT, Some("a=1")).unwrap();
        assert!(context.is_sampled() && context.is_remote());
        assert_eq!(format(&context), PARENT);
        assert_eq!(context.trace_state().get("a"), Some("1"));
        assert_eq!(trace_id(PARENT), "0af7651916cd43dd8448eb211c80319c");
    }

    #[test]
    fn a_malformed_context_is_none() {
        for bad in [
            "",
            "00-zz-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        ] {
            assert_eq!(parse(bad, None), None, "{bad}");
        }
    }

    #[test]
    fn switched_off_nothing_is_made() {
        let off = Traces::off();
        assert!(off.start("x", SpanKind::Internal, None, SystemTime::now()).is_none());
        assert!(!off.is_on() && !off.wants_decode(1));
    }
}
