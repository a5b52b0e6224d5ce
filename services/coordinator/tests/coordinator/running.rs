//! Once the pipeline is wired.

use std::time::{Duration, Instant};

use baton_coordinator::{Event, FinishReason, GenerateRequest, SubmitError};
use baton_proto::v1::stage_order::Order;
use serde_json::json;
use tokio::sync::mpsc;

use crate::fake_stage::{Behaviour, Fixture, failure, last, request};

const SOON: Duration = Duration::from_secs(8);

#[tokio::test]
async fn a_request_ends_with_its_last_token_and_its_trace_reaches_every_stage() {
    let fixture = Fixture::start(2).await;
    let (traces, mut found) = mpsc::unbounded_channel();
    let _a = fixture.join_as(0, Behaviour::Sound, "digest", "cpu", Some(traces.clone())).await;
    let _b = fixture.join_as(1, Behaviour::Sound, "digest", "cpu", Some(traces)).await;
    fixture.ready().await;
    let traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned();
    let traced = GenerateRequest { traceparent: traceparent.clone(), ..request(5) };
    let events = fixture.handle.submit(traced).unwrap();
    assert_eq!(last(events, SOON).await, Some(Event::Finished(FinishReason::Length)));
    // Five tokens: one step with the prompt and four of one row, on both stages.
    for _ in 0..10 {
        assert_eq!(found.recv().await.as_ref(), Some(&traceparent));
    }
}

#[tokio::test]
async fn the_last_steps_tell_what_every_stage_did_and_outlive_the_pipeline() {
    let (fixture, members) = Fixture::wired(2, 0, Behaviour::Sound).await;
    let done = last(fixture.submit(5), SOON).await;
    assert_eq!(done, Some(Event::Finished(FinishReason::Length)));
    members[1].vanish();
    fixture.unready().await;
    let shown = fixture.handle.timeline().last(64);
    // One without rows may follow, in which the stages forget the sequence.
    let steps = &shown["steps"].as_array().unwrap()[..5];
    let rows: Vec<_> = steps.iter().map(|step| step["rows"].as_u64().unwrap()).collect();
    assert_eq!(rows, [3, 1, 1, 1, 1]);
    for (i, step) in steps.iter().enumerate() {
        assert_eq!((&step["epoch"], &step["step"]), (&json!(1), &json!(i + 1)));
        let took = step["answered"].as_u64().unwrap() - step["sent"].as_u64().unwrap();
        assert!(took >= 5000, "a stage takes 5 ms: {step}");
        for (stage, compute) in step["stages"].as_array().unwrap().iter().zip([5000, 5001]) {
            assert_eq!(stage["compute"], compute, "{step}");
        }
    }
}

#[tokio::test]
async fn more_than_may_wait_are_refused_and_places_come_free() {
    let (fixture, _members) = Fixture::wired(1, 0, Behaviour::Sound).await;
    let running = fixture.submit(190);
    // It takes a moment until it runs and its place in the queue is free.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let waiting = [fixture.submit(3), fixture.submit(3)];
    let refused = fixture.handle.submit(request(3)).unwrap_err();
    assert_eq!(refused, SubmitError::Busy { waiting: 2, limit: 2 });
    drop(running);
    for events in waiting {
        assert_eq!(last(events, SOON).await, Some(Event::Finished(FinishReason::Length)));
    }
    assert_eq!(last(fixture.submit(3), SOON).await, Some(Event::Finished(FinishReason::Length)));
}

#[tokio::test]
async fn a_stage_that_stops_answering_is_named_with_the_step() {
    let (fixture, _members) = Fixture::wired(3, 1, Behaviour::HangsInSteps).await;
    let message = failure(fixture.submit(5), SOON).await;
    assert!(message.starts_with("stage 1 has not answered step 1 for "), "{message}");
    assert!(message.ends_with("the last step it answered is 0"), "{message}");
}

#[tokio::test]
async fn a_failed_step_names_its_stage_and_the_pipeline_comes_back() {
    let (fixture, _members) = Fixture::wired(2, 0, Behaviour::FailsSteps).await;
    for epoch in 2..4 {
        let message = failure(fixture.submit(5), SOON).await;
        assert_eq!(message, "stage 0 failed (stale-carry): rows of step 3");
        fixture.epoch(epoch).await;
    }
    let state = fixture.handle.pipeline().await;
    assert_eq!((&state["failure"], &state["stages"][0]["state"]), (&json!(null), &json!("wired")));
}

#[tokio::test]
async fn a_request_that_fails_every_pipeline_ends() {
    let fixture = Fixture::patient(2, SOON).await;
    let _a = fixture.join(0, Behaviour::FailsSteps).await;
    let _b = fixture.join(1, Behaviour::Sound).await;
    fixture.ready().await;
    assert_eq!(
        failure(fixture.submit(5), SOON).await,
        "the pipeline failed 4 times while it computed this request, at last because stage 0 failed (stale-carry): \
         rows of step 3"
    );
    fixture.epoch(5).await;
}

