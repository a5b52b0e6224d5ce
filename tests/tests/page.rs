//! The live page in a real browser, in front of a real pipeline.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use baton_tests::{Browser, Pipeline};
use rustix::process::Signal;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);

/// What the page says and draws.
const LOOK: &str = r##"
const texts = query => Array.from(document.querySelectorAll(query), element => element.innerText);
const drawn = kind => Array.from(document.querySelectorAll(`#gantt rect.${kind}`), rect => Number(rect.dataset.stage));
return {
  model: document.querySelector("#model").innerText, ready: document.querySelector("#ready").innerText,
  stages: texts(".stage"), cuts: texts(".cut"), span: document.querySelector("#span").innerText,
  prefill: drawn("prefill"), decode: drawn("decode"), send: drawn("send"), receive: drawn("receive"),
  bubbles: document.querySelectorAll("#gantt rect.bubble").length,
  elsewhere: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith(location.origin)),
};"##;

async fn look(browser: &Browser) -> anyhow::Result<Value> {
    Ok(browser.page.execute(LOOK, Vec::new()).await?)
}

/// Distinct stages of drawn rectangles, in order.
fn stages(drawn: &Value) -> Vec<u64> {
    let mut stages: Vec<u64> =
        drawn.as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    stages.sort_unstable();
    stages.dedup();
    stages
}

#[tokio::test]
async fn an_operator_sees_stages_timeline_and_the_stage_that_died() -> anyhow::Result<()> {
    let pipeline = Pipeline::start("share-4-3", "4,2,4", &[], &[]).await?;
    let server = &pipeline.server;
    let browser = Browser::start().await?;
    browser.page.goto(&server.url).await?;
    browser.until("return document.querySelectorAll('.stage').length === 3", SOON).await?;
    let before = look(&browser).await?;
    assert_eq!((&before["model"], &before["ready"]), (&json!("share-4-3"), &json!("ready")));
    assert_eq!(before["bubbles"], 0, "no step yet");

    let prompt: Vec<u32> = (1..=40).collect();
    server.client.complete(&prompt, &json!({"max_tokens": 12})).await?;
    browser
        .until("return document.querySelectorAll('#gantt rect.decode').length > 20", SOON)
        .await?;
    let after = look(&browser).await?;
    for (stage, (layers, text)) in
        ["0–3", "4–5", "6–9"].iter().zip(after["stages"].as_array().context("stages")?).enumerate()
    {
        let text = text.as_str().context("text")?;
        for said in [&format!("stage {stage}"), "wired", &format!("layers {layers}"), "bubble"] {
            ensure!(text.contains(said), "no {said:?} in {text:?}");
        }
    }
    let cuts = after["cuts"].as_array().context("cuts")?;
    ensure!(
        cuts.len() == 2 && cuts.iter().all(|cut| cut.as_str().is_some_and(|c| c.contains("tcp")))
    );
    assert_eq!(stages(&after["prefill"]), [0, 1, 2], "the prompt's step on every stage");
    assert_eq!(stages(&after["decode"]), [0, 1, 2]);
    // The first stage receives nothing and the last one sends nothing.
    assert_eq!(stages(&after["send"]), [0, 1]);
    assert_eq!(stages(&after["receive"]), [1, 2]);
    ensure!(after["bubbles"].as_u64() >= Some(3), "{after}");
    ensure!(after["span"].as_str().is_some_and(|span| span.contains("steps/s")), "{after}");
    assert_eq!(after["elsewhere"], json!([]), "the page asks nobody else");
    if let Some(file) = std::env::var_os("BATON_SCREENSHOT") {
        std::fs::write(file, browser.page.screenshot().await?)?;
    }

    // Paused, it stays as it is; with fewer steps wanted it draws fewer.
    let pause = "document.querySelector('#pause').click(); \
                 const count = document.querySelector('#count'); count.value = '16'; return count.value";
    assert_eq!(browser.page.execute(pause, Vec::new()).await?, "16");
    server.client.complete(&prompt, &json!({"max_tokens": 40})).await?;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(look(&browser).await?["decode"], after["decode"]);
    browser.page.execute("document.querySelector('#pause').click()", Vec::new()).await?;
    let fewer = "return document.querySelector('#span').innerText.startsWith('16 steps')";
    browser.until(fewer, SOON).await?;

    // Nobody starts it again.
    pipeline.stages[1].signal(Signal::KILL)?;
    let dead = "return document.querySelector('#ready').className === 'state bad'";
    browser.until(dead, SOON).await?;
    let said = look(&browser).await?;
    let ready = said["ready"].as_str().context("text")?;
    ensure!(ready.starts_with("not ready: stage 1 was lost"), "{ready}");
    ensure!(said["stages"][1].as_str().is_some_and(|text| text.contains("absent")), "{said}");
    assert_eq!(stages(&said["decode"]), [0, 1, 2], "the last steps stay");
    Ok(())
}
