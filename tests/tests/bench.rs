//! `baton bench`: what it measures is plausible, and what it cannot measure is refused.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use baton_tests::{Program, Server};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

fn pipeline(arguments: &[&str]) -> anyhow::Result<(bool, String, String)> {
    let mut program = Program::start(["bench", "pipeline"].iter().chain(arguments))?;
    let status = program.wait(LIMIT)?;
    Ok((status.success(), program.stdout(), program.stderr()))
}

#[test]
fn a_pipeline_of_delays_keeps_to_its_delay() -> anyhow::Result<()> {
    let arguments =
        ["--stages", "3", "--stage-ms", "20", "--sequences", "7", "--seconds", "2", "--json"];
    let (succeeded, out, errors) = pipeline(&arguments)?;
    ensure!(succeeded, "{errors}");
    let report: Value = serde_json::from_str(&out).with_context(|| out.clone())?;
    let figure = |name: &str| report[name].as_f64().with_context(|| format!("{name}: {report}"));
    ensure!((figure("ideal_steps_per_second")? - 50.0).abs() < 1e-9, "{report}");
    // No stage is faster than its sleep; a machine under load may be a good deal slower.
    let efficiency = figure("efficiency")?;
    ensure!(0.3 < efficiency && efficiency < 1.02, "{report}");
    let steps = figure("steps_per_second")?;
    let tokens = figure("tokens")? / figure("seconds")?;
    ensure!(
        (tokens / steps - 7.0 / 3.0).abs() < 1e-6,
        "seven sequences over three steps: {report}"
    );
    Ok(())
}

#[test]
fn what_cannot_be_measured_is_refused() -> anyhow::Result<()> {
    for (arguments, name) in [
        (["--stages", "0"], "--stages 0"),
        (["--stages", "79"], "79 stages"),
        (["--stage-ms", "0"], "--stage-ms 0"),
        (["--sequences", "0"], "--sequences 0"),
        (["--seconds", "-1"], "--seconds"),
    ] {
        let (succeeded, _, errors) = pipeline(&arguments)?;
        ensure!(!succeeded && errors.contains(name), "{arguments:?}: {errors}");
    }
    Ok(())
}

#[tokio::test]
async fn a_server_bears_a_load_in_both_loops() -> anyhow::Result<()> {
    let server = Server::start("share-4-3", &["--split", "4,2,4"]).await?;
    let directory = tempfile::tempdir()?;
    let page = directory.path().join("load.html");
    let page = page.to_str().context("a path in UTF-8")?;
    let fixed = ["bench", "serve", "--url", &server.url, "--requests", "20", "--json"];
    let lengths = ["--prompt-tokens", "10-40", "--output-tokens", "8", "--ignore-eos"];
    for (options, load) in [
        (vec!["--concurrency", "3"], "closed loop of 3"),
        (vec!["--rate", "50", "--html", page], "open loop of 50 requests/s"),
    ] {
        let mut program = Program::start(fixed.iter().chain(&lengths).chain(&options))?;
        let status = program.wait(LIMIT)?;
        ensure!(status.success(), "{options:?}: {}", program.stderr());
        let report: Value = serde_json::from_str(&program.stdout())?;
        ensure!(report["completed"] == 20 && report["failed"] == 0, "{report}");
        ensure!(report["completion_tokens"] == 160, "{report}");
        let said = report["load"].as_str().unwrap_or_default();
        ensure!(said.starts_with(load), "{said:?}, expected {load:?}");
        if load.starts_with("closed") {
            ensure!(report["most_under_way"].as_u64() <= Some(3), "{report}");
        }
        let prompts = report["prompt_tokens"].as_f64().context("prompt tokens")? / 20.0;
        ensure!((10.0..45.0).contains(&prompts), "prompts have {prompts} tokens on average");
        let percentile = |name: &str| report["time_to_first_token_ms"][name].as_f64();
        ensure!(
            percentile("p50") > Some(0.0) && percentile("p50") <= percentile("p99"),
            "{report}"
        );
    }
    let page = std::fs::read_to_string(page)?;
    ensure!(page.matches("<svg").count() == 5, "the page lacks plots");
    Ok(())
}
