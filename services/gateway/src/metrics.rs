//! What requests took and how they ended. One choice counts as one request: it is one sequence of the scheduler.

use std::sync::Arc;
use std::time::Instant;

use baton_coordinator::{Event, FinishReason};
use baton_telemetry::metrics::metrics::{Counter, Histogram};
use baton_telemetry::metrics::{KeyValue, Metrics, catalog};

use crate::trace::RequestTrace;

/// Counters of all requests. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct RequestMetrics(Arc<Instruments>);

#[derive(Debug)]
struct Instruments {
    requests: Counter<u64>,
    prompt_tokens: Counter<u64>,
    generation_tokens: Counter<u64>,
    queue_time: Histogram<f64>,
    time_to_first_token: Histogram<f64>,
    inter_token_latency: Histogram<f64>,
    duration: Histogram<f64>,
    tokens_per_prompt: Histogram<f64>,
    tokens_per_answer: Histogram<f64>,
}

/// How a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Finished(FinishReason),
    Cancelled,
    Expired,
    Failed,
    Rejected,
}

impl Outcome {
    const ALL: [Self; 6] = [
        Self::Finished(FinishReason::Stop),
        Self::Finished(FinishReason::Length),
        Self::Cancelled,
        Self::Expired,
        Self::Failed,
        Self::Rejected,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Finished(reason) => crate::generate::reason_name(reason),
            Self::Cancelled => "cancelled",
            Self::Expired => "expired",
            Self::Failed => "failed",
            Self::Rejected => "rejected",
        }
    }
}

impl RequestMetrics {
    pub(crate) fn shown(metrics: &Metrics) -> Self {
        let instruments = Instruments {
            requests: metrics.counter(&catalog::REQUESTS),
            prompt_tokens: metrics.counter(&catalog::PROMPT_TOKENS),
            generation_tokens: metrics.counter(&catalog::GENERATION_TOKENS),
            queue_time: metrics.histogram(&catalog::QUEUE_TIME),
            time_to_first_token: metrics.histogram(&catalog::TIME_TO_FIRST_TOKEN),
            inter_token_latency: metrics.histogram(&catalog::INTER_TOKEN_LATENCY),
            duration: metrics.histogram(&catalog::REQUEST_DURATION),
            tokens_per_prompt: metrics.histogram(&catalog::REQUEST_PROMPT_TOKENS),
            tokens_per_answer: metrics.histogram(&catalog::REQUEST_GENERATION_TOKENS),
        };
        // A series that is there before its first event shows the first event as an increase.
        for outcome in Outcome::ALL {
            instruments.requests.add(0, &[KeyValue::new("outcome", outcome.name())]);
        }
        instruments.prompt_tokens.add(0, &[]);
        instruments.generation_tokens.add(0, &[]);
        Self(Arc::new(instruments))
    }

    /// A choice is about to be handed to the scheduler.
    pub(crate) fn submitted(&self, prompt_tokens: usize, trace: RequestTrace) -> Measured {
        Measured {
            metrics: self.clone(),
            trace,
            submitted: Instant::now(),
            last_token: None,
            prompt_tokens: prompt_tokens as u64,
            tokens: 0,
            outcome: Outcome::Cancelled,
        }
    }
}

/// One choice under way; it is counted when dropped, as cancelled when nothing has ended it before.
#[derive(Debug)]
pub(crate) struct Measured {
    metrics: RequestMetrics,
    trace: RequestTrace,
    submitted: Instant,
    last_token: Option<Instant>,
    prompt_tokens: u64,
    tokens: u64,
    outcome: Outcome,
}

impl Measured {
    /// The scheduler did not take it.
    pub(crate) fn rejected(mut self) {
        self.outcome = Outcome::Rejected;
    }

    /// The scheduler says something.
    pub(crate) fn hears(&mut self, event: &Event) {
        let metrics = &self.metrics.0;
        match event {
            Event::Admitted { .. } => {
                metrics.queue_time.record(self.submitted.elapsed().as_secs_f64(), &[]);
                metrics.prompt_tokens.add(self.prompt_tokens, &[]);
                metrics.tokens_per_prompt.record(self.prompt_tokens as f64, &[]);
            }
            Event::Token { .. } => {
                let now = Instant::now();
                let (waited, since) = match self.last_token.replace(now) {
                    None => (&metrics.time_to_first_token, self.submitted),
                    Some(last) => (&metrics.inter_token_latency, last),
                };
                waited.record((now - since).as_secs_f64(), &[]);
                metrics.generation_tokens.add(1, &[]);
                self.tokens += 1;
            }
            Event::Expired => self.outcome = Outcome::Expired,
            Event::Failed { .. } => self.outcome = Outcome::Failed,
            Event::Prompt(_) | Event::Finished(_) => {}
        }
    }

    /// The text is complete.
    pub(crate) fn finished(&mut self, reason: FinishReason) {
        self.outcome = Outcome::Finished(reason);
    }
}

impl Drop for Measured {
    fn drop(&mut self) {
        self.trace.choice_ended(self.outcome.name(), self.tokens);
        let metrics = &self.metrics.0;
        metrics.requests.add(1, &[KeyValue::new("outcome", self.outcome.name())]);
        if matches!(self.outcome, Outcome::Finished(_)) {
            metrics.duration.record(self.submitted.elapsed().as_secs_f64(), &[]);
            metrics.tokens_per_answer.record(self.tokens as f64, &[]);
        }
    }
}
