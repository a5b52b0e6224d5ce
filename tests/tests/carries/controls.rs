//! Proxies that change nothing that matters.

use anyhow::{Context as _, ensure};
use baton_tests::proxy::bytes;
use baton_tests::{Client, Oracle, Pipeline, Proxy, Server};
use baton_transport::HandOff;
use baton_transport::frame::{DESCRIPTOR_BYTES, FrameLimits, HEADER_BYTES};
use serde_json::{Value, json};

use crate::{MODEL, TOPK};

/// Everything the API tells about three prompts: shorter than, somewhat longer than and far longer than `index_topk`.
async fn answers(client: &Client, oracle: &Oracle) -> anyhow::Result<Vec<Value>> {
    let mut answers = Vec::new();
    for name in ["short", "mid", "long"] {
        let prompt = oracle.prompt(name)?;
        let options = json!({"max_tokens": prompt.greedy.len(), "echo": true, "logprobs": 5});
        let answer = client.complete(&prompt.tokens, &options).await?;
        ensure!(answer["token_ids"] == json!(prompt.greedy), "{name}: {}", answer["token_ids"]);
        let scores: Vec<Option<f64>> =
            serde_json::from_value(answer["logprobs"]["token_logprobs"].clone())?;
        let expected = prompt.logprobs.iter().copied();
        let expected = expected.chain(prompt.greedy_logprobs.iter().copied().map(Some));
        for (at, (found, expected)) in scores.iter().zip(expected).enumerate() {
            let distance = found.unwrap_or(0.0) - expected.unwrap_or(0.0);
            ensure!(distance.abs() <= 1e-4, "{name}, token {at}: {found:?}, {expected:?}");
        }
        answers.push(answer);
    }
    Ok(answers)
}

/// Answers of a pipeline whose every link has one of these proxies are those without any.
pub(crate) async fn changes_nothing(split: &str, proxies: &[Proxy]) -> anyhow::Result<()> {
    let oracle = Oracle::load(MODEL)?;
    let plain = Server::start(MODEL, &["--split", split]).await?;
    let expected = answers(&plain.client, &oracle).await?;
    let links: Vec<Option<&Proxy>> = proxies.iter().map(Some).collect();
    let pipeline = Pipeline::start(MODEL, split, &[], &links).await?;
    let found = answers(&pipeline.server.client, &oracle).await?;
    ensure!(found == expected, "{split}: answers through a proxy differ");
    Ok(())
}

#[tokio::test]
async fn untouched_carries_answer_as_without_a_proxy() -> anyhow::Result<()> {
    // Handoff case 2: the second link relays the rows of layer 2 as they came over the first.
    let proxies = [Proxy::untouched(MODEL)?, Proxy::untouched(MODEL)?];
    changes_nothing("4,1,5", &proxies).await?;
    let (first, second) = (proxies[0].hand_offs()?, proxies[1].hand_offs()?);
    // A last step that only frees blocks may still be on its way.
    let both = first.len().min(second.len());
    ensure!(both >= 3 * 24, "{both} hand-offs: a proxy was not in the way");
    for (sent, relayed) in first.iter().zip(&second) {
        let step = sent.step_id;
        let carry = sent.carry.as_ref().with_context(|| format!("step {step} has no carry"))?;
        ensure!((carry.source_layer, carry.step_id) == (2, step), "step {step}: {carry:?}");
        ensure!(
            (relayed.step_id, &relayed.carry) == (step, &sent.carry),
            "step {step}: {relayed:?}"
        );
    }
    // Handoff case 10: only rows whose context is longer than index_topk carry indices, in mixed steps too.
    let entries = |rows: usize| {
        let of = first.iter().find(|h| h.rows == rows).unwrap();
        of.carry.as_ref().unwrap().indices.len()
    };
    for (rows, long) in [(5, 0), (40, 32), (100, 92)] {
        ensure!(entries(rows) == long * TOPK, "{rows} rows carry {} entries", entries(rows));
    }
    Ok(())
}

#[tokio::test]
async fn case_01_the_carry_is_the_rows_that_the_source_layer_chose() -> anyhow::Result<()> {
    // The first stage ends on the source layer itself, after it, before a full layer, and after the next source layer.
    for split in ["3,7", "4,6", "6,4", "8,2"] {
        let proxy = Proxy::untouched(MODEL)?;
        let pipeline = Pipeline::start(MODEL, split, &[], &[Some(&proxy)]).await?;
        let oracle = Oracle::load(MODEL)?;
        // Twice: rows of the request before must not be in the way.
        for name in ["long", "mid"] {
            let prompt = &oracle.prompt(name)?.tokens;
            pipeline.server.client.complete(prompt, &json!({"max_tokens": 1})).await?;
            let hand_offs = proxy.hand_offs()?;
            let sent = hand_offs.iter().find(|h| h.rows == prompt.len()).context("its step")?;
            let source = match split {
                "6,4" => None,
                "8,2" => Some(6),
                _ => Some(2),
            };
            let carry = sent.carry.as_ref().map(|c| (c.source_layer, c.indices.clone()));
            let expected = source.map(|layer| {
                let rows = Oracle::index_rows(MODEL, name, layer).unwrap();
                assert_eq!(rows.len(), prompt.len());
                (layer, rows[TOPK..].concat())
            });
            ensure!(carry == expected, "{split}, {name}: {carry:?}, expected {expected:?}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_split_without_carries_has_nothing_to_strip() -> anyhow::Result<()> {
    // Handoff case 4: the next stage starts on a full layer.
    let strip = |mut hand_off: HandOff, limits: &FrameLimits| {
        hand_off.carry = None;
        bytes(hand_off, limits)
    };
    let proxies = [Proxy::start(MODEL, strip)?];
    changes_nothing("6,4", &proxies).await?;
    let hand_offs = proxies[0].hand_offs()?;
    ensure!(hand_offs.len() >= 3 * 24 && hand_offs.iter().all(|h| h.carry.is_none()));
    Ok(())
}

#[tokio::test]
async fn case_05_without_shared_layers_no_byte_tells_of_carries() -> anyhow::Result<()> {
    let model = "all-full";
    let proxy = Proxy::start(model, |hand_off, limits| {
        let (rows, frame) = (hand_off.rows, bytes(hand_off, limits));
        assert_eq!(frame.len(), HEADER_BYTES + DESCRIPTOR_BYTES + rows * limits.hidden_size * 4);
        frame
    })?;
    let pipeline = Pipeline::start(model, "3,3", &[], &[Some(&proxy)]).await?;
    let oracle = Oracle::load(model)?;
    let prompt = oracle.prompt("mid")?;
    let options = json!({"max_tokens": prompt.greedy.len()});
    let answer = pipeline.server.client.complete(&prompt.tokens, &options).await?;
    ensure!(answer["token_ids"] == json!(prompt.greedy), "{answer}");
    ensure!(proxy.hand_offs()?.len() >= prompt.greedy.len());
    Ok(())
}
