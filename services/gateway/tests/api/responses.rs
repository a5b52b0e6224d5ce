use baton_coordinator::FinishReason;
use serde_json::{Value, json};

use crate::fake::{Server, encode, says};

const PATH: &str = "/v1/responses";
const TEXT: &str = "Hm</think>Look:<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>\
    <tool_call>f</tool_call>";

fn function() -> Value {
    json!([{"type": "function", "name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}])
}

#[tokio::test]
async fn a_response_has_an_item_for_each_thing_said() {
    let server = Server::scripted(|_| says(TEXT, FinishReason::Stop)).await;
    let body = json!({"input": "Hi", "tools": function(), "instructions": "Be brief."});
    let answer = server.ok(PATH, body).await;
    let prompt = server.request(0).prompt;
    let shown = encode("<|system|>Be brief.<|user|>Hi<|assistant|><think>");
    assert!(prompt.ends_with(&shown), "instructions come first");
    assert_eq!((&answer["object"], &answer["status"]), (&json!("response"), &json!("completed")));
    let output = answer["output"].as_array().unwrap();
    let kinds: Vec<&Value> = output.iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
    assert_eq!(output[0]["content"][0]["text"], "Hm");
    assert_eq!(output[1]["content"][0]["text"], "Look:");
    assert_eq!(output[2]["arguments"], "{\"a\": 1}");
    let usage = &answer["usage"];
    assert_eq!(usage["input_tokens"], prompt.len());
    assert_eq!(usage["output_tokens"], encode(TEXT).len());
    assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], encode("Hm</think>").len());
}

#[tokio::test]
async fn a_conversation_comes_back_item_by_item() {
    let server = Server::saying("x").await;
    let input = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"a\": 1}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]);
    let answer = server.ok(PATH, json!({"input": input, "max_output_tokens": 5})).await;
    let prompt = server.request(0).prompt;
    let expected = "[gMASK]<sop><|user|>A<|assistant|><think>R</think><tool_call>f<arg_key>a</arg_key>\
        <arg_value>1</arg_value></tool_call><|observation|><tool_response>42</tool_response>\
        <|assistant|><think>";
    assert_eq!(prompt, encode(expected));
    assert_eq!(server.request(0).max_tokens, 5);
    assert_eq!(answer["status"], "incomplete");
    assert_eq!(answer["incomplete_details"]["reason"], "max_output_tokens");
}

#[tokio::test]
async fn events_tell_the_same_as_the_whole() {
    let server = Server::scripted(|_| says(TEXT, FinishReason::Stop)).await;
    let body = json!({"input": "Hi", "tools": function(), "stream": true});
    let lines = server.stream(PATH, body).await;
    let events: Vec<Value> = lines.iter().map(|l| serde_json::from_str(l).unwrap()).collect();
    for (nth, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], nth);
    }
    let named = |name: &str| events.iter().filter(|e| e["type"] == name).collect::<Vec<_>>();
    assert_eq!(events[0]["type"], "response.created");
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    let items: Vec<Value> =
        named("response.output_item.done").iter().map(|e| e["item"].clone()).collect();
    assert_eq!(last["response"]["output"], json!(items));
    assert_eq!(items.len(), 4);
    for (at, added) in named("response.output_item.added").iter().enumerate() {
        assert_eq!(added["output_index"], at);
        assert_eq!(added["item"]["id"], items[at]["id"]);
    }
    let deltas = |name: &str| {
        let texts: Vec<&str> = named(name).iter().map(|e| e["delta"].as_str().unwrap()).collect();
        texts.concat()
    };
    assert_eq!(deltas("response.output_text.delta"), "Look:");
    assert_eq!(deltas("response.reasoning_text.delta"), "Hm");
    assert_eq!(deltas("response.function_call_arguments.delta"), "{\"a\": 1}{}");
}

#[tokio::test]
async fn what_is_not_kept_or_built_is_refused() {
    let server = Server::saying("x").await;
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": "x", "previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"input": "x", "background": true}), "background"),
        (json!({"input": "x", "tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "input[0].content[0].type",
        ),
    ] {
        let response = server.post(PATH, body).await;
        assert_eq!(response.status(), 400);
        let error: Value = response.json().await.unwrap();
        assert_eq!(error["error"]["param"], param, "{error}");
    }
    let embeddings = server.post("/v1/embeddings", json!({"input": "x"})).await;
    assert_eq!(embeddings.status(), 400);
    let error: Value = embeddings.json().await.unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("embeddings"));
}
