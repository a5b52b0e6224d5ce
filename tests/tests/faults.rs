//! What happens when a stage dies, a signal comes, or a start cannot succeed: a clear end, in bounded time.

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use baton_tests::client::EventStream;
use baton_tests::models::copy_of;
use baton_tests::pipeline::{Pipeline, coordinator, free_address, stage};
use baton_tests::process::that_name;
use baton_tests::program::eventually;
use baton_tests::{Client, Program, Server};
use reqwest::StatusCode;
use rustix::process::Signal;
use serde_json::{Value, json};

/// Time in which a failure must have shown everywhere.
const SOON: Duration = Duration::from_secs(10);
/// Time in which a start that cannot succeed must have ended.
const START: Duration = Duration::from_secs(30);

const STAGES: [&str; 2] = ["--split", "4,2,4"];

/// What different clients ask for; none may notice that a stage dies.
fn wishes() -> [Value; 3] {
    [
        json!({"max_tokens": 300}),
        json!({
            "max_tokens": 300, "temperature": 0.9, "seed": 5, "presence_penalty": 0.4, "repetition_penalty": 1.1,
            "logprobs": 3
        }),
        json!({"max_tokens": 300, "echo": true, "logprobs": 1}),
    ]
}

/// A prompt longer than `index_topk`.
const PROMPT: [u32; 20] = [5, 9, 2, 7, 1, 8, 3, 6, 4, 11, 15, 12, 17, 10, 18, 13, 16, 14, 19, 21];

/// The events of a stream that has begun with these, which must end well.
async fn whole(stream: &mut EventStream, mut events: Vec<String>) -> anyhow::Result<Vec<String>> {
    events.extend(remaining(stream, START).await?);
    ensure!(events.pop().as_deref() == Some("[DONE]"), "{:?}", events.last());
    Ok(events)
}

/// The text of a stream's events.
fn text(events: &[String]) -> anyhow::Result<String> {
    let text = |data: &String| {
        let event: Value = serde_json::from_str(data)?;
        Ok(event["choices"][0]["text"].as_str().unwrap_or_default().to_owned())
    };
    events.iter().map(text).collect()
}

/// Streams all wishes at once, has `disturb` do its worst once they have begun, and compares with undisturbed streams.
async fn nothing_is_lost(
    client: &Client,
    disturb: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut undisturbed = Vec::new();
    for wish in wishes() {
        undisturbed.push(whole(&mut client.stream(&PROMPT, &wish).await?, Vec::new()).await?);
    }
    let mut streams = Vec::new();
    for wish in wishes() {
        let mut stream = client.stream(&PROMPT, &wish).await?;
        let first = stream.next().await?.context("the stream has begun")?;
        streams.push((stream, vec![first]));
    }
    disturb()?;
    for ((mut stream, begun), undisturbed) in streams.into_iter().zip(undisturbed) {
        let disturbed = whole(&mut stream, begun).await?;
        // Tokens may come in other portions.
        let tokens = |events: &[String]| -> Vec<Value> {
            events.iter().flat_map(|data| ids(data)).collect()
        };
        ensure!(tokens(&disturbed).len() >= 300, "{} tokens", tokens(&disturbed).len());
        ensure!(tokens(&disturbed) == tokens(&undisturbed), "another text after the stage died");
        ensure!(text(&disturbed)? == text(&undisturbed)?, "said twice, or not at all");
    }
    let (_, state) = client.get("/pipeline").await?;
    ensure!(state["epoch"].as_u64() >= Some(2), "nothing happened: {state}");
    Ok(())
}

#[tokio::test]
async fn a_stage_that_is_killed_is_started_again_and_no_stream_notices() -> anyhow::Result<()> {
    let server = Server::start("share-4-3", &STAGES).await?;
    nothing_is_lost(&server.client, || {
        server.stage(1)?.signal(Signal::KILL);
        Ok(())
    })
    .await?;
    let log = server.program.stderr();
    for words in
        ["the pipeline failed: stage 1", "stage 0 still holds its slice", "the pipeline is back"]
    {
        ensure!(log.contains(words), "no {words:?}:\n{log}");
    }
    Ok(())
}

