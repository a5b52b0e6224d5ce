//! `/metrics`: every choice is counted once, by how it ended.

use std::time::Duration;

use baton_coordinator::request::Submission;
use baton_coordinator::{Event, FinishReason, Readiness};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::fake::{Server, config, encode, token};

const PATH: &str = "/v1/completions";
const SOON: Duration = Duration::from_secs(10);

/// The value of a series; none when it is not there.
async fn value(server: &Server, series: &str) -> Option<f64> {
    let response = server.get("/metrics").await;
    let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
    assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
    let text = response.text().await.unwrap();
    let mut values = text.lines().filter_map(|line| line.strip_prefix(&format!("{series} ")));
    values.next().map(|value| value.parse().unwrap())
}

async fn outcome(server: &Server, outcome: &str) -> f64 {
    value(server, &format!("baton_requests_total{{outcome=\"{outcome}\"}}")).await.unwrap()
}

#[tokio::test]
async fn every_choice_is_counted_by_how_it_ended() {
    let (server, mut submissions) = Server::raw(config(), 8).await;
    let answering = async {
        for events in [
            vec![Event::Admitted { cached_tokens: 0 }, token(70), token(71), token(72)],
            vec![Event::Expired],
            vec![Event::Failed { message: "a stage was lost".into(), retryable: true }],
        ] {
            let submission = submissions.recv().await.unwrap();
            let last = matches!(events.last(), Some(Event::Token { .. }));
            for event in events {
                submission.events.send(event).unwrap();
            }
            if last {
                submission.events.send(Event::Finished(FinishReason::Length)).unwrap();
            }
        }
        // Its text ends at a stop string before the scheduler knows.
        let stopped = submissions.recv().await.unwrap();
        for event in encode("Hello there!").into_iter().map(token) {
            let _ = stopped.events.send(event);
        }
    };
    let asking = async {
        let body = json!({"prompt": [1, 2, 3, 4, 5], "max_tokens": 3});
        assert_eq!(server.post(PATH, body).await.status(), 200);
        assert_eq!(server.post(PATH, json!({"prompt": "x", "timeout": 9})).await.status(), 504);
        assert_eq!(server.post(PATH, json!({"prompt": "x"})).await.status(), 503);
        server.ok(PATH, json!({"prompt": "x", "stop": "there"})).await;
    };
    tokio::join!(answering, asking);
    for (name, count) in [("length", 1.0), ("expired", 1.0), ("failed", 1.0), ("stop", 1.0)] {
        assert_eq!(outcome(&server, name).await, count, "{name}");
    }
    for (series, expected) in [
        ("baton_prompt_tokens_total", 5.0),
        ("baton_request_prompt_tokens_sum", 5.0),
        ("baton_request_queue_time_seconds_count", 1.0),
        ("baton_time_to_first_token_seconds_count", 2.0),
        ("baton_request_duration_seconds_count", 2.0),
    ] {
        assert_eq!(value(&server, series).await, Some(expected), "{series}");
    }
    let generated = value(&server, "baton_generation_tokens_total").await.unwrap();
    let between = value(&server, "baton_inter_token_latency_seconds_count").await.unwrap();
    assert!(generated >= 4.0, "{generated}");
    assert_eq!(between, generated - 2.0);
}

#[tokio::test]
async fn who_goes_away_or_is_not_let_in_is_counted_too() {
    let (server, mut submissions) = Server::raw(config(), 8).await;
    let body = json!({"prompt": "x", "n": 2});
    let sending =
        tokio::spawn(server.client.post(format!("{}{PATH}", server.url)).json(&body).send());
    let Submission { events: first, .. } = submissions.recv().await.unwrap();
    let Submission { events: second, .. } = submissions.recv().await.unwrap();
    sending.abort();
    timeout(SOON, first.closed()).await.unwrap();
    timeout(SOON, second.closed()).await.unwrap();
    let cancelled = async {
        while outcome(&server, "cancelled").await < 2.0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, cancelled).await.unwrap();
    server.readiness.send(Readiness::NotReady("a stage is missing".into())).unwrap();
    assert_eq!(server.post(PATH, json!({"prompt": "x"})).await.status(), 503);
    assert_eq!(
        (outcome(&server, "rejected").await, outcome(&server, "cancelled").await),
        (1.0, 2.0)
    );
}

#[tokio::test]
async fn a_scraper_finds_the_stages_that_answer_it() {
    let server = Server::saying("x").await;
    let targets: Value = server.get("/metrics/targets").await.json().await.unwrap();
    let expected = json!([{"targets": ["10.0.0.7:9100"], "labels": {"__meta_baton_stage": "1"}}]);
    assert_eq!(targets, expected);
}
