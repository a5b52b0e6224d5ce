//! Carries that are missing, stale or wrong.

use std::time::Instant;

use anyhow::{Context as _, ensure};
use baton_tests::proxy::bytes;
use baton_tests::{Oracle, Pipeline, Proxy};
use baton_transport::SentCarry;
use serde_json::json;

use crate::{
    LATER, MODEL, NEEDS, Refusal, SOON, TOPK, at_step, carry, comes_back, refusal, refused,
    stream_until_error, streams_until_error,
};

// Missing.

#[tokio::test]
async fn a_stripped_carry_is_missed_in_prefill_and_in_decoding() -> anyhow::Result<()> {
    let words = ["layer 4 reuses the index rows of layer 2", "brought none"];
    for step in [1, LATER] {
        let missing = Refusal { step, ..refusal("missing-carry", &words) };
        missing.by(&at_step(step, |hand_off, _| hand_off.carry = None)?).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_carry_without_rows_is_missed_too() -> anyhow::Result<()> {
    let missing = Refusal {
        prompt: "short",
        step: 1,
        ..refusal("missing-carry", &["layer 4 reuses the index rows of layer 2"])
    };
    let proxy = at_step(1, |hand_off, _| {
        assert!(carry(hand_off).indices.is_empty(), "every row of the prompt is short");
        hand_off.carry = None;
    })?;
    missing.by(&proxy).await
}

#[tokio::test]
async fn a_stripped_carry_is_missed_behind_a_relay() -> anyhow::Result<()> {
    let untouched = Proxy::untouched(MODEL)?;
    let stripping = at_step(LATER, |hand_off, _| hand_off.carry = None)?;
    let words = ["layer 5 reuses the index rows of layer 2"];
    let missing = Refusal { split: "4,1,5", ..refusal("missing-carry", &words) };
    missing.is_seen(&[Some(&untouched), Some(&stripping)]).await
}

#[tokio::test]
async fn a_request_that_waits_for_its_whole_answer_gets_the_error() -> anyhow::Result<()> {
    let proxy = at_step(LATER, |hand_off, _| hand_off.carry = None)?;
    let oracle = Oracle::load(MODEL)?;
    let prompt = oracle.prompt("long")?;
    let pipeline = Pipeline::start(MODEL, "4,6", &[], &[Some(&proxy)]).await?;
    let client = &pipeline.server.client;
    let asked = Instant::now();
    let body = client.body(&prompt.tokens, &json!({"max_tokens": prompt.greedy.len()}));
    let (status, answer) = client.post("/v1/completions", &body).await?;
    ensure!(asked.elapsed() < SOON, "the error took {:?}", asked.elapsed());
    let message = refused(status, &answer)?;
    for word in ["stage 1", "step 5", "layer 4", "layer 2", "missing-carry"] {
        ensure!(message.contains(word), "no {word:?}: {message}");
    }
    comes_back(client).await
}

// Stale.

#[tokio::test]
async fn a_delayed_carry_is_stale() -> anyhow::Result<()> {
    let proxy = at_step(LATER, |hand_off, earlier| {
        hand_off.carry = earlier.last().and_then(|before| before.carry.clone());
    })?;
    refusal("stale-carry", &[NEEDS, "brought those of step 4"]).by(&proxy).await
}

#[tokio::test]
async fn a_carry_of_another_epoch_is_stale() -> anyhow::Result<()> {
    let proxy = at_step(LATER, |hand_off, _| carry(hand_off).epoch -= 1)?;
    refusal("stale-carry", &[NEEDS, "of epoch 0"]).by(&proxy).await
}

#[tokio::test]
async fn relabelled_rows_of_a_longer_context_are_told_by_their_positions() -> anyhow::Result<()> {
    let oracle = Oracle::load(MODEL)?;
    let (long, mid) = (oracle.prompt("long")?.clone(), oracle.prompt("mid")?.clone());
    let (longest, mut old, mut decodes) = (mid.tokens.len() + mid.greedy.len(), None, None);
    let prompt_rows = mid.tokens.len();
    let proxy = Proxy::start(MODEL, move |mut hand_off, limits| {
        match (hand_off.rows, &mut decodes) {
            (1, None) => old = hand_off.carry.clone().map(|carry| carry.indices),
            (rows, None) if rows == prompt_rows => decodes = Some(0),
            (1, Some(count)) => {
                *count += 1;
                if *count == 3 {
                    let indices = old.clone().unwrap();
                    assert!(indices.iter().any(|&i| i as usize >= longest), "{indices:?}");
                    carry(&mut hand_off).indices = indices;
                }
            }
            _ => {}
        }
        bytes(hand_off, limits)
    })?;
    let pipeline = Pipeline::start(MODEL, "4,6", &[], &[Some(&proxy)]).await?;
    let client = &pipeline.server.client;
    let whole = client.complete(&long.tokens, &json!({"max_tokens": long.greedy.len()})).await?;
    ensure!(whole["token_ids"] == json!(long.greedy), "{whole}");
    let (ids, message) = stream_until_error(client, &mid).await?;
    // The prompt's step and two decode steps were right.
    ensure!(ids == mid.greedy[..3], "streamed {ids:?}");
    let step = proxy.hand_offs()?.last().context("hand-offs")?.step_id;
    let step = format!("stage 1, step {step}: layer 4, index row of layer 2 for position 42");
    ensure!(message.contains("(carry-entry)") && message.contains(&step), "{message}");
    comes_back(client).await
}

// Wrong.

#[tokio::test]
async fn a_carry_of_another_layer_is_refused() -> anyhow::Result<()> {
    // Both links carry rows of the same step: those of layer 2 on the first, of layer 6 on the second.
    let first = Proxy::untouched(MODEL)?;
    let other = first.clone();
    let second = at_step(LATER, move |hand_off, _| {
        let same_step = other.hand_offs().unwrap().into_iter().find(|h| h.step_id == LATER);
        hand_off.carry = same_step.unwrap().carry;
    })?;
    let words = ["layer 8 needs the index rows of layer 6", "those of layer 2"];
    let wrong = Refusal { split: "4,4,2", ..refusal("wrong-carry-source", &words) };
    wrong.is_seen(&[Some(&first), Some(&second)]).await
}

#[tokio::test]
async fn a_carry_that_nobody_needs_is_refused() -> anyhow::Result<()> {
    let proxy = at_step(LATER, |hand_off, _| {
        let (epoch, step_id) = (hand_off.epoch, hand_off.step_id);
        let indices = (0..TOPK as i32).collect();
        hand_off.carry = Some(SentCarry { epoch, step_id, source_layer: 2, indices });
    })?;
    let words = ["layer 6 chooses for itself", "index rows of layer 2"];
    Refusal { split: "6,4", ..refusal("unexpected-carry", &words) }.by(&proxy).await
}

#[tokio::test]
async fn swapped_rows_of_two_requests_are_told_by_their_positions() -> anyhow::Result<()> {
    let oracle = Oracle::load(MODEL)?;
    let (long, above) = (oracle.prompt("long")?, oracle.prompt("above")?);
    let longest = (above.tokens.len() + above.greedy.len()) as i32;
    let mut swapped = false;
    let proxy = Proxy::start(MODEL, move |mut hand_off, limits| {
        if !swapped && hand_off.rows == 2 && carry(&mut hand_off).indices.len() == 2 * TOPK {
            let (one, other) = carry(&mut hand_off).indices.split_at_mut(TOPK);
            // Rows are ascending. Those of the long request reach beyond all of the other one's context.
            swapped = (one[TOPK - 1] >= longest) != (other[TOPK - 1] >= longest);
            if swapped {
                one.swap_with_slice(other);
            }
        }
        bytes(hand_off, limits)
    })?;
    let options = ["--micro-batches", "1"];
    let pipeline = Pipeline::start(MODEL, "4,6", &options, &[Some(&proxy)]).await?;
    let client = &pipeline.server.client;
    let (ids, message) = streams_until_error(client, [long, above]).await?;
    for (ids, prompt) in ids.iter().zip([long, above]) {
        ensure!(prompt.greedy.starts_with(ids), "{}: streamed {ids:?}", prompt.name);
    }
    let step = proxy.hand_offs()?.last().context("hand-offs")?.step_id;
    let step = format!("stage 1, step {step}: layer 4, index row of layer 2 for position");
    ensure!(message.contains("(carry-entry)") && message.contains(&step), "{message}");
    comes_back(client).await
}

#[tokio::test]
async fn another_number_of_rows_is_refused() -> anyhow::Result<()> {
    let prompt = Refusal {
        step: 1,
        ..refusal("carry-size", &["layer 4 needs 256 index entries of layer 2", "brought 248"])
    };
    let proxy = at_step(1, |hand_off, _| carry(hand_off).indices.truncate(31 * TOPK))?;
    prompt.by(&proxy).await?;
    let proxy = at_step(LATER, |hand_off, _| {
        hand_off.rows += 1;
        hand_off.hidden.extend_from_within(..);
    })?;
    refusal("row-count", &["hand-off has 2 rows, the step has 1"]).by(&proxy).await
}
