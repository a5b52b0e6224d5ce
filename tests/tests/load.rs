//! Many requests at once, over pipelines of several lengths: everyone is answered as if alone, and nothing stays behind.
//!
//! The whole form is 200 requests of 16 to 3,000 prompt tokens. CI runs a tenth of it, with shorter prompts, since the whole takes minutes
//! on two cores: `BATON_LOAD=whole cargo nextest run -p baton-tests --test load --no-capture`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use baton_tests::models::copy_of;
use baton_tests::{Client, Server};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const CONCURRENCY: usize = 64;

/// One form of the load.
struct Load {
    requests: u32,
    longest: u32,
    /// Tokens of an answer.
    written: u32,
}

const WHOLE: Load = Load { requests: 200, longest: 3000, written: 32 };
const SMALL: Load = Load { requests: 70, longest: 400, written: 12 };

fn load() -> Load {
    if std::env::var("BATON_LOAD").is_ok_and(|form| form == "whole") {
        return WHOLE;
    }
    eprintln!("a small load: the whole one takes minutes; BATON_LOAD=whole runs it");
    SMALL
}

/// A prompt and how it is to be continued: every other request draws, with a seed of its own.
fn request(load: &Load, number: u32) -> (Vec<u32>, Value) {
    // Lengths from 16 on, spread over the whole range in no order.
    let length = 16 + (number * 7919) % (load.longest - 15);
    let prompt = (0..length).map(|at| (at * (3 + number) + at * at / 7 + number * 31) % 290);
    let drawn = number % 2 == 1;
    let options = json!({
        "max_tokens": load.written,
        "temperature": if drawn { 0.9 } else { 0.0 },
        "top_p": 0.95,
        "seed": number,
        "logprobs": 1,
    });
    (prompt.collect(), options)
}

async fn answers(client: &Client, load: &Load, concurrency: usize) -> anyhow::Result<Vec<Value>> {
    let room = Arc::new(Semaphore::new(concurrency));
    let mut tasks = JoinSet::new();
    for number in 0..load.requests {
        let (client, room) = (client.clone(), Arc::clone(&room));
        let (prompt, options) = request(load, number);
        tasks.spawn(async move {
            let _permit = room.acquire().await?;
            let answer = client.complete(&prompt, &options).await;
            answer.map(|answer| (number, answer)).with_context(|| format!("request {number}"))
        });
    }
    let mut answers = Vec::new();
    while let Some(answer) = tasks.join_next().await {
        answers.push(answer??);
    }
    answers.sort_by_key(|(number, _)| *number);
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}

/// Waits until no stage holds a block and all are free.
async fn nothing_held(client: &Client) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let (_, state) = client.get("/pipeline").await?;
        let stages = state["stages"].as_array().context("stages")?;
        let blocks = &state["kv_blocks"];
        if blocks["free"] == blocks["total"] && stages.iter().all(|s| s["kv_blocks_held"] == 0) {
            return Ok(());
        }
        ensure!(start.elapsed() < Duration::from_secs(20), "blocks are still held: {state}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn everyone_is_answered_as_if_alone_over_one_four_and_eight_stages() -> anyhow::Result<()> {
    let load = load();
    let model = copy_of("share-4-3")?;
    let path = model.path().join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
    config["max_position_embeddings"] = 4096.into();
    std::fs::write(&path, config.to_string())?;
    // Whoever is alone has all blocks computed for itself.
    let server = Server::start_in(model.path(), &["--stages", "1", "--no-prefix-cache"]).await?;
    let alone = answers(&server.client, &load, 1).await?;
    drop(server);
    for stages in ["1", "4", "8"] {
        let started = Instant::now();
        let server = Server::start_in(model.path(), &["--stages", stages]).await?;
        let among = answers(&server.client, &load, CONCURRENCY).await?;
        for (number, (alone, among)) in alone.iter().zip(&among).enumerate() {
            ensure!(alone == among, "{stages} stages, request {number}:\n{alone}\n{among}");
        }
        nothing_held(&server.client).await?;
        eprintln!("{stages} stages: {} answers in {:?}", among.len(), started.elapsed());
    }
    Ok(())
}
