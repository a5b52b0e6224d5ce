//! What the coordinator counts of its pipeline.
//!
//! The driver notes what happens in a [`StepMeter`]; the numbers are atomics that outlive a wiring and are read when somebody
//! asks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use baton_proto::v1;
use baton_telemetry::metrics::metrics::Histogram;
use baton_telemetry::metrics::{KeyValue, Metrics, catalog};
use tokio::sync::watch;

use crate::request::Readiness;
use crate::scheduler::Scheduler;

/// Values that others read at any time.
#[derive(Debug)]
pub(crate) struct Numbers {
    born: Instant,
    running: AtomicU64,
    waiting: AtomicU64,
    kv_total: AtomicU64,
    kv_free: AtomicU64,
    cached_blocks: AtomicU64,
    queried_tokens: AtomicU64,
    hit_tokens: AtomicU64,
    preemptions: AtomicU64,
    epoch: AtomicU64,
    in_flight: AtomicU64,
    busy_micros: AtomicU64,
    stages: Vec<StageNumbers>,
    step_duration: Histogram<f64>,
}

#[derive(Debug, Default)]
struct StageNumbers {
    up: AtomicBool,
    answers: AtomicU64,
    bubble_micros: AtomicU64,
    /// Microseconds from `born` since when it has had its next step; 0 without one.
    pending_since: AtomicU64,
    failures: AtomicU64,
}

impl Numbers {
    /// Numbers of a pipeline of so many stages, shown from now on.
    pub(crate) fn shown(
        metrics: &Metrics,
        stages: usize,
        readiness: watch::Receiver<Readiness>,
    ) -> Arc<Self> {
        let numbers = Arc::new(Self {
            born: Instant::now(),
            running: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            kv_total: AtomicU64::new(0),
            kv_free: AtomicU64::new(0),
            cached_blocks: AtomicU64::new(0),
            queried_tokens: AtomicU64::new(0),
            hit_tokens: AtomicU64::new(0),
            preemptions: AtomicU64::new(0),
            epoch: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            busy_micros: AtomicU64::new(0),
            stages: (0..stages).map(|_| StageNumbers::default()).collect(),
            step_duration: metrics.histogram(&catalog::STEP_DURATION),
        });
        numbers.show(metrics);
        metrics.observe_u64(&catalog::READY, move |to| {
            to.observe(u64::from(*readiness.borrow() == Readiness::Ready), &[]);
        });
        numbers
    }

    fn show(self: &Arc<Self>, metrics: &Metrics) {
        let one = |metric, read: fn(&Self) -> u64| {
            let numbers = Arc::clone(self);
            metrics.observe_u64(metric, move |to| to.observe(read(&numbers), &[]));
        };
        one(&catalog::REQUESTS_RUNNING, |n| n.running.load(Relaxed));
        one(&catalog::REQUESTS_WAITING, |n| n.waiting.load(Relaxed));
        one(&catalog::PREEMPTIONS, |n| n.preemptions.load(Relaxed));
        one(&catalog::PREFIX_QUERIES, |n| n.queried_tokens.load(Relaxed));
        one(&catalog::PREFIX_HITS, |n| n.hit_tokens.load(Relaxed));
        one(&catalog::PREFIX_BLOCKS, |n| n.cached_blocks.load(Relaxed));
        one(&catalog::EPOCH, |n| n.epoch.load(Relaxed));
        one(&catalog::STEPS_IN_FLIGHT, |n| n.in_flight.load(Relaxed));
        let numbers = Arc::clone(self);
        metrics.observe_u64(&catalog::KV_BLOCKS, move |to| {
            let (used, free) = numbers.kv_blocks();
            to.observe(used, &[KeyValue::new("state", "used")]);
            to.observe(free, &[KeyValue::new("state", "free")]);
        });
        let numbers = Arc::clone(self);
        metrics.observe_f64(&catalog::KV_USAGE, move |to| {
            let (used, free) = numbers.kv_blocks();
            to.observe(used as f64 / (used + free).max(1) as f64, &[]);
        });
        let numbers = Arc::clone(self);
        metrics.observe_f64(&catalog::BUSY, move |to| {
            to.observe(numbers.busy_micros.load(Relaxed) as f64 / 1e6, &[]);
        });
        self.show_stages(metrics);
    }

    fn show_stages(self: &Arc<Self>, metrics: &Metrics) {
        let each = |metric, read: fn(&StageNumbers) -> u64| {
            let numbers = Arc::clone(self);
            metrics.observe_u64(metric, move |to| {
                for (stage, of_stage) in numbers.stages.iter().enumerate() {
                    to.observe(read(of_stage), &[label(stage)]);
                }
            });
        };
        each(&catalog::STAGE_UP, |n| n.up.load(Relaxed).into());
        each(&catalog::STAGE_ANSWERS, |n| n.answers.load(Relaxed));
        each(&catalog::FAILURES, |n| n.failures.load(Relaxed));
        let seconds = |metric, read: fn(&Self, &StageNumbers) -> f64| {
            let numbers = Arc::clone(self);
            metrics.observe_f64(metric, move |to| {
                for (stage, of_stage) in numbers.stages.iter().enumerate() {
                    to.observe(read(&numbers, of_stage), &[label(stage)]);
                }
            });
        };
        seconds(&catalog::BUBBLE, |_, n| n.bubble_micros.load(Relaxed) as f64 / 1e6);
        seconds(&catalog::STAGE_PENDING, |numbers, n| match n.pending_since.load(Relaxed) {
            0 => 0.0,
            since => numbers.micros(Instant::now()).saturating_sub(since) as f64 / 1e6,
        });
    }

