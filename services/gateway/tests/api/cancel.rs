use std::time::Duration;

use baton_coordinator::request::Submission;
use baton_coordinator::{Event, FinishReason};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::fake::{Server, config, encode, says, token};

const PATH: &str = "/v1/completions";
const SOON: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_client_that_leaves_a_stream_cancels_its_choices() {
    let (server, mut submissions) = Server::raw(config(), 8).await;
    let body = json!({"prompt": "x", "n": 2, "stream": true, "max_tokens": 100});
    let sending = server.client.post(format!("{}{PATH}", server.url)).json(&body).send();
    let answering = async {
        let first = submissions.recv().await.unwrap();
        let second = submissions.recv().await.unwrap();
        first.events.send(token(70)).unwrap();
        (first, second)
    };
    let (response, (first, second)) = tokio::join!(sending, answering);
    let mut body = response.unwrap().bytes_stream();
    assert!(body.next().await.unwrap().unwrap().starts_with(b"data: "));
    assert!(!first.events.is_closed() && !second.events.is_closed());
    drop(body);
    timeout(SOON, first.events.closed()).await.unwrap();
    timeout(SOON, second.events.closed()).await.unwrap();
}

#[tokio::test]
async fn a_client_that_leaves_a_whole_answer_cancels_it() {
    let (server, mut submissions) = Server::raw(config(), 8).await;
    let request = server.client.post(format!("{}{PATH}", server.url)).json(&json!({"prompt": "x"}));
    let sending = tokio::spawn(request.send());
    let Submission { events, .. } = submissions.recv().await.unwrap();
    events.send(token(70)).unwrap();
    sending.abort();
    timeout(SOON, events.closed()).await.unwrap();
}

#[tokio::test]
async fn a_stop_string_cancels_the_rest_of_the_generation() {
    let (server, mut submissions) = Server::raw(config(), 8).await;
    let asking = server.ok(PATH, json!({"prompt": "x", "stop": "there"}));
    let answering = async {
        let Submission { events, .. } = submissions.recv().await.unwrap();
        for event in encode("Hello there!").into_iter().map(token) {
            let _ = events.send(event);
        }
        // Nothing ends the request here but the gateway's dropped receiver.
        timeout(SOON, events.closed()).await.unwrap();
    };
    let (answer, ()) = tokio::join!(asking, answering);
    assert_eq!(answer["choices"][0]["text"], "Hello ");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn a_failed_choice_cancels_the_others() {
    let (server, mut submissions) = Server::raw(config(), 8).await;
    let asking = server.post(PATH, json!({"prompt": ["a", "b"]}));
    let answering = async {
        let first = submissions.recv().await.unwrap();
        let second = submissions.recv().await.unwrap();
        let failed = Event::Failed { message: "out of memory".into(), retryable: false };
        second.events.send(failed).unwrap();
        timeout(SOON, first.events.closed()).await.unwrap();
    };
    let (response, ()) = tokio::join!(asking, answering);
    assert_eq!(response.status(), 500);
}

#[tokio::test]
async fn a_full_queue_is_429_and_not_ready_is_503() {
    let (server, submissions) = Server::raw(config(), 1).await;
    let request = server.client.post(format!("{}{PATH}", server.url)).json(&json!({"prompt": "x"}));
    let waiting = tokio::spawn(request.send());
    while submissions.is_empty() {
        tokio::task::yield_now().await;
    }
    let response = server.post(PATH, json!({"prompt": "x"})).await;
    assert_eq!(response.status(), 429);
    assert_eq!(response.headers()["retry-after"], "1");
    let body: Value = response.json().await.unwrap();
    assert_eq!(body["error"]["type"], "rate_limit_error");
    waiting.abort();

    let reason = "stage 1 has not joined".to_owned();
    server.readiness.send(baton_coordinator::Readiness::NotReady(reason)).unwrap();
    let response = server.post(PATH, json!({"prompt": "x"})).await;
    assert_eq!(response.status(), 503);
    assert!(response.headers().contains_key("retry-after"));
    let body: Value = response.json().await.unwrap();
    assert!(body["error"]["message"].as_str().unwrap().contains("stage 1 has not joined"));
}

#[tokio::test]
async fn a_batch_larger_than_the_queue_is_served() {
    let (server, mut submissions) = Server::raw(config(), 2).await;
    let prompts: Vec<String> = (0..9).map(|i| i.to_string()).collect();
    let asking = server.ok(PATH, json!({"prompt": prompts}));
    let answering = async {
        for _ in 0..9 {
            let Submission { request, events, .. } = submissions.recv().await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
            for &id in &request.prompt {
                events.send(token(id)).unwrap();
            }
            events.send(Event::Finished(FinishReason::Stop)).unwrap();
        }
    };
    let (answer, ()) = tokio::join!(asking, answering);
    let choices = answer["choices"].as_array().unwrap();
    let texts: Vec<&str> = choices.iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, prompts);
}

#[tokio::test]
async fn shutdown_lets_running_requests_finish() {
    let (mut server, mut submissions) = Server::raw(config(), 8).await;
    let request = server.client.post(format!("{}{PATH}", server.url)).json(&json!({"prompt": "x"}));
    let asking = tokio::spawn(request.send());
    let Submission { events, .. } = submissions.recv().await.unwrap();
    server.shut_down();
    tokio::time::sleep(Duration::from_millis(50)).await;
    for event in says("late", FinishReason::Length) {
        events.send(event).unwrap();
    }
    assert_eq!(asking.await.unwrap().unwrap().status(), 200);
    timeout(SOON, server.serving).await.unwrap().unwrap().unwrap();
}
