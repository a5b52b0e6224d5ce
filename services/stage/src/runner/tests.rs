#![allow(clippy::unwrap_used)] // A test fails by panicking.

use baton_plan::{HiddenDtype, IndexDtype};

use super::*;

/// An engine with a defect: it panics at one step and answers nothing at the others.
struct Panicking {
    at: u64,
}

impl Engine for Panicking {
    fn run(&mut self, request: &StepRequest, _: StepInput<'_>) -> Result<StepOutput, String> {
        assert_ne!(request.step_id, self.at, "a defect of the engine");
        Ok(StepOutput::Tokens { sampled: vec![], scored: vec![] })
    }

    fn nan_scores(&self) -> u64 {
        0
    }
}

/// Runs as many empty steps on the only stage of a pipeline; also says whether the engine came back.
fn run(engine: impl Engine + 'static, count: u64) -> (Vec<v1::StepResult>, bool) {
    let contract = StageContract {
        stage: 0,
        stages: 1,
        layers: 0..1,
        hidden_size: 4,
        hidden_dtype: HiddenDtype::F32,
        index_topk: 2,
        index_dtype: IndexDtype::I32,
        row_capacity: 8,
        block_size: 4,
        receives_from_layer: None,
        sends_from_layer: None,
        config_digest: String::new(),
    };
    let (timeout, totals) = (Duration::from_secs(1), Arc::new(Totals::new()));
    let traces = StepTraces::default();
    let runner = Runner::new(1, contract, Box::new(engine), 4, None, None, timeout, totals, traces);
    let (queue, steps) = mpsc::channel(8);
    for step_id in 1..=count {
        let step = v1::Step { epoch: 1, step_id, padding_rows: 1, ..Default::default() };
        queue.try_send(Arrived::now(step)).unwrap();
    }
    drop(queue);
    let (results, mut answers) = mpsc::channel(8);
    let engine = std::thread::spawn(move || runner.run(steps, &results)).join().unwrap();
    (std::iter::from_fn(|| answers.try_recv().ok()).collect(), engine.is_some())
}

#[test]
fn a_panic_of_the_engine_is_a_failure_like_any_other() {
    let (results, engine) = run(Panicking { at: 2 }, 3);
    assert!(!engine, "what a panic leaves behind is not used again");
    assert_eq!(results.len(), 3, "every step is answered");
    assert_eq!(results[0].failure, None);
    let second = results[1].failure.as_ref().unwrap();
    assert_eq!(second.kind, "panic");
    assert!(second.message.contains("stage 0, step 2"), "{}", second.message);
    let third = results[2].failure.as_ref().unwrap();
    assert_eq!(third.kind, "epoch-failed");
    assert!(third.message.contains("step 2"), "{}", third.message);
}

#[test]
fn a_sound_engine_comes_back() {
    let (results, engine) = run(Panicking { at: 9 }, 3);
    assert!(engine && results.iter().all(|result| result.failure.is_none()), "{results:?}");
}
