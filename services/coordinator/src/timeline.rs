//! The last steps and how every stage spent its time on them. They outlive a wiring: after a failure they show how it came.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use baton_proto::v1;
use serde_json::{Value, json};

/// Steps that are kept.
const KEPT: usize = 256;

/// The last steps. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Timeline(Arc<Mutex<Steps>>);

#[derive(Debug)]
struct Steps {
    stages: usize,
    /// Oldest first.
    kept: VecDeque<Step>,
}

#[derive(Debug)]
struct Step {
    epoch: u64,
    id: u64,
    rows: usize,
    sequences: usize,
    /// Microseconds since 1970, by the coordinator's clock.
    sent: u64,
    /// Those of the stages that have answered.
    stages: Vec<Option<Answer>>,
}

#[derive(Clone, Debug)]
struct Answer {
    /// When it came: microseconds since 1970, by the coordinator's clock.
    at: u64,
    times: v1::StepTimes,
    handoff_bytes: u64,
    carry_rows: u32,
    failure: Option<String>,
}

impl Answer {
    /// When the stage was done, by its own clock.
    fn end(&self) -> u64 {
        let v1::StepTimes { queue_wait, receive_wait, compute, send, .. } = self.times;
        let parts = [queue_wait, receive_wait, compute, send].map(u64::from);
        self.times.arrived_unix_micros + parts.iter().sum::<u64>()
    }
}

impl Timeline {
    /// Of a pipeline with so many stages.
    #[must_use]
    pub fn new(stages: usize) -> Self {
        Self(Arc::new(Mutex::new(Steps { stages, kept: VecDeque::with_capacity(KEPT) })))
    }

