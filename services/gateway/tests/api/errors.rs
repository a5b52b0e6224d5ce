use reqwest::{Method, Response};
use serde_json::{Value, json};

use crate::fake::{MAX_POSITIONS, Server};

/// Checks status and shape, and returns the error.
async fn error(response: Response, status: u16, context: &str) -> Value {
    let got = response.status();
    let text = response.text().await.unwrap();
    assert_eq!(got, status, "{context}: {text}");
    let body: Value =
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{context}: {e}: {text}"));
    let error = &body["error"];
    assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{context}: {text}");
    assert!(error["type"].is_string(), "{context}: {text}");
    let keys: Vec<&String> = error.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["message", "type", "param", "code"], "{context}");
    error.clone()
}

#[tokio::test]
async fn wrong_fields_are_400_and_named() {
    let server = Server::saying("x").await;
    let long = vec![1; MAX_POSITIONS + 1];
    let completions = [
        (json!({}), "prompt"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [[]]}), "prompt"),
        (json!({"prompt": ["a", ""]}), "prompt"),
        (json!({"prompt": {"a": 1}}), "prompt"),
        (json!({"prompt": [512]}), "prompt"),
        (json!({"prompt": [[1], [2, 99999]]}), "prompt[1]"),
        (json!({"prompt": long}), "prompt"),
        (json!({"prompt": "x", "max_tokens": MAX_POSITIONS}), "prompt"),
        (json!({"prompt": "x", "max_tokens": "many"}), "max_tokens"),
        (json!({"prompt": "x", "temperature": 3}), "temperature"),
        (json!({"prompt": "x", "n": 0}), "n"),
        (json!({"prompt": vec!["x"; 100], "n": 128}), "prompt"),
        (json!({"prompt": "x", "logprobs": 21}), "logprobs"),
        (json!({"prompt": "x", "logprobs": true}), "logprobs"),
        (json!({"prompt": "x", "echo": "yes"}), "echo"),
        (json!({"prompt": "x", "suffix": "end"}), "suffix"),
        (json!({"prompt": "x", "best_of": 1, "n": 2}), "best_of"),
        (json!({"prompt": "x", "best_of": 2, "stream": true}), "best_of"),
        (json!({"prompt": "x", "logit_bias": {"99999": 5}}), "logit_bias"),
    ];
    for (body, param) in completions {
        let context = body.to_string();
        let error = error(
            server.post("/v1/completions", body).await,
            400,
            &context[..context.len().min(80)],
        )
        .await;
        assert_eq!(error["param"], param, "{error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let user = json!([{"role": "user", "content": "x"}]);
    let chats = [
        (json!({}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"messages": user, "max_tokens": 0}), "max_tokens"),
        (json!({"messages": user, "top_logprobs": 2}), "top_logprobs"),
        (json!({"messages": user, "logprobs": 2}), "logprobs"),
        (json!({"messages": user, "logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"messages": user, "tool_choice": "required"}), "tool_choice"),
        (
            json!({"messages": user, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
            "tool_choice",
        ),
        (json!({"messages": user, "tools": [{}]}), "tools[0].function.name"),
        (
            json!({"messages": user, "response_format": {"type": "json_schema", "json_schema": {}}}),
            "response_format",
        ),
        (json!({"messages": user, "modalities": ["text", "audio"]}), "modalities"),
        (json!({"messages": user, "chat_template": "x"}), "chat_template"),
        (
            json!({"messages": user, "chat_template_kwargs": {"messages": []}}),
            "chat_template_kwargs",
        ),
        (
            json!({"messages": user, "continue_final_message": true, "add_generation_prompt": true}),
            "continue_final_message",
        ),
        (json!({"messages": user, "max_tokens": MAX_POSITIONS}), "messages"),
    ];
    for (body, param) in chats {
        let context = body.to_string();
        let error = error(server.post("/v1/chat/completions", body).await, 400, &context).await;
        assert_eq!(error["param"], param, "{error}");
    }
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 5}), "prompt"),
        ("/tokenize", json!({"prompt": "a", "messages": user}), "prompt"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": [512]}), "tokens"),
        ("/detokenize", json!({"tokens": "a"}), "tokens"),
    ] {
        let context = format!("{path} {body}");
        let error = error(server.post(path, body).await, 400, &context).await;
        assert_eq!(error["param"], param, "{context}");
    }
    assert!(server.requests.lock().unwrap().is_empty(), "nothing wrong may reach the pipeline");
}

#[tokio::test]
async fn too_long_has_openai_s_code() {
    let server = Server::saying("x").await;
    let body = json!({"prompt": vec![1; MAX_POSITIONS + 1]});
    let error = error(server.post("/v1/completions", body).await, 400, "long").await;
    assert_eq!(error["code"], "context_length_exceeded");
    assert!(error["message"].as_str().unwrap().contains("4096"), "{error}");
}

#[tokio::test]
async fn another_model_is_404_everywhere() {
    let server = Server::saying("x").await;
    for (path, body) in [
        ("/v1/completions", json!({"model": "gpt-4", "prompt": "x"})),
        (
            "/v1/chat/completions",
            json!({"model": "gpt-4", "messages": [{"role": "user", "content": "x"}]}),
        ),
        ("/tokenize", json!({"model": "gpt-4", "prompt": "x"})),
        ("/detokenize", json!({"model": "gpt-4", "tokens": [1]})),
    ] {
        let error = error(server.post(path, body).await, 404, path).await;
        assert_eq!(error["code"], "model_not_found");
    }
    error(server.get("/v1/models/gpt-4").await, 404, "models").await;
}

#[tokio::test]
async fn bodies_that_are_no_json_objects() {
    let server = Server::saying("x").await;
    let url = format!("{}/v1/completions", server.url);
    let deep = "[".repeat(100_000);
    for body in [
        "",
        "{",
        "null",
        "[1]",
        "\"x\"",
        "{\"prompt\": \"x\",}",
        "{\"prompt\": \"\\ud800\"}",
        "{\"n\": 1e999}",
        &deep,
    ] {
        let request = server.client.post(&url).header("content-type", "application/json");
        let response = request.body(body.to_owned()).send().await.unwrap();
        error(response, 400, &body[..body.len().min(20)]).await;
    }
    let request = server.client.post(&url).header("content-type", "application/json");
    let response = request.body(vec![b'"', 0xff, b'"']).send().await.unwrap();
    error(response, 400, "not UTF-8").await;
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"] {
        let request = server.client.post(&url).header("content-type", kind);
        error(request.body("{}").send().await.unwrap(), 415, kind).await;
    }
    error(server.client.post(&url).body("{}").send().await.unwrap(), 415, "no type").await;
    let request =
        server.client.post(&url).header("content-type", "application/json; charset=utf-8");
    let response = request.body("{\"prompt\": \"x\"}").send().await.unwrap();
    assert_eq!(response.status(), 200);
}

#[tokio::test]
async fn a_body_over_the_limit_is_413() {
    let server = Server::saying("x").await;
    let response = server.post("/v1/completions", json!({"prompt": "x".repeat(2 << 20)})).await;
    error(response, 413, "large").await;
}

#[tokio::test]
async fn a_body_that_never_comes_is_408() {
    let mut config = crate::fake::config();
    config.limits.body_timeout = std::time::Duration::from_millis(50);
    let server = Server::scripted_with(config, |_| vec![]).await;
    let endless = futures::stream::pending::<Result<Vec<u8>, std::io::Error>>();
    let request = server
        .client
        .post(format!("{}/v1/completions", server.url))
        .header("content-type", "application/json")
        .body(reqwest::Body::wrap_stream(endless));
    error(request.send().await.unwrap(), 408, "endless").await;
}

#[tokio::test]
async fn unknown_routes_and_methods() {
    let server = Server::saying("x").await;
    error(server.get("/v1/engines").await, 404, "route").await;
    error(server.post("/v2/completions", json!({})).await, 404, "route").await;
    for (method, path) in [
        (Method::GET, "/v1/completions"),
        (Method::DELETE, "/v1/chat/completions"),
        (Method::POST, "/v1/models"),
        (Method::PUT, "/tokenize"),
        (Method::POST, "/health"),
    ] {
        let response = server
            .client
            .request(method.clone(), format!("{}{path}", server.url))
            .send()
            .await
            .unwrap();
        assert!(response.headers().contains_key("allow"), "{method} {path}");
        error(response, 405, path).await;
    }
}
