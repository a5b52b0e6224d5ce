//! Steps through stages in this process.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use baton_proto::v1;
use baton_transport::HandOff;
use baton_transport::link::HandOffSender as _;

use crate::harness::{Stage, Steps, TOPK, contract, hand_off, padding_only, step};

/// Prompt of the tests, far longer than `index_topk`.
fn prompt() -> Vec<u32> {
    (0..40).map(|i| i * 7 % 290).collect()
}

/// Stages that are wired to each other, each with its stream of steps.
struct Pipeline {
    stages: Vec<Stage>,
    streams: Vec<Steps>,
}

impl Pipeline {
    async fn start(counts: &[usize]) -> Self {
        let contract = contract(counts);
        let mut stages = Vec::new();
        for index in 0..counts.len() {
            stages.push(Stage::load(&contract, index).await);
        }
        let wiring = stages.iter().enumerate().map(|(i, stage)| stage.wire(stages.get(i + 1)));
        for wired in futures::future::join_all(wiring).await {
            wired.unwrap();
        }
        let mut streams = Vec::new();
        for stage in &stages {
            streams.push(stage.run().await);
        }
        Self { stages, streams }
    }

    /// Results of all stages, none of which may fail.
    async fn step(&mut self, step: &v1::Step) -> Vec<v1::StepResult> {
        for stream in &self.streams {
            stream.send(step).await;
        }
        let mut results = Vec::new();
        for stream in &mut self.streams {
            let result = stream.result().await;
            assert_eq!(result.failure, None);
            results.push(result);
        }
        results
    }

    /// Token ids and log-probabilities of a greedy answer; every step has so many padding rows.
    async fn generate(&mut self, first_step: u64, padding: u32) -> Vec<v1::Sampled> {
        let mut tokens = prompt();
        let mut sampled = Vec::new();
        let mut start = 0;
        for step_id in first_step..first_step + 8 {
            let step = step(step_id, start, &tokens[start..], padding);
            let rows = tokens.len() - start;
            let long = tokens.len() - start.max(TOPK);
            let mut results = self.step(&step).await;
            if results.len() > 1 {
                // Handoff case 7: padding rows are sent along, and nothing is carried for them.
                assert_eq!(results[0].carry_rows as usize, long, "{rows} rows");
                let bytes = (rows + padding as usize) * 64 * 4 + long * TOPK * 4;
                assert_eq!(results[0].handoff_bytes as usize, bytes, "{rows} rows");
            }
            let mut answers = results.pop().unwrap().sampled;
            assert_eq!(answers.len(), 1);
            start = tokens.len();
            tokens.push(answers[0].token_id);
            sampled.append(&mut answers);
        }
        sampled
    }
}

#[tokio::test]
async fn two_stages_answer_as_one_with_and_without_padding() {
    let whole = Pipeline::start(&[10]).await.generate(1, 0).await;
    let different: std::collections::BTreeSet<u32> = whole.iter().map(|s| s.token_id).collect();
    assert!(different.len() > 1, "a constant answer tells nothing: {whole:?}");
    for padding in [0, 5] {
        let cut = Pipeline::start(&[4, 6]).await.generate(1, padding).await;
        assert_eq!(cut, whole, "{padding} rows of padding");
    }
}

/// What warming up, profiling or capturing a graph would run: rows that belong to no sequence.
#[tokio::test]
async fn case_06_warm_up_batches_take_the_way_of_real_steps() {
    let whole = Pipeline::start(&[10]).await.generate(1, 0).await;
    let mut cut = Pipeline::start(&[4, 6]).await;
    for step_id in 1..4 {
        let results = cut.step(&padding_only(step_id, 32)).await;
        assert_eq!((results[0].carry_rows, results[0].handoff_bytes), (0, 32 * 64 * 4));
        assert!(results[1].sampled.is_empty() && results[1].prompt_scores.is_empty());
    }
    // The second stage received them over the link, and they left nothing behind.
    assert_eq!(cut.stages[1].status().await.handoff_bytes_received, 3 * 32 * 64 * 4);
    assert_eq!(cut.generate(4, 0).await, whole);
}

#[tokio::test]
async fn case_11_a_step_without_rows_passes_every_stage() {
    let whole = Pipeline::start(&[10]).await.generate(1, 0).await;
    // The second stage holds shared layers only: it relays a carry of no rows.
    let mut cut = Pipeline::start(&[4, 1, 5]).await;
    for result in cut.step(&padding_only(1, 0)).await {
        assert_eq!((result.handoff_bytes, result.carry_rows, result.sampled.len()), (0, 0, 0));
    }
    assert_eq!(cut.generate(2, 0).await, whole);
}

