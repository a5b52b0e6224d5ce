//! Whole frames: spoilt, lost, late, and several of them in flight.

use std::time::Instant;

use anyhow::ensure;
use baton_tests::proxy::bytes;
use baton_tests::{Oracle, Pipeline, Proxy};
use baton_transport::HandOff;
use baton_transport::frame::{DESCRIPTOR_BYTES, HEADER_BYTES};
use serde_json::json;

use crate::controls::changes_nothing;
use crate::{LATER, MODEL, NEEDS, SOON, at_step, comes_back, refusal, stream_until_error};

#[tokio::test]
async fn a_flipped_bit_is_told_by_the_checksum() -> anyhow::Result<()> {
    // A decode step's frame: head, one row of 64 hidden values, its index row.
    let head = HEADER_BYTES + 2 * DESCRIPTOR_BYTES;
    for (at, part) in [(head + 64 * 4, "topk_indices"), (head + 9, "hidden_states"), (9, "header")]
    {
        let proxy = Proxy::start(MODEL, move |hand_off, limits| {
            let step = hand_off.step_id;
            let mut frame = bytes(hand_off, limits);
            if step == LATER {
                frame[at] ^= 4;
            }
            frame
        })?;
        let checksum = format!("checksum of {part}");
        refusal("bad-frame", &[&checksum, "from stage 0"]).by(&proxy).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_frame_that_never_comes_is_missed_in_time() -> anyhow::Result<()> {
    let proxy = Proxy::start(MODEL, |hand_off, limits| match hand_off.step_id {
        LATER => Vec::new(),
        _ => bytes(hand_off, limits),
    })?;
    let oracle = Oracle::load(MODEL)?;
    let prompt = oracle.prompt("mid")?;
    let options = ["--step-timeout", "2"];
    let pipeline = Pipeline::start(MODEL, "4,6", &options, &[Some(&proxy)]).await?;
    let asked = Instant::now();
    let (ids, message) = stream_until_error(&pipeline.server.client, prompt).await?;
    ensure!(asked.elapsed() < SOON, "the error took {:?}", asked.elapsed());
    ensure!(ids == prompt.greedy[..4], "streamed {ids:?}");
    ensure!(
        message.contains("stage 1, step 5") && message.contains("hand-off-timeout"),
        "{message}"
    );
    comes_back(&pipeline.server.client).await
}

#[tokio::test]
async fn duplicates_and_late_frames_are_dropped() -> anyhow::Result<()> {
    // Handoff cases 16 and 23: an older epoch's frame, then the right one, then it again, then the step before.
    let mut before: Option<HandOff> = None;
    let proxy = Proxy::start(MODEL, move |hand_off, limits| {
        let old = HandOff { epoch: hand_off.epoch - 1, carry: None, ..hand_off.clone() };
        let late = before.replace(hand_off.clone());
        let all = [Some(old), Some(hand_off.clone()), Some(hand_off), late];
        all.into_iter().flatten().flat_map(|h| bytes(h, limits)).collect()
    })?;
    changes_nothing("4,6", &[proxy]).await
}

#[tokio::test]
async fn a_frame_of_a_later_epoch_is_refused() -> anyhow::Result<()> {
    let proxy = at_step(LATER, |hand_off, _| hand_off.epoch += 1)?;
    refusal("wrong-epoch", &["epoch 2", "epoch 1"]).by(&proxy).await
}

// Several steps in flight.

/// Options with which the long prompt is computed in seven steps, up to three of them in flight.
const CHUNKS: [&str; 4] = ["--prefill-chunk", "16", "--micro-batches", "3"];

/// A proxy that holds the first three hand-offs until all have come, and passes on what `release` makes of them.
fn holding(mut release: impl FnMut(&mut [HandOff]) + Send + 'static) -> anyhow::Result<Proxy> {
    let mut held = Vec::new();
    Proxy::start(MODEL, move |hand_off, limits| {
        if hand_off.step_id > 3 {
            return bytes(hand_off, limits);
        }
        held.push(hand_off);
        if held.len() < 3 {
            return Vec::new();
        }
        release(&mut held);
        held.drain(..).flat_map(|hand_off| bytes(hand_off, limits)).collect()
    })
}

#[tokio::test]
async fn case_12_steps_in_flight_do_not_touch_each_other() -> anyhow::Result<()> {
    // The sender computes and sends steps 2 and 3 before the receiver has seen step 1.
    let proxy = holding(|_| {})?;
    let oracle = Oracle::load(MODEL)?;
    let prompt = oracle.prompt("long")?;
    let pipeline = Pipeline::start(MODEL, "4,6", &CHUNKS, &[Some(&proxy)]).await?;
    let options = json!({"max_tokens": prompt.greedy.len()});
    let answer = pipeline.server.client.complete(&prompt.tokens, &options).await?;
    ensure!(answer["token_ids"] == json!(prompt.greedy), "{answer}");
    let rows: Vec<usize> = proxy.hand_offs()?.iter().map(|h| h.rows).take(3).collect();
    ensure!(rows == [16, 16, 16], "{rows:?}");
    Ok(())
}

/// The first answer to the long prompt through this proxy must be an error that says all of `words`.
async fn chunks_fail(proxy: Proxy, words: &[&str]) -> anyhow::Result<()> {
    let oracle = Oracle::load(MODEL)?;
    let prompt = oracle.prompt("long")?;
    let pipeline = Pipeline::start(MODEL, "4,6", &CHUNKS, &[Some(&proxy)]).await?;
    let (ids, message) = stream_until_error(&pipeline.server.client, prompt).await?;
    ensure!(ids.is_empty(), "streamed {ids:?}");
    for word in words {
        ensure!(message.contains(word), "no {word:?}: {message}");
    }
    comes_back(&pipeline.server.client).await?;
    proxy.hand_offs().map(drop)
}

#[tokio::test]
async fn case_12_carries_of_two_steps_in_flight_are_told_apart() -> anyhow::Result<()> {
    // Steps 2 and 3 have equally many rows, all of them long; their carries differ in label and content alone.
    let proxy = holding(|held| {
        let second = held[1].carry.take();
        held[1].carry = std::mem::replace(&mut held[2].carry, second);
    })?;
    let words = ["(stale-carry)", "stage 1, step 2", NEEDS, "brought those of step 3"];
    chunks_fail(proxy, &words).await
}

#[tokio::test]
async fn case_12_steps_that_overtake_each_other_are_refused() -> anyhow::Result<()> {
    let proxy = holding(|held| held.swap(1, 2))?;
    let words = ["(out-of-order)", "stage 1, step 2", "step 3 arrived while step 2 is due"];
    chunks_fail(proxy, &words).await
}
