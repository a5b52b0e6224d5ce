//! Spans of steps, made apart from the compute thread from the times that it took.

use std::ops::Range;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use baton_proto::v1;
use baton_telemetry::metrics::KeyValue;
use baton_telemetry::names::{attribute, span};
use baton_telemetry::traces::{self, SpanExt as _, SpanKind, Status, Traces};
use tokio::sync::mpsc;

/// Steps whose spans may wait; later ones have none.
const QUEUE: usize = 1024;

/// A step that this stage has answered.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) epoch: u64,
    pub(crate) step: u64,
    /// Rows of the whole step.
    pub(crate) rows: u32,
    /// `traceparent` of every request with rows in it whose step is traced, and how many rows those are.
    pub(crate) requests: Vec<(String, u32)>,
    pub(crate) times: v1::StepTimes,
    pub(crate) handoff_bytes: u64,
    pub(crate) carry_rows: u32,
    pub(crate) failure: Option<&'static str>,
}

/// Where the compute thread leaves steps. Nothing is made of them when nobody wants spans.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepTraces(Option<mpsc::Sender<Ran>>);

impl StepTraces {
    /// Makes spans of this stage from now on. Call it within a tokio runtime.
    pub(crate) fn start(traces: &Traces, stage: usize, layers: Range<usize>) -> Self {
        if !traces.is_on() {
            return Self(None);
        }
        let (steps, mut ran) = mpsc::channel(QUEUE);
        let traces = traces.clone();
        tokio::spawn(async move {
            while let Some(step) = ran.recv().await {
                make(&traces, stage, &layers, &step);
            }
        });
        Self(Some(steps))
    }

    /// Takes an answered step. Nothing happens when spans are off or the step has no traced request.
    pub(crate) fn ran(
        &self,
        step: &mut v1::Step,
        result: &v1::StepResult,
        kind: Option<&'static str>,
    ) {
        let Some(queue) = &self.0 else { return };
        // "00" in the flags: this request or this step is not sampled.
        let traced = |s: &v1::Segment| !s.traceparent.is_empty() && !s.traceparent.ends_with("-00");
        if !step.segments.iter().any(traced) {
            return;
        }
        let count = |rows: usize| u32::try_from(rows).unwrap_or(u32::MAX);
        let rows = step.segments.iter().map(|segment| count(segment.token_ids.len())).sum::<u32>();
        let requests = step.segments.iter_mut().filter(|s| traced(s));
        let requests =
            requests.map(|s| (std::mem::take(&mut s.traceparent), count(s.token_ids.len())));
        // When the queue is full the step has no spans: the compute thread never waits for them.
        let _ = queue.try_send(Ran {
            epoch: step.epoch,
            step: step.step_id,
            rows: rows + step.padding_rows,
            requests: requests.collect(),
            times: result.times.unwrap_or_default(),
            handoff_bytes: result.handoff_bytes,
            carry_rows: result.carry_rows,
            failure: kind,
        });
    }
}

fn make(traces: &Traces, stage: usize, layers: &Range<usize>, ran: &Ran) {
    let times = &ran.times;
    let start = UNIX_EPOCH + Duration::from_micros(times.arrived_unix_micros);
    let parts = [times.queue_wait, times.receive_wait, times.compute, times.send];
    let took: Duration = parts.iter().map(|part| Duration::from_micros((*part).into())).sum();
    for (traceparent, rows) in &ran.requests {
        let Some(parent) = traces::parse(traceparent, None).filter(|p| p.is_sampled()) else {
            continue;
        };
        let Some(mut span) = traces.start(span::STAGE, SpanKind::Server, Some(&parent), start)
        else {
            return;
        };
        let int = |key, value: u64| KeyValue::new(key, i64::try_from(value).unwrap_or(i64::MAX));
        span.set_attributes([
            int(attribute::STAGE, stage as u64),
            KeyValue::new(attribute::LAYERS, format!("{}..{}", layers.start, layers.end)),
            int(attribute::EPOCH, ran.epoch),
            int(attribute::STEP, ran.step),
            int(attribute::STEP_ROWS, ran.rows.into()),
            int(attribute::ROWS, (*rows).into()),
            int(attribute::QUEUE_WAIT, times.queue_wait.into()),
            int(attribute::RECEIVE_WAIT, times.receive_wait.into()),
            int(attribute::COMPUTE, times.compute.into()),
            int(attribute::SEND, times.send.into()),
            int(attribute::HANDOFF_BYTES, ran.handoff_bytes),
            int(attribute::CARRY_ROWS, ran.carry_rows.into()),
        ]);
        if let Some(kind) = ran.failure {
            span.set_attribute(KeyValue::new(attribute::FAILURE, kind));
            span.set_status(Status::error(kind));
        }
        span.end_with_timestamp(later(start, took));
    }
}

fn later(start: SystemTime, took: Duration) -> SystemTime {
    start.checked_add(took).unwrap_or(start)
}
