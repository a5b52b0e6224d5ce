use baton_coordinator::{Event, FinishReason, TokenLogprob};
use serde_json::{Value, json};

use crate::fake::{EOS, Server, encode, says, token};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn a_prompt_is_answered_in_openai_s_shape() {
    let server = Server::saying(" the river").await;
    let answer = server.ok(PATH, json!({"model": "org/tiny", "prompt": "Once"})).await;
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["model"], "org/tiny");
    let choice = json!({
        "index": 0, "text": " the river", "logprobs": null, "finish_reason": "length",
    });
    assert_eq!(answer["choices"], json!([choice]));
    let (prompt, generated) = (encode("Once").len(), encode(" the river").len());
    assert_eq!(
        answer["usage"],
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": 0},
        })
    );
}

#[tokio::test]
async fn parameters_reach_the_coordinator() {
    let server = Server::saying("x").await;
    let body = json!({
        "prompt": "Once", "temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25,
        "seed": 11, "max_tokens": 3, "logprobs": 2, "stop_token_ids": [5], "ignore_eos": true,
    });
    let request = server
        .client
        .post(format!("{}{PATH}", server.url))
        .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        .json(&body);
    assert_eq!(request.send().await.unwrap().status(), 200);
    let got = server.request(0);
    assert_eq!(got.prompt, encode("Once"));
    let s = &got.sampling;
    assert_eq!((s.temperature, s.top_p, s.top_k, s.min_p, s.seed), (0.5, 0.75, 7, 0.25, 11));
    assert_eq!((got.max_tokens, got.logprobs, got.prompt_logprobs), (3, Some(2), None));
    assert_eq!((got.stop_token_ids, got.ignore_eos), (vec![5], true));
    assert!(got.traceparent.contains("0af7651916cd43dd8448eb211c80319c"));

    server.ok(PATH, json!({"prompt": "Once"})).await;
    let got = server.request(1);
    assert_eq!((got.max_tokens, got.logprobs, got.ignore_eos), (16, None, false));
    assert_eq!((got.sampling.temperature, got.sampling.top_p), (1.0, 1.0));
}

#[tokio::test]
async fn batches_and_n_are_numbered_prompt_by_prompt() {
    // Every choice says its own prompt again, and its seed.
    let server = Server::scripted(|request| {
        let mut events: Vec<Event> = request.prompt.iter().map(|&id| token(id)).collect();
        let seed = says(&request.sampling.seed.to_string(), FinishReason::Length);
        events.extend(seed);
        events
    })
    .await;
    let body = json!({"prompt": ["a", "b", "c"], "n": 2, "seed": 7});
    let answer = server.ok(PATH, body).await;
    let choices = answer["choices"].as_array().unwrap();
    let texts: Vec<&str> = choices.iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["a7", "a8", "b7", "b8", "c7", "c8"]);
    let indices: Vec<u64> = choices.iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3, 4, 5]);
    assert_eq!(answer["usage"]["prompt_tokens"], 3);
    assert_eq!(answer["usage"]["completion_tokens"], 12);
}

#[tokio::test]
async fn token_id_prompts_go_through_unchanged() {
    let server = Server::saying("x").await;
    server.ok(PATH, json!({"prompt": [480, 3, 511]})).await;
    assert_eq!(server.request(0).prompt, [480, 3, 511]);
    let answer = server.ok(PATH, json!({"prompt": [[1, 2], [3]], "return_token_ids": true})).await;
    assert_eq!(server.request(1).prompt, [1, 2]);
    assert_eq!(server.request(2).prompt, [3]);
    assert_eq!(answer["choices"][0]["prompt_token_ids"], json!([1, 2]));
    assert_eq!(answer["choices"][1]["prompt_token_ids"], json!([3]));
    assert_eq!(answer["choices"][1]["token_ids"], json!(encode("x")));
}

#[tokio::test]
async fn scoring_a_prompt_as_evaluation_harnesses_do() {
    let server = Server::model().await;
    for max_tokens in [0, 1] {
        let prompts = [encode("the river runs to the sea"), encode("a small model")];
        let body = json!({
            "prompt": prompts, "max_tokens": max_tokens, "logprobs": 1, "echo": true,
            "temperature": 0,
        });
        let answer = server.ok(PATH, body).await;
        for (choice, prompt) in answer["choices"].as_array().unwrap().iter().zip(&prompts) {
            let scores = &choice["logprobs"];
            let own = scores["token_logprobs"].as_array().unwrap();
            assert_eq!(own.len(), prompt.len() + max_tokens);
            assert!(own[0].is_null() && own[1..].iter().all(Value::is_number), "{own:?}");
            let top = scores["top_logprobs"].as_array().unwrap();
            assert!(top[0].is_null());
            for (own, top) in own.iter().zip(top).skip(1) {
                let best = top.as_object().unwrap().values().filter_map(Value::as_f64);
                assert_eq!(own.as_f64().unwrap(), best.fold(f64::MIN, f64::max));
            }
            let text = choice["text"].as_str().unwrap();
            let tokens = scores["tokens"].as_array().unwrap();
            assert_eq!(tokens.iter().filter_map(Value::as_str).collect::<String>(), text);
            for (token, offset) in tokens.iter().zip(scores["text_offset"].as_array().unwrap()) {
                let there = &text[offset.as_u64().unwrap() as usize..];
                assert!(there.starts_with(token.as_str().unwrap()));
            }
            assert_eq!(choice["finish_reason"], "length");
        }
        assert_eq!(answer["usage"]["completion_tokens"], 2 * max_tokens);
        let prompt_tokens = prompts.iter().map(Vec::len).sum::<usize>();
        assert_eq!(answer["usage"]["prompt_tokens"], prompt_tokens);
    }
}

