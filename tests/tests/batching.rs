//! A request answers the same alone and among others, in one piece and in chunks: to the last bit.

use anyhow::ensure;
use baton_tests::{Client, Oracle, Server};
use serde_json::{Value, json};
use tokio::task::JoinSet;

const STAGES: [&str; 2] = ["--split", "4,2,4"];

fn scored() -> Value {
    json!({"max_tokens": 24, "echo": true, "logprobs": 5})
}

/// Prompts unlike each other and longer than `index_topk` but for a few.
fn prompt(number: u32) -> Vec<u32> {
    let length = 3 + number * 13 % 90;
    (0..length).map(|position| (position * (7 + number) + number * 31) % 290).collect()
}

async fn all_at_once(client: &Client, prompts: Vec<Vec<u32>>) -> anyhow::Result<Vec<Value>> {
    let mut tasks = JoinSet::new();
    for (index, prompt) in prompts.into_iter().enumerate() {
        let client = client.clone();
        tasks.spawn(async move { client.complete(&prompt, &scored()).await.map(|c| (index, c)) });
    }
    let mut answers = Vec::new();
    while let Some(answer) = tasks.join_next().await {
        answers.push(answer??);
    }
    answers.sort_by_key(|(index, _)| *index);
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}

#[tokio::test]
async fn a_request_answers_among_twelve_others_as_alone() -> anyhow::Result<()> {
    let server = Server::start("share-4-3", &STAGES).await?;
    let prompts: Vec<Vec<u32>> = (0..13).map(prompt).collect();
    let mut alone = Vec::new();
    for prompt in &prompts {
        alone.push(server.client.complete(prompt, &scored()).await?);
    }
    for round in 0..3 {
        let together = all_at_once(&server.client, prompts.clone()).await?;
        for (number, (alone, among)) in alone.iter().zip(&together).enumerate() {
            ensure!(alone == among, "round {round}, prompt {number}:\n{alone}\n{among}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn chunk_and_step_sizes_change_nothing() -> anyhow::Result<()> {
    let oracle = Oracle::load("share-4-3")?;
    let prompts: Vec<Vec<u32>> = oracle.prompts.iter().map(|p| p.tokens.clone()).collect();
    let mut first: Option<Vec<Value>> = None;
    let sizes: [&[&str]; 5] = [
        &[],
        &["--prefill-chunk", "1"],
        &["--prefill-chunk", "7", "--micro-batches", "1"],
        &["--step-rows", "16", "--block-size", "4"],
        &["--step-rows", "33", "--prefill-chunk", "32", "--micro-batches", "6"],
    ];
    for size in sizes {
        let options: Vec<&str> = STAGES.iter().chain(size).copied().collect();
        let server = Server::start("share-4-3", &options).await?;
        let answers = all_at_once(&server.client, prompts.clone()).await?;
        match &first {
            None => first = Some(answers),
            Some(first) => ensure!(*first == answers, "{size:?} answers otherwise"),
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_stream_says_what_the_whole_answer_says() -> anyhow::Result<()> {
    let server = Server::start("share-4-3", &STAGES).await?;
    let options = json!({"max_tokens": 40, "logprobs": 0});
    let whole = server.client.complete(&prompt(5), &options).await?;
    let mut stream = server.client.stream(&prompt(5), &options).await?;
    let (mut text, mut ids, mut scores) = (String::new(), Vec::new(), Vec::new());
    let mut ended = false;
    while let Some(data) = stream.next().await? {
        ensure!(!ended, "an event after the end mark: {data}");
        if data == "[DONE]" {
            ended = true;
            continue;
        }
        let choice = serde_json::from_str::<Value>(&data)?["choices"][0].take();
        text += choice["text"].as_str().unwrap_or_default();
        ids.extend(choice["token_ids"].as_array().cloned().unwrap_or_default());
        let own = choice["logprobs"]["token_logprobs"].as_array();
        scores.extend(own.cloned().unwrap_or_default());
    }
    ensure!(ended, "no end mark");
    assert_eq!(whole["text"], text);
    assert_eq!(whole["token_ids"], json!(ids));
    assert_eq!(whole["logprobs"]["token_logprobs"], json!(scores));
    Ok(())
}

#[tokio::test]
async fn requests_beyond_the_kv_pool_wait_their_turn() -> anyhow::Result<()> {
    // Room for about three of the longest sequences: the others wait or are preempted and computed again.
    let tight = ["--kv-blocks", "24", "--block-size", "16"];
    let options: Vec<&str> = STAGES.iter().chain(&tight).copied().collect();
    let prompts: Vec<Vec<u32>> = (0..13).map(prompt).collect();
    let roomy = Server::start("share-4-3", &STAGES).await?;
    let expected = all_at_once(&roomy.client, prompts.clone()).await?;
    drop(roomy);
    let server = Server::start("share-4-3", &options).await?;
    let found = all_at_once(&server.client, prompts).await?;
    ensure!(expected == found, "answers differ when KV blocks are short");
    Ok(())
}