#[tokio::test]
async fn the_parts_of_a_step_lie_one_after_the_other_on_the_wall_clock() {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64;
    let mut cut = Pipeline::start(&[4, 6]).await;
    let before = now();
    let results = cut.step(&step(1, 0, &prompt(), 0)).await;
    let after = now();
    let times: Vec<_> = results.iter().map(|result| result.times.unwrap()).collect();
    let ends = |t: &v1::StepTimes| {
        let parts = [t.queue_wait, t.receive_wait, t.compute, t.send];
        t.arrived_unix_micros + parts.into_iter().map(u64::from).sum::<u64>()
    };
    for t in &times {
        assert!(before <= t.arrived_unix_micros && ends(t) <= after, "{before} {t:?} {after}");
        assert!(t.compute > 0, "{t:?}");
    }
    assert_eq!((times[0].receive_wait, times[1].send), (0, 0));
    // The second stage waits for the first, and computes after it.
    assert!(times[1].receive_wait > 0, "{times:?}");
    assert!(ends(&times[1]) - u64::from(times[1].compute) >= times[0].arrived_unix_micros);
}

/// Runs one step on the second of two stages with this hand-off from the test.
async fn second_stage_refuses(step: &v1::Step, hand_off: HandOff) -> (String, String) {
    let stage = Stage::load(&contract(&[4, 6]), 1).await;
    let mut link = stage.wire_to_test().await;
    let mut steps = stage.run().await;
    steps.send(step).await;
    link.send(hand_off, Instant::now() + Duration::from_secs(5)).unwrap();
    let failure = steps.failure().await;
    assert!(stage.is_running(), "a bad hand-off must not end the process");
    failure
}

#[tokio::test]
async fn case_06_warm_up_batches_without_a_carry_are_refused() {
    let warm_up = padding_only(1, 32);
    let bare = HandOff { carry: None, ..hand_off(1, 32, 0) };
    let (kind, message) = second_stage_refuses(&warm_up, bare).await;
    assert_eq!(kind, "missing-carry");
    for word in ["stage 1", "step 1", "layer 4", "layer 2"] {
        assert!(message.contains(word), "no {word:?}: {message}");
    }
    // Index rows of a dummy buffer, one per padding row.
    let (kind, message) = second_stage_refuses(&warm_up, hand_off(1, 32, 32)).await;
    assert_eq!(kind, "carry-size");
    assert!(message.contains("needs 0 index entries") && message.contains("256"), "{message}");
}

#[tokio::test]
async fn after_a_failed_step_nothing_later_is_answered() {
    let stage = Stage::load(&contract(&[4, 6]), 1).await;
    let mut link = stage.wire_to_test().await;
    let mut steps = stage.run().await;
    let soon = || Instant::now() + Duration::from_secs(5);
    steps.send(&step(1, 0, &prompt(), 0)).await;
    link.send(HandOff { carry: None, ..hand_off(1, 40, 0) }, soon()).unwrap();
    assert_eq!(steps.failure().await.0, "missing-carry");
    // The next step's hand-off is sound, but this stage has not seen the prompt.
    steps.send(&step(2, 40, &[1], 0)).await;
    link.send(hand_off(2, 1, 1), soon()).unwrap();
    let (kind, message) = steps.failure().await;
    assert_eq!(kind, "epoch-failed");
    assert!(message.contains("step 1") && message.contains("layer 2"), "{message}");
}

#[tokio::test]
async fn steps_that_cannot_be_are_refused_by_their_numbers() {
    let too_many: Vec<u32> = vec![1; 65];
    let mut unknown_block = step(1, 0, &prompt(), 0);
    unknown_block.segments[0].new_blocks = vec![0, 1, 64];
    let mut other_epoch = padding_only(1, 1);
    other_epoch.epoch = 7;
    for (step, words) in [
        (step(1, 0, &too_many, 0), ["65", "64"]),
        (unknown_block, ["64", "block"]),
        (other_epoch, ["7", "1"]),
    ] {
        let stage = Stage::load(&contract(&[10]), 0).await;
        stage.wire(None).await.unwrap();
        let mut steps = stage.run().await;
        steps.send(&step).await;
        let (kind, message) = steps.failure().await;
        assert_eq!(kind, "bad-step");
        for word in words {
            assert!(message.contains(word), "no {word:?}: {message}");
        }
    }
}