#[tokio::test]
async fn one_that_stands_by_takes_the_place_of_a_killed_stage() -> anyhow::Result<()> {
    let pipeline =
        Pipeline::start("share-4-3", "4,2,4", &["--recovery-timeout", "30"], &[]).await?;
    let standby = stage(&pipeline.grpc, "share-4-3", &["--standby"])?;
    let waits = || standby.stderr().contains("stands by: all 3 stages are there");
    ensure!(eventually(SOON, waits).await, "{}", standby.stderr());
    nothing_is_lost(&pipeline.server.client, || pipeline.stages[2].signal(Signal::KILL)).await?;
    ensure!(standby.stderr().contains("joined as stage 2 of 3"), "{}", standby.stderr());
    Ok(())
}

#[tokio::test]
async fn requests_that_may_not_wait_are_told_which_stage_died() -> anyhow::Result<()> {
    let pipeline = Pipeline::start("share-4-3", "4,2,4", &[], &[]).await?;
    let client = &pipeline.server.client;
    let mut stream = client.stream(&[1, 2, 3], &json!({"max_tokens": 2000})).await?;
    stream.next().await?.context("the stream has begun")?;
    pipeline.stages[1].signal(Signal::KILL)?;
    let killed = Instant::now();
    let (_, last) = rest(&mut stream).await?;
    let event: Value = serde_json::from_str(&last).with_context(|| last.clone())?;
    let message = event["error"]["message"].as_str().context("an error event ends the stream")?;
    ensure!(message.contains("stage 1") && event["error"]["type"] == "server_error", "{event}");
    let reason = loop {
        let (status, body) = client.get("/ready").await?;
        if status == StatusCode::SERVICE_UNAVAILABLE {
            break body["reason"].as_str().unwrap_or_default().to_owned();
        }
        ensure!(killed.elapsed() < SOON, "/ready still answers {status}: {body}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    ensure!(reason.contains("stage 1"), "/ready does not name the stage: {reason}");
    let body = client.body(&[1, 2, 3], &json!({"max_tokens": 4}));
    let (status, answer) = client.post("/v1/completions", &body).await?;
    ensure!(status == StatusCode::SERVICE_UNAVAILABLE, "{status}: {answer}");
    let (status, _) = client.get("/health").await?;
    ensure!(status == StatusCode::OK, "/health is about this process alone, it says {status}");
    // Its successor makes the pipeline whole again.
    let _again = stage(&pipeline.grpc, "share-4-3", &["--index", "1"])?;
    while client.get("/ready").await?.0 != StatusCode::OK {
        ensure!(killed.elapsed() < START, "the pipeline does not come back");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

#[tokio::test]
async fn signals_end_every_process() -> anyhow::Result<()> {
    for signal in [Signal::TERM, Signal::INT] {
        let mut server = Server::start("share-4-3", &STAGES).await?;
        let stages = server.program.children();
        ensure!(stages.len() == 3, "{stages:?}");
        let mut stream = server.client.stream(&[1, 2, 3], &json!({"max_tokens": 2000})).await?;
        stream.next().await?.context("the stream has begun")?;
        server.program.signal(signal)?;
        let status = server.program.wait(SOON)?;
        ensure!(status.success(), "{signal:?}: {status}, it printed\n{}", server.program.stderr());
        let gone = || stages.iter().all(|stage| !stage.is_alive());
        ensure!(eventually(SOON, gone).await, "{signal:?}: stages outlive the coordinator");
    }
    Ok(())
}

/// The token ids that an event brings.
fn ids(data: &str) -> Vec<Value> {
    let event: Value = serde_json::from_str(data).unwrap_or_default();
    event["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default()
}

/// Reads a stream to its end.
async fn remaining(stream: &mut EventStream, limit: Duration) -> anyhow::Result<Vec<String>> {
    let mut events = Vec::new();
    let reading = async {
        while let Some(data) = stream.next().await? {
            events.push(data);
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(limit, reading).await.context("the stream hangs")??;
    Ok(events)
}

/// The ids of a stream's remaining tokens, and its last event.
async fn rest(stream: &mut EventStream) -> anyhow::Result<(Vec<Value>, String)> {
    let mut events = remaining(stream, SOON).await?;
    let tokens = events.iter().flat_map(|data| ids(data)).collect();
    Ok((tokens, events.pop().unwrap_or_default()))
}

#[tokio::test]
async fn a_coordinator_that_is_told_to_stop_ends_its_streams_first() -> anyhow::Result<()> {
    let wanted = json!({"max_tokens": 400});
    let mut pipeline = Pipeline::start("share-4-3", "4,2,4", &[], &[]).await?;
    let client = pipeline.server.client.clone();
    let whole = rest(&mut client.stream(&[1, 2, 3], &wanted).await?).await?;
    ensure!(whole.0.len() == 400 && whole.1 == "[DONE]", "{whole:?}");
    let mut stream = client.stream(&[1, 2, 3], &wanted).await?;
    let mut tokens = ids(&stream.next().await?.context("the stream has begun")?);
    pipeline.server.program.signal(Signal::TERM)?;
    let (more, last) = rest(&mut stream).await?;
    tokens.extend(more);
    ensure!((tokens, last) == whole, "the stream ended otherwise than the same one before");
    let status = pipeline.server.program.wait(SOON)?;
    ensure!(status.success(), "{status}: {}", pipeline.server.program.stderr());
    let told = pipeline.server.program.stderr();
    ensure!(told.contains("no new requests"), "{told}");
    Ok(())
}

#[tokio::test]
async fn a_stream_that_outlasts_the_drain_is_told_so() -> anyhow::Result<()> {
    let mut pipeline =
        Pipeline::start("share-4-3", "4,2,4", &["--drain-timeout", "0.2"], &[]).await?;
    let endless = json!({"max_tokens": 2000});
    let mut stream = pipeline.server.client.stream(&[1, 2, 3], &endless).await?;
    stream.next().await?.context("the stream has begun")?;
    let told = Instant::now();
    pipeline.server.program.signal(Signal::TERM)?;
    // Cut off or ended by an error, but not completed.
    let ended = rest(&mut stream).await;
    ensure!(!ended.is_ok_and(|(_, last)| last == "[DONE]"), "the stream was completed");
    let status = pipeline.server.program.wait(SOON)?;
    ensure!(status.success(), "{status}: {}", pipeline.server.program.stderr());
    ensure!(told.elapsed() < SOON, "it took {:?}", told.elapsed());
    Ok(())
}

#[tokio::test]
async fn stages_do_not_outlive_a_killed_coordinator() -> anyhow::Result<()> {
    let server = Server::start("share-4-3", &STAGES).await?;
    let stages = server.program.children();
    server.program.signal(Signal::KILL)?;
    let gone = || stages.iter().all(|stage| !stage.is_alive());
    let ended = eventually(SOON, gone).await;
    stages.iter().for_each(|stage| stage.signal(Signal::KILL));
    ensure!(ended, "stages of a killed `baton up` live on");
    Ok(())
}

/// Starts `baton`, which must fail in time, leave no process behind and say all of `words`.
fn refuses(arguments: &[&str], directory: &Path, words: &[&str]) -> anyhow::Result<()> {
    let mut program = Program::start(arguments)?;
    let status = program.wait(START)?;
    let said = program.stderr();
    ensure!(!status.success(), "{arguments:?} succeeded: {said}");
    for word in words {
        ensure!(said.contains(word), "{arguments:?} does not mention {word:?}:\n{said}");
    }
    ensure!(!said.contains("panicked"), "{said}");
    std::thread::sleep(Duration::from_millis(200));
    let left = that_name(directory);
    ensure!(left.is_empty(), "{arguments:?} leaves {left:?} behind");
    Ok(())
}

fn up<'a>(directory: &'a Path, port: &'a str) -> anyhow::Result<Vec<&'a str>> {
    let directory = directory.to_str().context("a path in UTF-8")?;
    Ok(vec!["up", "--model", directory, "--stages", "2", "--threads", "1", "--port", port])
}

#[test]
fn a_taken_port_is_named() -> anyhow::Result<()> {
    let model = copy_of("share-4-3")?;
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let port = taken.local_addr()?.port().to_string();
    refuses(&up(model.path(), &port)?, model.path(), &[&port])
}

#[test]
fn a_missing_checkpoint_is_named() -> anyhow::Result<()> {
    let place = tempfile::tempdir()?;
    let missing = place.path().join("no-such-model");
    refuses(&up(&missing, "0")?, &missing, &["no-such-model"])
}

#[test]
fn a_truncated_file_is_named() -> anyhow::Result<()> {
    let model = copy_of("share-4-3")?;
    let weights = model.path().join("model.safetensors");
    let file = std::fs::OpenOptions::new().write(true).open(&weights)?;
    file.set_len(file.metadata()?.len() / 2)?;
    refuses(&up(model.path(), "0")?, model.path(), &["model.safetensors"])
}

#[test]
fn a_missing_shard_is_named() -> anyhow::Result<()> {
    let model = copy_of("bf16-sharded")?;
    let shard = "model-00002-of-00003.safetensors";
    std::fs::remove_file(model.path().join(shard))?;
    refuses(&up(model.path(), "0")?, model.path(), &[shard])
}

#[test]
fn a_config_that_contradicts_itself_is_refused() -> anyhow::Result<()> {
    let model = copy_of("share-4-3")?;
    let path = model.path().join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
    config["indexer_types"][6] = "shared".into();
    std::fs::write(&path, config.to_string())?;
    let words = ["indexer_types", "index_topk_freq", "layer 6"];
    refuses(&up(model.path(), "0")?, model.path(), &words)
}

#[test]
fn a_split_of_other_layers_is_refused_with_the_numbers() -> anyhow::Result<()> {
    let model = copy_of("share-4-3")?;
    let directory = model.path().to_str().context("a path in UTF-8")?;
    for (split, words) in [("3,3,3", ["9", "10"]), ("5,6", ["11", "10"])] {
        let arguments = ["up", "--model", directory, "--port", "0", "--split", split];
        refuses(&arguments, model.path(), &words)?;
    }
    let arguments = ["up", "--model", directory, "--port", "0", "--stages", "11"];
    refuses(&arguments, model.path(), &["11", "10"])
}

#[test]
fn a_stage_that_never_comes_is_missed() -> anyhow::Result<()> {
    let grpc = free_address()?;
    let mut coordinator =
        coordinator(&grpc, "share-4-3", &["--stages", "2", "--join-timeout", "3"])?;
    let mut only = stage(&grpc, "share-4-3", &[])?;
    let status = coordinator.wait(START)?;
    let said = coordinator.stderr();
    ensure!(!status.success(), "the coordinator succeeded with one stage of two: {said}");
    ensure!(said.contains("1 of 2") || said.contains("stage 1"), "what is missing?\n{said}");
    only.wait(SOON).context("the stage outlives its coordinator")?;
    Ok(())
}

#[test]
fn a_stage_with_another_model_is_refused() -> anyhow::Result<()> {
    let grpc = free_address()?;
    let mut coordinator =
        coordinator(&grpc, "share-4-3", &["--stages", "2", "--join-timeout", "5"])?;
    let mut other = stage(&grpc, "share-8-2", &[])?;
    let status = other.wait(START)?;
    let said = other.stderr();
    ensure!(!status.success(), "a stage with another model joined: {said}");
    ensure!(said.contains("digest"), "both digests should be named:\n{said}");
    ensure!(!coordinator.wait(START)?.success(), "the coordinator started without stages");
    Ok(())
}
