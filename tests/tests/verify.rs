//! `baton verify`: sound pipelines are found the same, the fault of stock engines is found, and what cannot be compared is
//! an error.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use baton_tests::{Program, Server};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(120);
const SAME: i32 = 0;
const DIFFERS: i32 = 1;
const NO_VERDICT: i32 = 2;

/// Exit status, standard output and standard error.
fn verify(arguments: &[&str]) -> anyhow::Result<(i32, String, String)> {
    let mut program = Program::start(["verify"].iter().chain(arguments))?;
    let status = program.wait(LIMIT)?;
    Ok((status.code().context("an exit status")?, program.stdout(), program.stderr()))
}

fn report(arguments: &[&str], expected: i32) -> anyhow::Result<Value> {
    let arguments: Vec<&str> =
        arguments.iter().chain(&["--json", "--trials", "2"]).copied().collect();
    let (status, out, errors) = verify(&arguments)?;
    ensure!(status == expected, "{arguments:?} ended with {status}: {out}{errors}");
    serde_json::from_str(&out).with_context(|| out.clone())
}

/// Due and equal rows of every stage that needs some, in prefill and in decode.
fn rows(report: &Value) -> anyhow::Result<Vec<[u64; 4]>> {
    let stages = report["carries"].as_array().context("carries")?;
    Ok(stages
        .iter()
        .filter(|stage| !stage["from_layer"].is_null())
        .map(|stage| {
            let of = |phase: &str, what: &str| stage[phase][what].as_u64().unwrap_or(u64::MAX);
            [
                of("prefill", "all"),
                of("prefill", "equal"),
                of("decode", "all"),
                of("decode", "equal"),
            ]
        })
        .collect())
}

#[test]
fn a_sound_pipeline_is_the_same_at_every_kind_of_cut() -> anyhow::Result<()> {
    for split in ["6,6", "4,4,4", "3,3,3,3", "2,2,2,2,2,2", "5,1,1,3,2"] {
        let report = report(&["--split", split], SAME)?;
        ensure!(
            report["verdict"] == "same" && report["first_diverging_layer"].is_null(),
            "{report}"
        );
        for [prefill, equal, decode, decode_equal] in rows(&report)? {
            ensure!(prefill > 1000 && prefill == equal, "{split}: {report}");
            ensure!(decode > 10 && decode == decode_equal, "{split}: {report}");
        }
        let difference = report["loss"]["difference"].as_f64().context("a difference")?;
        ensure!(difference == 0.0, "{split}: {difference}");
        for copies in report["copies"].as_array().context("copies")? {
            ensure!(copies["reference"] == 2 && copies["identical"] == 2, "{split}: {copies}");
        }
    }
    Ok(())
}

#[test]
fn stale_rows_are_found_by_every_check() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let page = dir.path().join("report.html");
    let page = page.to_str().context("a path")?;
    let stale = ["--split", "3,3,3,3", "--reproduce", "stale", "--html", page];
    let report = report(&stale, DIFFERS)?;
    let rows = rows(&report)?;
    ensure!(rows.len() == 2, "stages 1 and 3 begin with shared layers: {report}");
    for [prefill, equal, ..] in rows {
        ensure!(prefill > 1000 && equal == 0, "{report}");
    }
    ensure!(report["verdict"] == "differs" && report["first_diverging_layer"] == 3, "{report}");
    let difference = report["loss"]["difference"].as_f64().context("a difference")?;
    ensure!(difference > 0.1, "a clearly worse loss: {difference}");
    for copies in report["copies"].as_array().context("copies")? {
        ensure!(copies["reference"] == 2 && copies["candidate"] == 0, "{copies}");
    }
    let written = std::fs::read_to_string(page)?;
    ensure!(written.matches("<svg").count() == 3 && written.contains("differs"), "{written}");
    Ok(())
}

#[test]
fn without_a_carry_there_is_nothing_to_be_stale() -> anyhow::Result<()> {
    // Layers 2, 6 and 10 are full: every stage begins with a choice of its own.
    let report = report(&["--split", "2,4,4,2", "--reproduce", "stale"], SAME)?;
    ensure!(rows(&report)?.is_empty() && report["loss"]["difference"] == 0.0, "{report}");
    Ok(())
}

#[tokio::test]
async fn servers_are_compared_and_a_reference_of_another_model_differs() -> anyhow::Result<()> {
    let whole = Server::start("demo", &["--stages", "1"]).await?;
    let cut = Server::start("demo", &["--split", "3,3,3,3"]).await?;
    let arguments = ["--endpoint", &cut.url, "--reference", &whole.url];
    let found = report(&arguments, SAME)?;
    ensure!(found["loss"]["tokens"].as_u64() > Some(1000), "{found}");
    for copies in found["copies"].as_array().context("copies")? {
        ensure!(copies["reference"] == 2 && copies["candidate"] == 2, "{copies}");
    }
    // The same shape and tokenizer, but with fewer positions chosen: a model that answers otherwise.
    let dir = tempfile::tempdir()?;
    let other = dir.path().join("other");
    std::fs::create_dir(&other)?;
    for entry in std::fs::read_dir(baton_tests::models::model_dir("demo"))? {
        let path = entry?.path();
        std::fs::copy(&path, other.join(path.file_name().context("a name")?))?;
    }
    let config = std::fs::read_to_string(other.join("config.json"))?;
    let config = config.replace("\"index_topk\": 32", "\"index_topk\": 4");
    std::fs::write(other.join("config.json"), config)?;
    let other = Server::start_in(&other, &["--stages", "1"]).await?;
    let found = report(&["--endpoint", &other.url, "--reference", &whole.url], DIFFERS)?;
    ensure!(found["verdict"] == "differs", "{found}");
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_compared_has_no_verdict_and_one_reason() -> anyhow::Result<()> {
    let demo = Server::start("demo", &["--stages", "1"]).await?;
    let other = Server::start("share-4-3", &["--stages", "1"]).await?;
    let gone = format!("http://{}", baton_tests::pipeline::free_address()?);
    let dir = tempfile::tempdir()?;
    let short = dir.path().join("short.txt");
    std::fs::write(&short, "Too short.")?;
    let short = short.to_str().context("a path")?;
    for (arguments, reason) in [
        (vec!["--endpoint", &gone, "--reference", &demo.url], gone.as_str()),
        (vec!["--endpoint", &other.url, "--reference", &demo.url], "they tokenize the same text"),
        (
            vec!["--endpoint", &demo.url, "--reference", &demo.url, "--segment", "9000"],
            "longest context is 1024",
        ),
        (vec!["--split", "5,5"], "5,5"),
        (vec!["--split", "6,6", "--text", "/nowhere.txt"], "/nowhere.txt"),
        (vec!["--split", "6,6", "--text", short], "expected at least"),
        (vec!["--model", "/nowhere", "--stages", "2"], "/nowhere"),
    ] {
        let (status, out, errors) = verify(&arguments)?;
        ensure!(status == NO_VERDICT, "{arguments:?} ended with {status}: {out}{errors}");
        let said: Vec<&str> = errors.lines().filter(|line| line.starts_with("baton: ")).collect();
        ensure!(said.len() == 1 && said[0].contains(reason), "{arguments:?}: {errors}");
    }
    Ok(())
}
