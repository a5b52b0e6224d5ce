#![allow(clippy::unwrap_used)] // A test fails by panicking.

use baton_telemetry::MetricsConfig;

use super::*;

const STAGES: usize = 3;

/// A clock, a meter and the metrics that show it.
struct Bench {
    metrics: Metrics,
    meter: StepMeter,
    start: Instant,
}

impl Bench {
    fn new() -> Self {
        let metrics = Metrics::new(MetricsConfig::default()).unwrap();
        let (_, readiness) = watch::channel(Readiness::Ready);
        let numbers = Numbers::shown(&metrics, STAGES, readiness);
        let meter = StepMeter::wired(numbers, 1, 10);
        let start = meter.last_event;
        Self { metrics, meter, start }
    }

    fn at(&self, millis: u64) -> Instant {
        self.start + Duration::from_millis(millis)
    }

    fn sent(&mut self, millis: u64) {
        let at = self.at(millis);
        self.meter.sent(at);
    }

    fn answered(&mut self, stage: usize, compute: u32, send: u32, millis: u64) {
        let times =
            v1::StepTimes { compute: compute * 1000, send: send * 1000, ..Default::default() };
        let at = self.at(millis);
        self.meter.answered(stage, Some(times), at);
    }

    /// The value of a series, as a scraper reads it.
    fn value(&self, series: &str) -> f64 {
        let text = self.metrics.render();
        let line = text.lines().find(|line| line.starts_with(&format!("{series} ")));
        line.unwrap_or_else(|| panic!("no {series} in\n{text}"))[series.len() + 1..]
            .parse()
            .unwrap()
    }

    /// Which stages have a step that they could run next. The clock of the test is ahead of the real one, so that the
    /// metric's value, the time since then, says nothing here.
    fn pending(&self) -> [bool; STAGES] {
        let stages = &self.meter.numbers.stages;
        [0, 1, 2].map(|stage: usize| stages[stage].pending_since.load(Relaxed) > 0)
    }

    fn stage(&self, name: &str, stage: usize) -> f64 {
        self.value(&format!("{name}{{stage=\"{stage}\"}}"))
    }
}

#[test]
fn bubbles_are_the_busy_time_without_compute_and_send() {
    let mut bench = Bench::new();
    // Idle for 100 ms: nobody's bubble. Then one step at a time: 10 ms on each stage, 2 of them sending.
    bench.sent(100);
    bench.answered(0, 8, 2, 110);
    bench.answered(1, 8, 2, 120);
    bench.answered(2, 10, 0, 130);
    assert!((bench.value("baton_pipeline_busy_seconds_total") - 0.030).abs() < 1e-9);
    let bubble = |stage| bench.stage("baton_pipeline_bubble_seconds_total", stage);
    // Each counts up to its own last answer.
    for (stage, expected) in [0.0, 0.010, 0.020].into_iter().enumerate() {
        assert!((bubble(stage) - expected).abs() < 1e-9, "stage {stage}: {}", bubble(stage));
    }
    bench.sent(1000);
    bench.answered(0, 8, 2, 1010);
    bench.answered(1, 8, 2, 1020);
    bench.answered(2, 10, 0, 1030);
    let bubble = |stage| bench.stage("baton_pipeline_bubble_seconds_total", stage);
    for (stage, expected) in [0.020, 0.030, 0.040].into_iter().enumerate() {
        assert!((bubble(stage) - expected).abs() < 1e-9, "stage {stage}: {}", bubble(stage));
    }
    assert_eq!(bench.value("baton_pipeline_steps_in_flight"), 0.0);
}

#[test]
fn of_a_pipeline_that_stands_still_one_stage_has_a_pending_step() {
    let mut bench = Bench::new();
    bench.sent(0);
    bench.sent(0);
    bench.answered(0, 1, 0, 1);
    bench.answered(0, 1, 0, 2);
    bench.answered(1, 1, 0, 3);
    // Stage 1 has the second step, stage 2 the first.
    assert_eq!(bench.pending(), [false, true, true]);
    bench.answered(2, 1, 0, 4);
    assert_eq!(bench.pending(), [false, true, false]);
    assert_eq!(bench.value("baton_pipeline_steps_in_flight"), 1.0);
    bench.meter.numbers.failed(1);
    assert_eq!(bench.pending(), [false; 3]);
    assert_eq!(bench.stage("baton_pipeline_failures_total", 1), 1.0);
    assert_eq!(bench.stage("baton_pipeline_stage_up", 1), 0.0);
    assert_eq!(bench.stage("baton_pipeline_stage_up", 2), 1.0);
}

#[test]
fn a_stage_whose_answer_comes_before_its_predecessor_s_waits_for_nothing() {
    let mut bench = Bench::new();
    bench.sent(0);
    bench.answered(1, 1, 0, 2);
    bench.answered(0, 1, 0, 3);
    assert_eq!(bench.pending(), [false, false, true]);
}

#[test]
fn an_answer_that_overtakes_the_clock_never_lowers_a_counter() {
    let mut bench = Bench::new();
    bench.sent(0);
    bench.answered(0, 1, 0, 5);
    let before = bench.stage("baton_pipeline_bubble_seconds_total", 0);
    bench.sent(5);
    // A stage says that it worked for longer than there was time.
    bench.answered(0, 50, 0, 6);
    assert_eq!(bench.stage("baton_pipeline_bubble_seconds_total", 0), before);
}
