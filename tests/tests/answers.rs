//! The answers of a running pipeline: those of transformers, and the same to the last bit wherever the model is cut.

use anyhow::ensure;
use baton_tests::{Client, Oracle, OraclePrompt, Server};
use serde_json::{Value, json};

/// Distance from transformers that float32 may have.
const TOLERANCE: f64 = 1e-4;

/// Everything that is asked about one prompt.
async fn ask(client: &Client, prompt: &OraclePrompt) -> anyhow::Result<[Value; 3]> {
    let tokens = &prompt.tokens;
    let length = prompt.greedy.len();
    let scored = json!({"max_tokens": 0, "echo": true, "logprobs": 2});
    let greedy = json!({"max_tokens": length, "echo": true, "logprobs": 1});
    let sampled = json!({"max_tokens": length, "temperature": 1.0, "seed": 7, "logprobs": 0});
    Ok([
        client.complete(tokens, &scored).await?,
        client.complete(tokens, &greedy).await?,
        client.complete(tokens, &sampled).await?,
    ])
}

async fn ask_all(client: &Client, oracle: &Oracle) -> anyhow::Result<Vec<[Value; 3]>> {
    let mut answers = Vec::new();
    for prompt in &oracle.prompts {
        answers.push(ask(client, prompt).await?);
    }
    Ok(answers)
}

fn close(context: &str, found: &Value, expected: &[Option<f64>]) -> anyhow::Result<()> {
    let found: Vec<Option<f64>> = serde_json::from_value(found.clone())?;
    ensure!(found.len() == expected.len(), "{context}: {} scores", found.len());
    for (position, (found, expected)) in found.iter().zip(expected).enumerate() {
        let near = match (found, expected) {
            (Some(found), Some(expected)) => (found - expected).abs() <= TOLERANCE,
            (found, expected) => found == expected,
        };
        ensure!(near, "{context}: token {position} scores {found:?}, expected {expected:?}");
    }
    Ok(())
}

fn compare(context: &str, oracle: &Oracle, answers: &[[Value; 3]]) -> anyhow::Result<()> {
    for (prompt, [scored, greedy, _]) in oracle.prompts.iter().zip(answers) {
        let context = format!("{context}, prompt {}", prompt.name);
        close(&context, &scored["logprobs"]["token_logprobs"], &prompt.logprobs)?;
        ensure!(greedy["token_ids"] == json!(prompt.greedy), "{context}: {}", greedy["token_ids"]);
        let continued = prompt.greedy_logprobs.iter().map(|&score| Some(score));
        let whole: Vec<_> = prompt.logprobs.iter().copied().chain(continued).collect();
        close(&context, &greedy["logprobs"]["token_logprobs"], &whole)?;
    }
    Ok(())
}

/// Asks everything of a pipeline per cut.
async fn holds_for(model: &str, answers: &str, cuts: &[[&str; 2]]) -> anyhow::Result<()> {
    let oracle = Oracle::load(answers)?;
    let mut first: Option<Vec<[Value; 3]>> = None;
    for cut in cuts {
        let server = Server::start(model, cut).await?;
        let found = ask_all(&server.client, &oracle).await?;
        compare(&format!("{model} {cut:?}"), &oracle, &found)?;
        match &first {
            None => first = Some(found),
            Some(first) => ensure!(*first == found, "{model}: {cut:?} and {:?} differ", cuts[0]),
        }
    }
    Ok(())
}

#[tokio::test]
async fn any_number_of_stages_answers_like_transformers() -> anyhow::Result<()> {
    let counts = ["1", "2", "3", "5", "10"].map(|count| ["--stages", count]);
    holds_for("share-4-3", "share-4-3", &counts).await
}

#[tokio::test]
async fn cuts_that_need_a_carry_answer_like_transformers() -> anyhow::Result<()> {
    // Layers F F F S S S F S S S: straight after a full layer; its rows from further back; relayed through stages that
    // hold shared layers only; and one cut that needs none.
    let splits = ["10", "3,7", "4,6", "3,3,4", "4,1,1,4", "3,1,1,1,1,1,2", "6,4"];
    holds_for("share-4-3", "share-4-3", &splits.map(|split| ["--split", split])).await
}

#[tokio::test]
async fn long_runs_of_shared_layers_answer_like_transformers() -> anyhow::Result<()> {
    let splits = ["10", "2,8", "2,2,2,2,2", "5,5"];
    holds_for("share-8-2", "share-8-2", &splits.map(|split| ["--split", split])).await
}

#[tokio::test]
async fn a_pattern_string_answers_like_transformers() -> anyhow::Result<()> {
    let splits = ["10", "3,3,4", "7,3"];
    holds_for("pattern", "pattern", &splits.map(|split| ["--split", split])).await
}

#[tokio::test]
async fn models_without_shared_layers_answer_like_transformers() -> anyhow::Result<()> {
    let counts = ["1", "3"].map(|count| ["--stages", count]);
    holds_for("all-full", "all-full", &counts).await?;
    holds_for("deepseek-v32", "deepseek-v32", &counts).await
}

#[tokio::test]
async fn every_way_to_store_weights_answers_like_transformers() -> anyhow::Result<()> {
    for model in ["bf16", "bf16-sharded", "bf16-fused-experts"] {
        holds_for(model, "bf16", &[["--stages", "1"], ["--split", "4,6"]]).await?;
    }
    holds_for("fp8-block", "fp8-block", &[["--stages", "1"], ["--split", "4,3"]]).await
}
