//! Spans of queueing and of steps, one per request with rows in a step. Stages hang theirs below the step's.

use std::collections::HashMap;
use std::time::SystemTime;

use baton_proto::v1;
use baton_telemetry::Traces;
use baton_telemetry::metrics::KeyValue;
use baton_telemetry::names::{attribute, span};
use baton_telemetry::traces::{self, Span, SpanExt as _, SpanKind, Status};

/// A traced sequence that has left the queue.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) traceparent: String,
    pub(crate) since: SystemTime,
    pub(crate) cached_tokens: usize,
}

/// Spans of the steps in flight.
#[derive(Debug)]
pub(crate) struct StepTraces {
    traces: Traces,
    spans: HashMap<u64, Vec<Span>>,
}

impl StepTraces {
    pub(crate) fn new(traces: Traces) -> Self {
        Self { traces, spans: HashMap::new() }
    }

    /// Sequences have their first rows in a step, for the first time or again.
    pub(crate) fn left_queue(&self, queued: impl Iterator<Item = Queued>) {
        for queued in queued {
            let Some(parent) = sampled(&queued.traceparent) else { continue };
            let kind = SpanKind::Internal;
            if let Some(mut span) =
                self.traces.start(span::QUEUE, kind, Some(&parent), queued.since)
            {
                span.set_attribute(int(attribute::CACHED_TOKENS, queued.cached_tokens as u64));
                span.end();
            }
        }
    }

    /// A step is about to be sent: its traced segments go on under the spans that begin now. With spans switched off, what
    /// the client sent travels on unchanged.
    pub(crate) fn sends(&mut self, step: &mut v1::Step) {
        if !self.traces.is_on() {
            return;
        }
        let now = SystemTime::now();
        let rows = step.segments.iter().map(|s| s.token_ids.len() as u64).sum::<u64>();
        let mut spans = Vec::new();
        for segment in &mut step.segments {
            let Some(parent) = sampled(&segment.traceparent) else { continue };
            let decode = segment.sampling.as_ref().map_or(0, |sampling| sampling.draw);
            let decodes = decode > 0 && segment.token_ids.len() == 1;
            if decodes && !self.traces.wants_decode(decode) {
                // Stages still name the trace in their log lines.
                segment.traceparent = traces::unsampled(&parent);
                continue;
            }
            let name = if decodes { span::DECODE } else { span::PREFILL };
            let Some(mut span) = self.traces.start(name, SpanKind::Client, Some(&parent), now)
            else {
                continue;
            };
            span.set_attributes([
                int(attribute::EPOCH, step.epoch),
                int(attribute::STEP, step.step_id),
                int(attribute::STEP_ROWS, rows),
                int(attribute::ROWS, segment.token_ids.len() as u64),
                int(attribute::POSITION, segment.start_position.into()),
            ]);
            segment.traceparent = traces::format(span.span_context());
            spans.push(span);
        }
        if !spans.is_empty() {
            self.spans.insert(step.step_id, spans);
        }
    }

    /// The last stage has answered a step.
    pub(crate) fn answered(&mut self, step: u64) {
        let Some(spans) = self.spans.remove(&step) else { return };
        let now = SystemTime::now();
        for mut span in spans {
            span.end_with_timestamp(now);
        }
    }

    /// The pipeline failed with these steps in flight.
    pub(crate) fn failed(&mut self, reason: &str) {
        for mut span in self.spans.drain().flat_map(|(_, spans)| spans) {
            span.set_status(Status::error(reason.to_owned()));
            span.end();
        }
    }
}

fn sampled(traceparent: &str) -> Option<traces::SpanContext> {
    // Most steps of most pipelines have none: nothing is parsed for them.
    if traceparent.is_empty() {
        return None;
    }
    traces::parse(traceparent, None).filter(traces::SpanContext::is_sampled)
}

fn int(key: &'static str, value: u64) -> KeyValue {
    KeyValue::new(key, i64::try_from(value).unwrap_or(i64::MAX))
}
