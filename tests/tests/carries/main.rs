//! A proxy between two stages strips, delays and swaps carries: every such step fails with an error that names stage,
//! layer, source layer and step, and no token of it is answered. Untouched frames change nothing.
//!
//! `docs/handoff-cases.md` lists the cases. What no receiver can tell is not tested: index rows of another step or
//! sequence that are relabelled as this step's, have its row count and lie within its rows' contexts are a well-formed
//! carry. A stage labels rows where it computes them and never again, so a fault cannot make such a frame, only a forger
//! can; links are for trusted networks.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod controls;
mod frames;
mod refusals;

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use baton_tests::proxy::bytes;
use baton_tests::{Client, Oracle, OraclePrompt, Pipeline, Proxy};
use baton_transport::{HandOff, SentCarry};
use reqwest::StatusCode;
use serde_json::{Value, json};

/// Layers F F F S S S F S S S, `index_topk` 8.
const MODEL: &str = "share-4-3";
const TOPK: usize = 8;
/// Time in which a failure must have shown everywhere.
const SOON: Duration = Duration::from_secs(10);

/// A decode step of the first request: step 1 is its whole prompt.
const LATER: u64 = 5;

/// A proxy that changes the hand-off of one step and knows those before it.
fn at_step(
    step_id: u64,
    mut change: impl FnMut(&mut HandOff, &[HandOff]) + Send + 'static,
) -> anyhow::Result<Proxy> {
    let mut earlier = Vec::new();
    Proxy::start(MODEL, move |mut hand_off, limits| {
        let sent = hand_off.clone();
        if hand_off.step_id == step_id {
            change(&mut hand_off, &earlier);
            assert_ne!(hand_off, sent, "nothing was changed");
        }
        earlier.push(sent);
        bytes(hand_off, limits)
    })
}

fn carry(hand_off: &mut HandOff) -> &mut SentCarry {
    hand_off.carry.as_mut().unwrap()
}

/// The message of an answer that must be an error and nothing else.
fn refused(status: StatusCode, answer: &Value) -> anyhow::Result<String> {
    ensure!(status == StatusCode::SERVICE_UNAVAILABLE, "{status}: {answer}");
    ensure!(answer["error"]["type"] == "server_error" && answer["choices"].is_null(), "{answer}");
    Ok(answer["error"]["message"].as_str().context("a message")?.to_owned())
}

/// Ids of a stream until its end, which must be an error, and the error's message.
async fn stream_until_error(
    client: &Client,
    prompt: &OraclePrompt,
) -> anyhow::Result<(Vec<u32>, String)> {
    let ([ids], message) = streams_until_error(client, [prompt]).await?;
    Ok((ids, message))
}

/// As [`stream_until_error`], with several prompts in one request.
async fn streams_until_error<const N: usize>(
    client: &Client,
    prompts: [&OraclePrompt; N],
) -> anyhow::Result<([Vec<u32>; N], String)> {
    let longest = prompts.iter().map(|p| p.greedy.len()).max();
    let batch = prompts.map(|p| p.tokens.clone());
    let mut ids = [const { Vec::new() }; N];
    let options = json!({"prompt": &batch[..], "max_tokens": longest});
    let mut stream = match client.try_stream(&[], &options).await? {
        Ok(stream) => stream,
        Err((status, answer)) => return Ok((ids, refused(status, &answer)?)),
    };
    let mut message = None;
    while let Some(data) = stream.next().await? {
        ensure!(message.is_none() && data != "[DONE]", "{data} instead of an end after an error");
        let event: Value = serde_json::from_str(&data)?;
        if event["error"].is_object() {
            ensure!(event["error"]["type"] == "server_error", "{event}");
            message = Some(event["error"]["message"].as_str().context(data)?.to_owned());
        } else {
            let choice = &event["choices"][0];
            let index = choice["index"].as_u64().context("an index")? as usize;
            ids[index].extend(serde_json::from_value::<Vec<u32>>(choice["token_ids"].clone())?);
        }
    }
    let message = message.with_context(|| format!("no error after {ids:?}"))?;
    Ok((ids, message))
}

/// The stages, all of which still live, are wired again under a new epoch, and nothing failed remains.
async fn comes_back(client: &Client) -> anyhow::Result<()> {
    let failed = Instant::now();
    loop {
        let (_, state) = client.get("/pipeline").await?;
        let (status, ready) = client.get("/ready").await?;
        if status == StatusCode::OK && state["epoch"].as_u64() > Some(1) {
            ensure!(state["failure"].is_null(), "{state}");
            return Ok(());
        }
        ensure!(failed.elapsed() < SOON, "the pipeline does not come back: {ready}, {state}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Which step the receiver must refuse, and what it must say beside it.
struct Refusal<'a> {
    split: &'a str,
    /// Name of the oracle's prompt.
    prompt: &'a str,
    step: u64,
    kind: &'a str,
    words: &'a [&'a str],
}

impl Refusal<'_> {
    /// Streams one request through the proxies, the last of which spoils the step.
    async fn is_seen(&self, proxies: &[Option<&Proxy>]) -> anyhow::Result<()> {
        let context = format!("{} at step {} of {}", self.kind, self.step, self.split);
        let oracle = Oracle::load(MODEL)?;
        let prompt = oracle.prompt(self.prompt)?;
        let pipeline = Pipeline::start(MODEL, self.split, &[], proxies).await?;
        let client = &pipeline.server.client;
        let asked = Instant::now();
        let (ids, message) =
            stream_until_error(client, prompt).await.with_context(|| context.clone())?;
        ensure!(asked.elapsed() < SOON, "{context}: the error took {:?}", asked.elapsed());
        // One request alone gets a token per step: all of those before, none after.
        let before = self.step as usize - 1;
        ensure!(ids == prompt.greedy[..before], "{context}: streamed {ids:?}");
        let stage = self.split.split(',').count() - 1;
        let own =
            format!("stage {stage} failed ({}): stage {stage}, step {}", self.kind, self.step);
        for word in [own.as_str()].iter().chain(self.words) {
            ensure!(message.contains(word), "{context} does not mention {word:?}: {message}");
        }
        comes_back(client).await.context(context)?;
        for proxy in proxies.iter().flatten() {
            proxy.hand_offs()?;
        }
        Ok(())
    }

    /// As [`Refusal::is_seen`], with one proxy before the last of two stages.
    async fn by(&self, proxy: &Proxy) -> anyhow::Result<()> {
        self.is_seen(&[Some(proxy)]).await
    }
}

/// The second stage starts on shared layer 4, which reuses the rows of layer 2.
fn refusal<'a>(kind: &'a str, words: &'a [&'a str]) -> Refusal<'a> {
    Refusal { split: "4,6", prompt: "mid", step: LATER, kind, words }
}

const NEEDS: &str = "layer 4 needs the index rows of layer 2";