    fn with<T>(&self, look: impl FnOnce(&mut Steps) -> T) -> T {
        // Every change is complete before anything can panic.
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A step goes to all stages.
    pub fn sent(&self, step: &v1::Step) {
        let rows = step.segments.iter().map(|segment| segment.token_ids.len()).sum();
        let (sequences, sent) = (step.segments.len(), unix_micros());
        self.with(|steps| {
            if steps.kept.len() == KEPT {
                steps.kept.pop_front();
            }
            let stages = vec![None; steps.stages];
            let (epoch, id) = (step.epoch, step.step_id);
            steps.kept.push_back(Step { epoch, id, rows, sequences, sent, stages });
        });
    }

    /// A stage has answered a step. Nothing happens when the step is kept no longer.
    pub fn answered(&self, stage: usize, result: &v1::StepResult) {
        let answer = Answer {
            at: unix_micros(),
            times: result.times.unwrap_or_default(),
            handoff_bytes: result.handoff_bytes,
            carry_rows: result.carry_rows,
            failure: result.failure.as_ref().map(|failure| failure.kind.clone()),
        };
        self.with(|steps| {
            let wanted = |step: &&mut Step| (step.epoch, step.id) == (result.epoch, result.step_id);
            // The steps in flight are at the end.
            let step = steps.kept.iter_mut().rev().find(wanted);
            if let Some(place) = step.and_then(|step| step.stages.get_mut(stage)) {
                *place = Some(answer);
            }
        });
    }

    /// The last `count` steps as `/pipeline/steps` shows them, oldest first. Moments are microseconds since 1970 by the
    /// coordinator's clock, parts are microseconds.
    #[must_use]
    pub fn last(&self, count: usize) -> Value {
        self.with(|steps| {
            let behind: Vec<i64> =
                (0..steps.stages).map(|stage| steps.clock_behind(stage)).collect();
            let shown = steps.kept.iter().skip(steps.kept.len().saturating_sub(count));
            json!({
                "now": unix_micros(),
                "stage_clocks_behind": behind,
                "steps": shown.map(|step| show(step, &behind)).collect::<Vec<_>>(),
            })
        })
    }
}

impl Steps {
    /// How far a stage's clock is behind the coordinator's, as far as that can be told from outside: 0 unless a step came
    /// before it was sent or was done after its answer came. Then what makes both distances equal, as NTP does.
    fn clock_behind(&self, stage: usize) -> i64 {
        let answers = self.kept.iter().filter_map(|s| Some((s.sent, s.stages[stage].as_ref()?)));
        let distances = answers.filter(|(_, answer)| answer.times.arrived_unix_micros > 0).map(
            |(sent, answer)| {
                let there = answer.times.arrived_unix_micros.cast_signed() - sent.cast_signed();
                (there, answer.at.cast_signed() - answer.end().cast_signed())
            },
        );
        let least = distances.reduce(|a, b| (a.0.min(b.0), a.1.min(b.1)));
        match least {
            Some((there, back)) if there < 0 || back < 0 => (back - there) / 2,
            _ => 0,
        }
    }
}

fn show(step: &Step, behind: &[i64]) -> Value {
    let stages = step.stages.iter().zip(behind).map(|(answer, behind)| {
        let Answer { times, handoff_bytes, carry_rows, failure, .. } = answer.as_ref()?;
        Some(json!({
            "arrived": times.arrived_unix_micros.saturating_add_signed(*behind),
            "queue_wait": times.queue_wait,
            "receive_wait": times.receive_wait,
            "compute": times.compute,
            "send": times.send,
            "handoff_bytes": handoff_bytes,
            "carry_rows": carry_rows,
            "failure": failure,
        }))
    });
    json!({
        "epoch": step.epoch,
        "step": step.id,
        "rows": step.rows,
        "sequences": step.sequences,
        "sent": step.sent,
        "answered": step.stages.last().and_then(|last| Some(last.as_ref()?.at)),
        "stages": stages.collect::<Vec<_>>(),
    })
}

fn unix_micros() -> u64 {
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(unix.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(epoch: u64, step_id: u64) -> v1::Step {
        let segment = |rows| v1::Segment { token_ids: vec![1; rows], ..Default::default() };
        v1::Step { epoch, step_id, segments: vec![segment(3), segment(1)], ..Default::default() }
    }

    /// Answered after 50 microseconds of work, by a clock that is `ahead` of this one.
    fn result(epoch: u64, step_id: u64, ahead: i64) -> v1::StepResult {
        let arrived_unix_micros = unix_micros().saturating_add_signed(ahead - 50);
        let (queue_wait, receive_wait, compute, send) = (5, 10, 30, 5);
        let times = v1::StepTimes { queue_wait, receive_wait, compute, send, arrived_unix_micros };
        let (handoff_bytes, carry_rows) = (96, 2);
        let times = Some(times);
        v1::StepResult { epoch, step_id, times, handoff_bytes, carry_rows, ..Default::default() }
    }

    #[test]
    fn a_step_is_shown_from_its_sending_and_fills_up_stage_by_stage() {
        let timeline = Timeline::new(2);
        timeline.sent(&step(1, 7));
        std::thread::sleep(std::time::Duration::from_millis(1));
        timeline.answered(0, &result(1, 7, 0));
        let shown = timeline.last(9);
        assert_eq!(shown["stage_clocks_behind"], json!([0, 0]));
        let only = &shown["steps"][0];
        assert_eq!((&only["epoch"], &only["step"]), (&json!(1), &json!(7)));
        assert_eq!((&only["rows"], &only["sequences"]), (&json!(4), &json!(2)));
        assert_eq!((&only["answered"], &only["stages"][1]), (&Value::Null, &Value::Null));
        let first = &only["stages"][0];
        assert_eq!(first["compute"], 30);
        assert_eq!((&first["handoff_bytes"], &first["carry_rows"]), (&json!(96), &json!(2)));
        assert!(first["arrived"].as_u64() >= only["sent"].as_u64(), "{only}");
        timeline.answered(1, &result(1, 7, 0));
        let only = &timeline.last(9)["steps"][0];
        assert!(only["answered"].as_u64() > only["sent"].as_u64(), "{only}");
    }

    #[test]
    fn old_steps_go_and_those_of_an_earlier_wiring_are_told_apart() {
        let timeline = Timeline::new(1);
        timeline.sent(&step(1, 1));
        for id in 1..=KEPT as u64 {
            timeline.sent(&step(2, id));
        }
        timeline.answered(0, &result(1, 1, 0));
        let all = timeline.last(usize::MAX);
        let all = all["steps"].as_array().unwrap();
        assert_eq!(all.len(), KEPT);
        assert!(all.iter().all(|step| step["epoch"] == 2 && step["answered"].is_null()));
        let last = timeline.last(2);
        let ids = [&last["steps"][0]["step"], &last["steps"][1]["step"]];
        assert_eq!(ids, [&json!(KEPT - 1), &json!(KEPT)]);
    }

    #[test]
    fn a_clock_that_contradicts_is_corrected_and_failures_are_named() {
        const HOUR: i64 = 3_600_000_000;
        for ahead in [HOUR, -HOUR] {
            let timeline = Timeline::new(1);
            timeline.sent(&step(1, 1));
            let failure = v1::StepFailure { kind: "stale-carry".into(), ..Default::default() };
            let failed = v1::StepResult { failure: Some(failure), ..result(1, 1, ahead) };
            timeline.answered(0, &failed);
            let shown = timeline.last(1);
            let behind = shown["stage_clocks_behind"][0].as_i64().unwrap();
            assert!((behind + ahead).abs() < 60_000_000, "{behind}");
            let (step, now) = (&shown["steps"][0], shown["now"].as_i64().unwrap());
            let arrived = step["stages"][0]["arrived"].as_i64().unwrap();
            assert!((arrived - now).abs() < 60_000_000, "{shown}");
            assert_eq!(step["stages"][0]["failure"], "stale-carry");
        }
    }
}
