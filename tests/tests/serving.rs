//! What a served pipeline does beyond answering: cached prefixes, adjusted draws, deadlines, and nothing left behind.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use baton_tests::{Client, Server};
use serde_json::{Value, json};

const STAGES: [&str; 2] = ["--split", "4,2,4"];
const POLL: Duration = Duration::from_millis(50);

fn prompt(length: u32, salt: u32) -> Vec<u32> {
    (0..length).map(|position| (position * (7 + salt) + salt * 31) % 290).collect()
}

async fn pipeline(client: &Client) -> anyhow::Result<Value> {
    Ok(client.get("/pipeline").await?.1)
}

/// Waits until nothing runs and all blocks are free.
async fn idle(client: &Client) -> anyhow::Result<Value> {
    let start = Instant::now();
    loop {
        let state = pipeline(client).await?;
        let blocks = &state["kv_blocks"];
        if state["running"] == 0 && state["waiting"] == 0 && blocks["free"] == blocks["total"] {
            return Ok(state);
        }
        ensure!(start.elapsed() < Duration::from_secs(20), "not idle again: {state}");
        tokio::time::sleep(POLL).await;
    }
}

#[tokio::test]
async fn a_cached_prefix_saves_its_rows_and_changes_no_answer() -> anyhow::Result<()> {
    let server = Server::start("share-4-3", &STAGES).await?;
    let cold = Server::start("share-4-3", &["--split", "4,2,4", "--no-prefix-cache"]).await?;
    let shared = prompt(200, 1);
    for (round, tail) in [3, 3, 5, 90].into_iter().enumerate() {
        let mut tokens = shared.clone();
        tokens.extend(prompt(tail, 2));
        for sampling in [json!({"temperature": 0}), json!({"temperature": 1, "seed": 3})] {
            let mut options = json!({"max_tokens": 24, "logprobs": 5});
            for (name, value) in sampling.as_object().context("an object")? {
                options[name] = value.clone();
            }
            let body = server.client.body(&tokens, &options);
            let (_, warm) = server.client.post("/v1/completions", &body).await?;
            let (_, expected) = cold.client.post("/v1/completions", &body).await?;
            assert_eq!(warm["choices"], expected["choices"]);
            let cached = &warm["usage"]["prompt_tokens_details"]["cached_tokens"];
            let cached = cached.as_u64().with_context(|| warm.to_string())?;
            ensure!(round == 0 || cached >= 192, "round {round}: {cached} tokens were cached");
            assert_eq!(expected["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        }
    }
    let state = idle(&server.client).await?;
    let hits = state["prefix_cache"]["hit_tokens"].as_u64();
    ensure!(hits.is_some_and(|hits| hits > 7 * 190), "{state}");
    // Another salt shares nothing.
    let body = server.client.body(&shared, &json!({"max_tokens": 1, "cache_salt": "other"}));
    let (_, salted) = server.client.post("/v1/completions", &body).await?;
    assert_eq!(salted["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    Ok(())
}

#[tokio::test]
async fn an_abort_within_a_prompt_leaves_no_block_used_and_no_wrong_one_known() -> anyhow::Result<()>
{
    let options = ["--split", "4,2,4", "--prefill-chunk", "16", "--step-rows", "16"];
    let server = Server::start("share-4-3", &options).await?;
    let long = prompt(480, 4);
    let short = json!({"max_tokens": 8});
    for wait in [0, 3, 9, 20, 40] {
        let gone = server.client.complete(&long, &short);
        // The client goes away in the middle.
        let _ = tokio::time::timeout(Duration::from_millis(wait), gone).await;
    }
    idle(&server.client).await?;
    let expected = Server::start("share-4-3", &["--split", "10", "--no-prefix-cache"]).await?;
    let scored = json!({"max_tokens": 8, "logprobs": 5});
    let found = server.client.complete(&long, &scored).await?;
    assert_eq!(found, expected.client.complete(&long, &scored).await?);
    Ok(())
}

#[tokio::test]
async fn bias_and_penalties_reach_the_last_stage() -> anyhow::Result<()> {
    let server = Server::start("share-4-3", &STAGES).await?;
    let ids = |choice: &Value| choice["token_ids"].as_array().cloned().unwrap_or_default();
    let ask = async |options: Value| server.client.complete(&prompt(40, 3), &options).await;
    let forced = ask(json!({"max_tokens": 6, "logit_bias": {"17": 100}})).await?;
    assert_eq!(ids(&forced), [17; 6]);
    let plain = ids(&ask(json!({"max_tokens": 40})).await?);
    let apart = ids(&ask(json!({"max_tokens": 40, "presence_penalty": 2, "frequency_penalty": 2,
        "repetition_penalty": 2}))
    .await?);
    let distinct = |ids: &[Value]| ids.iter().collect::<std::collections::HashSet<_>>().len();
    ensure!(distinct(&apart) > distinct(&plain), "{apart:?} repeats like {plain:?}");
    Ok(())
}

#[tokio::test]
async fn the_best_of_several_is_the_likeliest_of_them() -> anyhow::Result<()> {
    let server = Server::start("share-4-3", &STAGES).await?;
    let sampled = json!({"max_tokens": 12, "temperature": 1, "seed": 5, "logprobs": 0, "n": 4});
    let body = server.client.body(&prompt(30, 1), &sampled);
    let (_, all) = server.client.post("/v1/completions", &body).await?;
    let mean = |choice: &Value| -> f64 {
        let scores = choice["logprobs"]["token_logprobs"].as_array().cloned().unwrap_or_default();
        scores.iter().filter_map(Value::as_f64).sum::<f64>() / scores.len().max(1) as f64
    };
    let mut choices = all["choices"].as_array().cloned().context("choices")?;
    choices.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
    let mut best = body.clone();
    best["n"] = 2.into();
    best["best_of"] = 4.into();
    let (_, best) = server.client.post("/v1/completions", &best).await?;
    let texts = |choices: &[Value]| choices.iter().map(|c| c["text"].clone()).collect::<Vec<_>>();
    assert_eq!(texts(best["choices"].as_array().context("choices")?), texts(&choices[..2]));
    assert_eq!(best["usage"]["completion_tokens"], 4 * 12);
    Ok(())
}

#[tokio::test]
async fn a_request_whose_time_is_over_ends_and_frees_its_blocks() -> anyhow::Result<()> {
    let server = Server::start("share-4-3", &STAGES).await?;
    let body = server.client.body(&prompt(40, 3), &json!({"max_tokens": 400, "timeout": 0.05}));
    let (status, answer) = server.client.post("/v1/completions", &body).await?;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (504, &json!("deadline_exceeded")));
    idle(&server.client).await?;
    Ok(())
}

#[tokio::test]
async fn of_a_long_prompt_whose_beginning_is_known_only_the_tail_is_computed() -> anyhow::Result<()>
{
    const PREFIX: u32 = 2000;
    const TAIL: u32 = 20;
    let server = Server::start("share-4-3", &STAGES).await?;
    let cold = Server::start("share-4-3", &["--split", "10", "--no-prefix-cache"]).await?;
    // Rows that every stage but the last has sent on, once the stage has said so.
    let rows = async |expected: u64| {
        let start = Instant::now();
        loop {
            let state = pipeline(&server.client).await?;
            let sent = |stage: usize| state["stages"][stage]["handoff_rows_sent"].as_u64();
            if sent(0) == Some(expected) && sent(1) == Some(expected) {
                return anyhow::Ok(());
            }
            ensure!(start.elapsed() < Duration::from_secs(10), "expected {expected} rows: {state}");
            tokio::time::sleep(POLL).await;
        }
    };
    let options = json!({"max_tokens": 8, "logprobs": 5});
    let mut computed = 0;
    for (round, salt) in [5, 6].into_iter().enumerate() {
        let mut tokens = prompt(PREFIX, 1);
        tokens.extend(prompt(TAIL, salt));
        let found = server.client.complete(&tokens, &options).await?;
        assert_eq!(found, cold.client.complete(&tokens, &options).await?);
        // The prompt's last row yields the first token.
        let prefilled = if round == 0 { PREFIX + TAIL } else { TAIL };
        computed += u64::from(prefilled + 8 - 1);
        rows(computed).await?;
    }
    Ok(())
}
