use baton_coordinator::{Event, FinishReason, TokenLogprob};
use serde_json::{Value, json};

use crate::fake::{MAX_POSITIONS, Server, chunks, config, encode};

const PATH: &str = "/v1/chat/completions";

fn hello() -> Value {
    json!([{"role": "user", "content": "Hi"}])
}

#[tokio::test]
async fn a_chat_is_rendered_by_the_checkpoint_s_template() {
    let server = Server::saying("Hm</think>Hello").await;
    let answer = server.ok(PATH, json!({"model": "org/tiny", "messages": hello()})).await;
    let prompt = encode("[gMASK]<sop><|user|>Hi<|assistant|><think>");
    let request = server.request(0);
    assert_eq!(request.prompt, prompt);
    assert_eq!(request.max_tokens, MAX_POSITIONS - prompt.len());
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(
        answer["choices"],
        json!([{
            "index": 0,
            "message": {
                "role": "assistant", "content": "Hello", "refusal": null,
                "reasoning_content": "Hm",
            },
            "logprobs": null,
            "finish_reason": "length",
        }])
    );
    assert_eq!(answer["usage"]["prompt_tokens"], prompt.len());
}

#[tokio::test]
async fn template_variables_tools_and_continuation() {
    let server = Server::saying("x").await;
    let tools =
        json!([{"type": "function", "function": {"name": "wetter", "description": "天气"}}]);
    let body = json!({
        "messages": hello(), "tools": tools, "reasoning_effort": "high", "tool_choice": "auto",
    });
    server.ok(PATH, body).await;
    let body = json!({
        "messages": hello(), "tools": tools, "tool_choice": "none",
        "chat_template_kwargs": {"enable_thinking": false},
    });
    server.ok(PATH, body).await;
    let body = json!({
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Count"}]},
            {"role": "assistant", "content": "1, 2"},
        ],
        "continue_final_message": true, "add_generation_prompt": false,
    });
    server.ok(PATH, body).await;
    let tokenizer = |i: usize| server.request(i).prompt;
    let effort = "[gMASK]<sop><|system|>Effort: High<|system|>\n# Functions";
    assert!(tokenizer(0).starts_with(&encode(effort)[..8]));
    let json_line = encode("{\"name\": \"wetter\", \"description\": \"天气\"}");
    assert!(
        tokenizer(0).windows(json_line.len() - 2).any(|w| w == &json_line[1..json_line.len() - 1])
    );
    assert_eq!(tokenizer(1), encode("[gMASK]<sop><|user|>Hi<|assistant|><think></think>"));
    assert_eq!(tokenizer(2), encode("[gMASK]<sop><|user|>Count<|assistant|><think></think>1, 2"));
}

#[tokio::test]
async fn logprobs_have_their_own_shape_here() {
    let server = Server::scripted(|_| {
        let crab = encode("🦀");
        let entry = |token, logprob| TokenLogprob { token, logprob };
        let mut events: Vec<Event> = crab
            .into_iter()
            .map(|id| Event::Token {
                token: entry(id, -0.5),
                top: vec![entry(id, -0.5), entry(64, -2.0)],
            })
            .collect();
        events.push(Event::Finished(FinishReason::Length));
        events
    })
    .await;
    let body = json!({"messages": hello(), "logprobs": true, "top_logprobs": 2});
    let answer = server.ok(PATH, body).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let bytes: Vec<u8> = content
        .iter()
        .flat_map(|t| t["bytes"].as_array().unwrap())
        .map(|b| b.as_u64().unwrap() as u8)
        .collect();
    assert_eq!(bytes, "🦀".as_bytes());
    assert!(content.iter().all(|t| t["top_logprobs"].as_array().unwrap().len() == 2));
    assert_eq!(content[0]["top_logprobs"][1]["logprob"], -2.0);

    let answer = server.ok(PATH, json!({"messages": hello(), "logprobs": true})).await;
    assert_eq!(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
    let answer = server.ok(PATH, json!({"messages": hello()})).await;
    assert!(answer["choices"][0]["logprobs"].is_null());
}

#[tokio::test]
async fn a_streamed_chat_opens_with_the_role_and_closes_with_usage() {
    let server = Server::saying("Hm</think>Hello there!").await;
    let body = json!({
        "messages": hello(), "stream": true, "n": 2, "return_token_ids": true,
        "stream_options": {"include_usage": true},
    });
    let all = chunks(server.stream(PATH, body).await);
    let prompt = encode("[gMASK]<sop><|user|>Hi<|assistant|><think>");
    assert_eq!(all[0]["prompt_token_ids"], json!(prompt));
    for index in 0..2 {
        let mine: Vec<&Value> = all
            .iter()
            .flat_map(|c| c["choices"].as_array().unwrap())
            .filter(|c| c["index"] == index)
            .collect();
        assert_eq!(mine[0]["delta"], json!({"role": "assistant", "content": ""}));
        let text: String = mine.iter().filter_map(|c| c["delta"]["content"].as_str()).collect();
        assert_eq!(text, "Hello there!");
        let ids: Vec<Value> =
            mine.iter().filter_map(|c| c["token_ids"].as_array()).flatten().cloned().collect();
        assert_eq!(Value::from(ids), json!(encode("Hm</think>Hello there!")));
        let reasons: Vec<&Value> =
            mine.iter().map(|c| &c["finish_reason"]).filter(|r| !r.is_null()).collect();
        assert_eq!(reasons, ["length"]);
    }
    let (last, before) = all.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 2 * encode("Hm</think>Hello there!").len());
    assert_eq!(last["usage"]["prompt_tokens"], prompt.len());
    assert!(before.iter().all(|c| c["usage"].is_null() && c["object"] == "chat.completion.chunk"));
}

