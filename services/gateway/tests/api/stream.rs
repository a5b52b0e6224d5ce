use baton_coordinator::{Event, FinishReason};
use serde_json::{Value, json};

use crate::fake::{Server, chunks, encode, says, token};

const PATH: &str = "/v1/completions";

fn text_of(chunks: &[Value], index: u64) -> String {
    chunks
        .iter()
        .flat_map(|c| c["choices"].as_array().unwrap())
        .filter(|c| c["index"] == index)
        .filter_map(|c| c["text"].as_str())
        .collect()
}

#[tokio::test]
async fn characters_of_several_tokens_come_whole() {
    let text = "né 🦀🦀 中文 👩\u{200d}🚀 end";
    let server = Server::saying(text).await;
    let all = chunks(server.stream(PATH, json!({"prompt": "x", "stream": true})).await);
    assert!(all.len() > 3);
    assert!(all.iter().all(|c| !c.to_string().contains('\u{fffd}')));
    assert_eq!(text_of(&all, 0), text);
    assert_eq!(all.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn an_unfinished_character_at_the_end_is_shown_as_the_tokenizer_shows_it() {
    let server = Server::scripted(|_| {
        let mut crab = encode("a🦀");
        crab.pop();
        let events = crab.into_iter().map(token);
        events.chain([Event::Finished(FinishReason::Length)]).collect()
    })
    .await;
    let all = chunks(server.stream(PATH, json!({"prompt": "x", "stream": true})).await);
    assert_eq!(text_of(&all, 0), "a\u{fffd}");
}

#[tokio::test]
async fn stream_and_whole_answer_agree() {
    let server = Server::model().await;
    for extra in [
        json!({}),
        json!({"stop": ["question", "river"]}),
        json!({"logprobs": 2}),
        json!({"logprobs": 2, "echo": true, "stop": ["sea"]}),
        json!({"echo": true, "n": 3}),
    ] {
        let mut body = json!({"prompt": ["One ", "Two "], "max_tokens": 24, "seed": 3, "return_token_ids": true});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let whole = server.ok(PATH, body.clone()).await;
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let all = chunks(server.stream(PATH, body).await);
        assert_eq!(all.last().unwrap()["usage"], whole["usage"]);
        for choice in whole["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap();
            assert_eq!(choice["text"], text_of(&all, index), "{extra}");
            let mine: Vec<&Value> = all
                .iter()
                .flat_map(|c| c["choices"].as_array().unwrap())
                .filter(|c| c["index"] == index)
                .collect();
            assert_eq!(mine.last().unwrap()["finish_reason"], choice["finish_reason"]);
            let joined = |path: &dyn Fn(&Value) -> &Value| -> Value {
                mine.iter().filter_map(|c| path(c).as_array()).flatten().cloned().collect()
            };
            assert_eq!(joined(&|c| &c["token_ids"]), choice["token_ids"]);
            if !choice["logprobs"].is_null() {
                for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                    assert_eq!(
                        joined(&|c| &c["logprobs"][name]),
                        choice["logprobs"][name],
                        "{name}"
                    );
                }
            }
        }
    }
}

#[tokio::test]
async fn a_stop_string_never_shows_in_a_stream_not_even_in_part() {
    let server = Server::saying("Hello\n\nHum\n\nHuman: no").await;
    let body = json!({"prompt": "x", "stream": true, "stop": "\n\nHuman:"});
    let all = chunks(server.stream(PATH, body).await);
    assert_eq!(text_of(&all, 0), "Hello\n\nHum");
    assert_eq!(all.last().unwrap()["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn a_failure_before_the_first_token_is_an_http_error() {
    for (retryable, status) in [(true, 503), (false, 500)] {
        for stream in [true, false] {
            let server = Server::scripted(move |_| {
                vec![Event::Failed { message: "stage 2 is gone".into(), retryable }]
            })
            .await;
            let response = server.post(PATH, json!({"prompt": "x", "stream": stream})).await;
            assert_eq!(response.status(), status);
            assert_eq!(response.headers().contains_key("retry-after"), retryable);
            let body: Value = response.json().await.unwrap();
            assert_eq!(body["error"]["message"], "stage 2 is gone");
            assert_eq!(body["error"]["type"], "server_error");
        }
    }
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_an_event_and_no_end_mark() {
    let server = Server::scripted(|_| {
        let mut events = says("Hello", FinishReason::Length);
        events.pop();
        events.push(Event::Failed { message: "stage 2 is gone".into(), retryable: true });
        events
    })
    .await;
    let lines = server.stream(PATH, json!({"prompt": "x", "stream": true})).await;
    let (last, before) = lines.split_last().unwrap();
    assert!(!before.is_empty() && lines.iter().all(|l| l != "[DONE]"));
    let last: Value = serde_json::from_str(last).unwrap();
    assert_eq!(last["error"]["message"], "stage 2 is gone");
}

#[tokio::test]
async fn a_coordinator_that_forgets_a_request_is_an_error_not_a_silent_end() {
    let server = Server::scripted(|_| vec![]).await;
    let response = server.post(PATH, json!({"prompt": "x"})).await;
    assert_eq!(response.status(), 503);
    let server = Server::scripted(|_| vec![token(70)]).await;
    let lines = server.stream(PATH, json!({"prompt": "x", "stream": true})).await;
    assert!(lines.last().unwrap().contains("\"error\""), "{lines:?}");
}