#[tokio::test]
async fn a_stage_that_vanishes_ends_requests_that_may_not_wait() {
    let (fixture, members) = Fixture::wired(2, 0, Behaviour::Sound).await;
    let events = fixture.submit(190);
    tokio::time::sleep(Duration::from_millis(100)).await;
    members[1].vanish();
    let message = failure(events, SOON).await;
    assert!(message.starts_with("stage 1 was lost: "), "{message}");
    let reason = fixture.unready().await;
    assert_eq!(reason, format!("{message}; waiting for stage 1 to join"));
    let state = fixture.handle.pipeline().await;
    assert_eq!(state["failure"], message.as_str());
    assert_eq!(
        (&state["stages"][0]["state"], &state["stages"][1]["state"]),
        (&json!("joined"), &json!("absent"))
    );
    let late = fixture.handle.submit(request(1)).unwrap_err();
    assert_eq!(late, SubmitError::NotReady(reason));
}

/// All tokens of a request that must end well.
async fn text(mut events: mpsc::UnboundedReceiver<Event>) -> Vec<u32> {
    let (mut tokens, mut end) = (Vec::new(), None);
    let all = async {
        while let Some(event) = events.recv().await {
            match event {
                Event::Token { token, .. } => tokens.push(token.token),
                Event::Admitted { .. } => assert!(tokens.is_empty(), "admitted once"),
                other => end = Some(other),
            }
        }
    };
    tokio::time::timeout(SOON, all).await.unwrap();
    assert_eq!(end, Some(Event::Finished(FinishReason::Length)));
    tokens
}

#[tokio::test]
async fn a_stage_that_dials_again_takes_its_place_and_no_request_is_lost() {
    let fixture = Fixture::patient(2, SOON).await;
    let _first = fixture.join(0, Behaviour::Sound).await;
    let second = fixture.join(1, Behaviour::Sound).await;
    fixture.ready().await;
    let undisturbed = text(fixture.submit(60)).await;
    let (running, waiting) = (fixture.submit(60), fixture.submit(60));
    tokio::time::sleep(Duration::from_millis(200)).await;
    second.vanish();
    let _again = fixture.join(1, Behaviour::Sound).await;
    assert_eq!((text(running).await, text(waiting).await), (undisturbed.clone(), undisturbed));
    fixture.epoch(2).await;
}

#[tokio::test]
async fn one_that_stands_by_takes_the_place_of_a_lost_stage() {
    let fixture = Fixture::patient(2, SOON).await;
    let standby = fixture.join(2, Behaviour::Sound).await;
    assert!(matches!(standby.order, Order::Standby(_)), "{:?}", standby.order);
    let first = fixture.join(0, Behaviour::Sound).await;
    let _second = fixture.join(1, Behaviour::Sound).await;
    fixture.ready().await;
    assert_eq!(fixture.handle.pipeline().await["standbys"], 1);
    let events = fixture.submit(60);
    tokio::time::sleep(Duration::from_millis(100)).await;
    first.vanish();
    fixture.epoch(2).await;
    assert_eq!(text(events).await.len(), 60);
    assert_eq!(fixture.handle.pipeline().await["standbys"], 0);
}

#[tokio::test]
async fn requests_wait_no_longer_than_they_may() {
    let fixture = Fixture::patient(1, Duration::from_secs(1)).await;
    let only = fixture.join(0, Behaviour::Sound).await;
    fixture.ready().await;
    let events = fixture.submit(190);
    tokio::time::sleep(Duration::from_millis(100)).await;
    only.vanish();
    let message = failure(events, SOON).await;
    assert!(message.ends_with("; the pipeline did not come back within 1s"), "{message}");
    let _again = fixture.join(0, Behaviour::Sound).await;
    fixture.epoch(2).await;
    assert_eq!(text(fixture.submit(3)).await.len(), 3);
}

#[tokio::test]
async fn a_status_that_is_not_answered_delays_no_step() {
    let (fixture, _members) = Fixture::wired(1, 0, Behaviour::HangsInStatus).await;
    let begun = Instant::now();
    let mut events = fixture.submit(190);
    let (mut longest, mut last) = (Duration::ZERO, Instant::now());
    while let Some(event) = events.recv().await {
        assert!(!matches!(event, Event::Failed { .. }), "{event:?}");
        longest = longest.max(last.elapsed());
        last = Instant::now();
    }
    // Steps of 5 ms; a status request is due every second and given up after one.
    assert!(begun.elapsed() > Duration::from_millis(900), "{:?}", begun.elapsed());
    assert!(longest < Duration::from_millis(900), "a token took {longest:?}");
}

#[tokio::test]
async fn a_token_that_does_not_come_ends_its_request_and_no_other() {
    let (fixture, _members) = Fixture::wired(2, 1, Behaviour::ForgetsTokenAfter(5)).await;
    let message = failure(fixture.submit(9), SOON).await;
    assert_eq!(
        message,
        "step 3: the last stage answered with 0 tokens and 0 scores, expected 1 and 0"
    );
    assert_eq!(last(fixture.submit(2), SOON).await, Some(Event::Finished(FinishReason::Length)));
}

#[tokio::test]
async fn a_shutdown_tells_running_and_waiting_requests() {
    let (fixture, _members) = Fixture::wired(1, 0, Behaviour::Sound).await;
    let requests = [fixture.submit(190), fixture.submit(190)];
    tokio::time::sleep(Duration::from_millis(50)).await;
    fixture.shutdown.cancel();
    for events in requests {
        assert_eq!(failure(events, SOON).await, "the server is shutting down");
    }
    fixture.task.await.unwrap().unwrap();
}