#[tokio::test]
async fn a_checkpoint_without_template_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let source = crate::fake::fixtures().join("tokenizer.json");
    std::fs::copy(source, dir.path().join("tokenizer.json")).unwrap();
    let mut config = config();
    config.model_dir = dir.path().to_owned();
    let server = Server::scripted_with(config, |_| vec![]).await;
    let response = server.post(PATH, json!({"messages": hello()})).await;
    assert_eq!(response.status(), 400);
    let error: Value = response.json().await.unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("chat template"), "{error}");
}

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    }}}])
}

const CALLS: &str = "I look.</think>Well<tool_call>weather<arg_key>city</arg_key><arg_value>12 \"x\"</arg_value>\
    <arg_key>days</arg_key><arg_value>12</arg_value></tool_call><tool_call>weather</tool_call>";

#[tokio::test]
async fn calls_are_taken_out_of_the_text_whole_and_streamed() {
    let server = Server::scripted(|_| crate::fake::says(CALLS, FinishReason::Stop)).await;
    let mut body = json!({"messages": hello(), "tools": weather()});
    let answer = server.ok(PATH, body.clone()).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["reasoning_content"], "I look.");
    assert_eq!(choice["message"]["content"], "Well");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls[0]["function"]["arguments"], r#"{"city": "12 \"x\"", "days": 12}"#);
    assert_eq!(calls[1]["function"], json!({"name": "weather", "arguments": "{}"}));
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    body["stream"] = true.into();
    let all = chunks(server.stream(PATH, body.clone()).await);
    let deltas: Vec<&Value> = all.iter().map(|c| &c["choices"][0]["delta"]).collect();
    let text = |name: &str| deltas.iter().filter_map(|d| d[name].as_str()).collect::<String>();
    assert_eq!((text("reasoning_content").as_str(), text("content").as_str()), ("I look.", "Well"));
    let parts: Vec<&Value> = deltas.iter().filter_map(|d| d["tool_calls"].get(0)).collect();
    for (index, whole) in calls.iter().enumerate() {
        let mine = parts.iter().filter(|p| p["index"] == index);
        let join = |name: &str| -> Vec<&str> {
            mine.clone().filter_map(|p| p["function"][name].as_str()).collect()
        };
        assert_eq!(join("name"), ["weather"], "a name comes once");
        assert_eq!(join("arguments").concat(), whole["function"]["arguments"].as_str().unwrap());
    }
    assert_eq!(all.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    body["stream"] = false.into();
    body["tool_choice"] = "none".into();
    let answer = server.ok(PATH, body).await;
    assert!(answer["choices"][0]["message"]["tool_calls"].is_null());
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn demanded_calls_and_formats_reach_the_pipeline_as_a_grammar() {
    let server = Server::saying("x").await;
    let named = json!({"type": "function", "function": {"name": "weather"}});
    let schema =
        json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}});
    for (fields, expected) in [
        (json!({}), false),
        (json!({"tools": weather()}), false),
        (json!({"tools": weather(), "tool_choice": "required"}), true),
        (json!({"tools": weather(), "tool_choice": named}), true),
        (json!({"response_format": {"type": "json_object"}}), true),
        (json!({"response_format": schema}), true),
        (json!({"response_format": {"type": "text"}}), false),
    ] {
        let mut body = json!({"messages": hello()});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        server.ok(PATH, body).await;
        let asked = server.requests.lock().unwrap().pop().unwrap();
        assert_eq!(asked.grammar.is_some(), expected, "{fields}");
    }
}
