use baton_coordinator::Readiness;
use baton_proto::v1;
use serde_json::{Value, json};

use crate::fake::{MAX_POSITIONS, Server, encode, pipeline_state};

#[tokio::test]
async fn ready_follows_the_pipeline_and_health_does_not() {
    let server = Server::saying("x").await;
    assert_eq!(server.get("/ready").await.status(), 200);
    server.readiness.send(Readiness::NotReady("stage 3 is loading".into())).unwrap();
    let response = server.get("/ready").await;
    assert_eq!(response.status(), 503);
    let body: Value = response.json().await.unwrap();
    assert_eq!(body, json!({"ready": false, "reason": "stage 3 is loading"}));
    assert_eq!(server.get("/health").await.status(), 200);
    let page = server.get("/").await.text().await.unwrap();
    assert!(page.contains("org/tiny") && page.contains("stage 3 is loading"), "{page}");
    server.readiness.send(Readiness::Ready).unwrap();
    assert_eq!(server.get("/ready").await.status(), 200);
}

#[tokio::test]
async fn a_browser_gets_a_page_that_asks_nobody_else() {
    let server = Server::saying("x").await;
    let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
    let request = server.client.get(format!("{}/", server.url)).header("accept", browser);
    let response = request.send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/html; charset=utf-8");
    assert_eq!(response.headers()["vary"], "accept");
    let policy = response.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.starts_with("default-src 'none'; "), "{policy}");
    let page = response.text().await.unwrap();
    assert!(page.starts_with("<!doctype html>"));
    // The one address is the name of SVG's namespace.
    let elsewhere = page.replace("http://www.w3.org/2000/svg", "");
    assert!(!elsewhere.contains("://"), "the page names another host");
}

#[tokio::test]
async fn the_pipeline_s_state_passes_through() {
    let server = Server::saying("x").await;
    let body: Value = server.get("/pipeline").await.json().await.unwrap();
    assert_eq!(body, pipeline_state());
}

#[tokio::test]
async fn the_last_steps_are_as_many_as_wanted() {
    let server = Server::saying("x").await;
    let steps: Value = server.get("/pipeline/steps").await.json().await.unwrap();
    assert_eq!(steps["stage_clocks_behind"], json!([0, 0]));
    assert_eq!(steps["steps"], json!([]));
    for id in 1..=70 {
        server.timeline.sent(&v1::Step { epoch: 1, step_id: id, ..Default::default() });
    }
    for (path, first, count) in [
        ("/pipeline/steps", 7, 64),
        ("/pipeline/steps?last=3", 68, 3),
        ("/pipeline/steps?last=1000", 1, 70),
    ] {
        let steps: Value = server.get(path).await.json().await.unwrap();
        let steps = steps["steps"].as_array().unwrap();
        assert_eq!((steps.len(), &steps[0]["step"]), (count, &json!(first)), "{path}");
    }
    let refused = server.get("/pipeline/steps?last=few").await;
    assert_eq!(refused.status(), 400);
    let refused: Value = refused.json().await.unwrap();
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("\"last\": expected a number of steps: "), "{message}");
}

#[tokio::test]
async fn models_list_the_served_one_under_its_full_name() {
    let server = Server::saying("x").await;
    let list: Value = server.get("/v1/models").await.json().await.unwrap();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], "org/tiny");
    assert_eq!(list["data"][0]["max_model_len"], MAX_POSITIONS);
    for path in ["/v1/models/org/tiny", "/v1/models/org%2Ftiny"] {
        let one: Value = server.get(path).await.json().await.unwrap();
        assert_eq!(one, list["data"][0]);
    }
}

#[tokio::test]
async fn tokenize_and_back() {
    let server = Server::saying("x").await;
    let text = "[gMASK]<sop>Grüße, 中文 🦀<think>";
    let answer = server.ok("/tokenize", json!({"prompt": text, "return_token_strs": true})).await;
    let ids = encode(text);
    assert_eq!(answer["tokens"], json!(ids));
    assert_eq!(answer["count"], ids.len());
    assert_eq!(answer["max_model_len"], MAX_POSITIONS);
    assert_eq!(answer["token_strs"][0], "[gMASK]");
    let back = server.ok("/detokenize", json!({"tokens": ids})).await;
    assert_eq!(back, json!({"prompt": text}));

    let messages = json!([{"role": "user", "content": "Hi"}]);
    let answer = server.ok("/tokenize", json!({"messages": messages})).await;
    assert_eq!(answer["tokens"], json!(encode("[gMASK]<sop><|user|>Hi<|assistant|><think>")));
    let body = json!({"messages": messages, "add_generation_prompt": false});
    let answer = server.ok("/tokenize", body).await;
    assert_eq!(answer["tokens"], json!(encode("[gMASK]<sop><|user|>Hi")));
    let empty = server.ok("/tokenize", json!({"prompt": ""})).await;
    assert_eq!(empty["count"], 0);
}
