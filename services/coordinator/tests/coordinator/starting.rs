//! Until the pipeline is wired.

use std::time::{Duration, Instant};

use baton_proto::v1::stage_order::Order;
use serde_json::json;

use crate::fake_stage::{Behaviour, Fixture};

#[tokio::test]
async fn a_stage_may_leave_and_return_before_all_have_joined() {
    let fixture = Fixture::start(2).await;
    let first = fixture.join(0, Behaviour::Sound).await;
    first.vanish();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let _back = fixture.join(0, Behaviour::Sound).await;
    let _other = fixture.join(1, Behaviour::Sound).await;
    fixture.ready().await;
}

#[tokio::test]
async fn the_state_of_a_start_shows_how_far_each_stage_is() {
    let fixture = Fixture::start(2).await;
    assert_eq!(fixture.unready().await, "waiting for stages 0, 1 to join");
    let _hanging = fixture.join(1, Behaviour::HangsInLoad).await;
    assert_eq!(fixture.unready().await, "waiting for stage 0 to join");
    let state = fixture.handle.pipeline().await;
    let stages = &state["stages"];
    assert_eq!((&stages[0]["state"], &stages[1]["state"]), (&json!("absent"), &json!("joined")));
    assert_eq!((&stages[1]["layers"], &stages[1]["full_layers"]), (&json!([1, 2]), &json!([1])));
    assert_eq!(stages[1]["backend"], "cpu");
    let _sound = fixture.join(0, Behaviour::Sound).await;
    for _ in 0..50 {
        if fixture.unready().await == "loading stage 1" {
            let state = fixture.handle.pipeline().await;
            assert_eq!(state["stages"][0]["state"], "loaded", "{state}");
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{}", fixture.unready().await);
}

#[tokio::test]
async fn stages_that_do_not_join_are_named_when_the_time_is_over() {
    let fixture = Fixture::start(3).await;
    let _joined = fixture.join(1, Behaviour::Sound).await;
    let error = fixture.task.await.unwrap().unwrap_err().to_string();
    assert_eq!(error, "1 of 3 stages joined within 3s: missing are stage 0, stage 2");
}

#[tokio::test]
async fn a_stage_that_takes_the_load_request_and_says_nothing_ends_the_start() {
    let fixture = Fixture::start(2).await;
    let begun = Instant::now();
    let _a = fixture.join(0, Behaviour::Sound).await;
    let _b = fixture.join(1, Behaviour::HangsInLoad).await;
    let error = fixture.task.await.unwrap().unwrap_err().to_string();
    assert_eq!(error, "stage 1: no progress in loading for 1s");
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_stage_that_dies_while_another_loads_is_not_waited_for() {
    let fixture = Fixture::start(2).await;
    let first = fixture.join(0, Behaviour::Sound).await;
    let _b = fixture.join(1, Behaviour::HangsInLoad).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    first.vanish();
    let error = fixture.task.await.unwrap().unwrap_err().to_string();
    assert!(error.starts_with("stage 0: "), "{error}");
}

#[tokio::test]
async fn a_stage_of_another_model_or_of_none_hears_why_it_is_refused() {
    let fixture = Fixture::start(1).await;
    for (digest, backend, expected) in [
        ("", "delay", "the stage has no model (backend \"delay\"), the coordinator serves one"),
        (
            "other",
            "cpu",
            "config digests differ: the stage has \"other\", the coordinator \"digest\"",
        ),
    ] {
        let member = fixture.join_as(0, Behaviour::Sound, digest, backend, None).await;
        match member.order {
            Order::Refused(refused) => assert_eq!(refused.reason, expected),
            other => panic!("{other:?}"),
        }
    }
    let welcome = fixture.join(0, Behaviour::Sound).await;
    assert!(matches!(welcome.order, Order::Welcome(_)), "{:?}", welcome.order);
}