#[tokio::test]
async fn an_eos_after_the_scored_prompt_has_its_own_score() {
    // Evaluation harnesses drop the last score as that of the one generated token, whatever it was.
    let server = Server::scripted(|request| {
        let own = |id, logprob| TokenLogprob { token: id, logprob };
        let prompt = request.prompt[1..].iter().map(|&id| (own(id, -1.0), vec![])).collect();
        let eos = Event::Token { token: own(EOS, -9.0), top: vec![] };
        vec![Event::Prompt(prompt), eos, Event::Finished(FinishReason::Stop)]
    })
    .await;
    let body = json!({"prompt": "the river", "max_tokens": 1, "logprobs": 1, "echo": true});
    let answer = server.ok(PATH, body).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "the river");
    let own = choice["logprobs"]["token_logprobs"].as_array().unwrap();
    assert_eq!(own.len(), encode("the river").len() + 1);
    assert_eq!(own.last(), Some(&json!(-9.0)));
}

#[tokio::test]
async fn echo_gives_the_prompt_back_to_the_letter() {
    let server = Server::saying(" the end").await;
    for prompt in ["[gMASK]<sop><|user|>Grüße 🦀<think>", "  a\n\n", "中"] {
        let answer = server.ok(PATH, json!({"prompt": prompt, "echo": true})).await;
        assert_eq!(answer["choices"][0]["text"], format!("{prompt} the end"));
    }
}

#[tokio::test]
async fn a_stop_string_over_several_tokens_cuts_the_text() {
    let server = Server::saying("Hello there!\n\nHuman: what else?").await;
    let full = server.ok(PATH, json!({"prompt": "x"})).await;
    assert_eq!(full["choices"][0]["text"], "Hello there!\n\nHuman: what else?");
    for stop in [json!("\n\nHuman:"), json!(["nothing", "\n\nHuman:", "else"])] {
        let answer = server.ok(PATH, json!({"prompt": "x", "stop": stop, "logprobs": 0})).await;
        let choice = &answer["choices"][0];
        assert_eq!(
            (&choice["text"], &choice["finish_reason"]),
            (&json!("Hello there!"), &json!("stop"))
        );
        let tokens = choice["logprobs"]["tokens"].as_array().unwrap();
        assert_eq!(tokens.iter().filter_map(Value::as_str).collect::<String>(), "Hello there!");
    }
}

#[tokio::test]
async fn eos_ends_with_stop_and_leaves_no_text() {
    for with_token in [true, false] {
        let server = Server::scripted(move |_| {
            let mut events: Vec<Event> = encode("Yes").into_iter().map(token).collect();
            if with_token {
                events.push(token(EOS));
            }
            events.push(Event::Finished(FinishReason::Stop));
            events
        })
        .await;
        let body = json!({"prompt": "x", "skip_special_tokens": false});
        let answer = server.ok(PATH, body).await;
        assert_eq!(answer["choices"][0]["text"], "Yes");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn thinking_tags_stay_and_role_tokens_go() {
    let server = Server::saying("<think>hm</think>Yes<|observation|>").await;
    let answer = server.ok(PATH, json!({"prompt": "x"})).await;
    assert_eq!(answer["choices"][0]["text"], "<think>hm</think>Yes");
}

#[tokio::test]
async fn ids_without_text_do_not_disturb_the_scores() {
    // Rows of the embedding beyond the tokenizer, as random weights like to choose them.
    let server = Server::scripted(|_| {
        let own = TokenLogprob { token: 511, logprob: f32::NEG_INFINITY };
        vec![
            Event::Token { token: own, top: vec![own, TokenLogprob { token: 510, logprob: -1.0 }] },
            Event::Finished(FinishReason::Length),
        ]
    })
    .await;
    let answer = server.ok(PATH, json!({"prompt": "x", "logprobs": 2})).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "");
    assert_eq!(choice["logprobs"]["tokens"], json!(["token_id:511"]));
    assert_eq!(choice["logprobs"]["token_logprobs"], json!([-9999.0]));
    assert_eq!(
        choice["logprobs"]["top_logprobs"],
        json!([{"token_id:511": -9999.0, "token_id:510": -1.0}])
    );
}

#[tokio::test]
async fn a_long_text_prompt_is_tokenized_whole() {
    let server = Server::saying("x").await;
    let prompt = "the river runs to the sea ".repeat(300);
    server.ok(PATH, json!({"prompt": prompt})).await;
    assert_eq!(server.request(0).prompt, encode(&prompt));
}