    fn kv_blocks(&self) -> (u64, u64) {
        let (total, free) = (self.kv_total.load(Relaxed), self.kv_free.load(Relaxed));
        (total.saturating_sub(free), free)
    }

    /// Microseconds from the beginning; never 0.
    fn micros(&self, at: Instant) -> u64 {
        micros(at.saturating_duration_since(self.born)).max(1)
    }

    /// Takes over what the scheduler says of itself.
    pub(crate) fn scheduler(&self, scheduler: &Scheduler) {
        let (running, waiting) = scheduler.live();
        let cache = scheduler.cache_counts();
        self.running.store(running as u64, Relaxed);
        self.waiting.store(waiting as u64, Relaxed);
        self.kv_free.store(scheduler.free_blocks() as u64, Relaxed);
        self.cached_blocks.store(cache.blocks as u64, Relaxed);
        self.queried_tokens.store(cache.queried_tokens, Relaxed);
        self.hit_tokens.store(cache.hit_tokens, Relaxed);
        self.preemptions.store(scheduler.preemptions(), Relaxed);
    }

    /// The pipeline has failed, by this stage's doing.
    pub(crate) fn failed(&self, stage: usize) {
        self.in_flight.store(0, Relaxed);
        for of_stage in &self.stages {
            of_stage.pending_since.store(0, Relaxed);
        }
        if let Some(of_stage) = self.stages.get(stage) {
            of_stage.up.store(false, Relaxed);
            of_stage.failures.fetch_add(1, Relaxed);
        }
    }
}

/// Follows the steps of one wiring.
#[derive(Debug)]
pub(crate) struct StepMeter {
    numbers: Arc<Numbers>,
    /// Steps sent.
    sent: u64,
    /// Time with steps in flight, up to the last event.
    busy: Duration,
    last_event: Instant,
    stages: Vec<Progress>,
}

/// How far a stage is.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    answered: u64,
    /// Compute and send time of these steps.
    work: Duration,
    bubble: Duration,
}

impl StepMeter {
    pub(crate) fn wired(numbers: Arc<Numbers>, epoch: u64, kv_blocks: u32) -> Self {
        numbers.epoch.store(epoch, Relaxed);
        numbers.kv_total.store(kv_blocks.into(), Relaxed);
        numbers.kv_free.store(kv_blocks.into(), Relaxed);
        for stage in &numbers.stages {
            stage.up.store(true, Relaxed);
        }
        let stages = vec![Progress::default(); numbers.stages.len()];
        Self { numbers, sent: 0, busy: Duration::ZERO, last_event: Instant::now(), stages }
    }

    /// A step goes to all stages.
    pub(crate) fn sent(&mut self, now: Instant) {
        self.advance(now);
        self.sent += 1;
        self.numbers.in_flight.store(self.in_flight(), Relaxed);
        if let Some(first) = self.numbers.stages.first()
            && first.pending_since.load(Relaxed) == 0
        {
            first.pending_since.store(self.numbers.micros(now), Relaxed);
        }
    }

    /// A stage has answered its next step.
    pub(crate) fn answered(&mut self, stage: usize, times: Option<v1::StepTimes>, now: Instant) {
        self.advance(now);
        let parts = times.map_or(0, |times| u64::from(times.compute) + u64::from(times.send));
        let available = match stage.checked_sub(1) {
            Some(before) => self.stages[before].answered,
            None => self.sent,
        };
        let progress = &mut self.stages[stage];
        progress.answered += 1;
        progress.work += Duration::from_micros(parts);
        // Never less than before: an answer on its way is not idleness undone.
        let bubble = self.busy.saturating_sub(progress.work).max(progress.bubble);
        let more = bubble - std::mem::replace(&mut progress.bubble, bubble);
        let now = self.numbers.micros(now);
        let numbers = &self.numbers.stages[stage];
        numbers.answers.fetch_add(1, Relaxed);
        numbers.bubble_micros.fetch_add(micros(more), Relaxed);
        let answered = progress.answered;
        let next = if available > answered { now } else { 0 };
        numbers.pending_since.store(next, Relaxed);
        match self.numbers.stages.get(stage + 1) {
            // Answers of two stages may come in either order.
            Some(after)
                if after.pending_since.load(Relaxed) == 0
                    && answered > self.stages[stage + 1].answered =>
            {
                after.pending_since.store(now, Relaxed);
            }
            Some(_) => {}
            None => self.numbers.in_flight.store(self.in_flight(), Relaxed),
        }
    }

    /// The last stage has answered a step that took this long.
    pub(crate) fn took(&self, duration: Duration) {
        self.numbers.step_duration.record(duration.as_secs_f64(), &[]);
    }

    fn in_flight(&self) -> u64 {
        self.sent - self.stages.last().map_or(0, |last| last.answered)
    }

    /// Counts the time since the last event as busy if steps were in flight.
    fn advance(&mut self, now: Instant) {
        let since = now.saturating_duration_since(std::mem::replace(&mut self.last_event, now));
        if self.in_flight() > 0 {
            self.busy += since;
            self.numbers.busy_micros.fetch_add(micros(since), Relaxed);
        }
    }
}

fn label(stage: usize) -> KeyValue {
    KeyValue::new("stage", stage.to_string())
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
