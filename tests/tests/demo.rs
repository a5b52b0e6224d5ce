//! `baton up` with nothing else: the demo model copies lists exactly, at every number of stages.

use std::path::Path;

use anyhow::{Context as _, ensure};
use baton_tests::models::model_dir;
use baton_tests::{Program, Server};
use serde_json::{Value, json};

async fn demo(cache: &Path, options: &[&str]) -> anyhow::Result<Server> {
    // The program unpacks the model where this says.
    let cache = format!("XDG_CACHE_HOME={}", cache.display());
    let fixed = ["up", "--port", "0", "--threads", "1"];
    let program = Program::start_with([cache.as_str()], fixed.iter().chain(options))?;
    Server::ready(program, "demo").await
}

async fn text(server: &Server, prompt: &str) -> anyhow::Result<String> {
    let body = json!({"model": "demo", "prompt": prompt, "max_tokens": 200, "temperature": 0});
    let (status, answer) = server.client.post("/v1/completions", &body).await?;
    let choice = &answer["choices"][0];
    ensure!(status.is_success() && choice["finish_reason"] == "stop", "{status}: {answer}");
    Ok(choice["text"].as_str().context("a text")?.to_owned())
}

#[tokio::test]
async fn the_demo_model_copies_fifty_words_at_every_number_of_stages() -> anyhow::Result<()> {
    let task = std::fs::read_to_string(model_dir("demo").join("copy_task.json"))?;
    let task: Value = serde_json::from_str(&task)?;
    let words: Vec<&str> =
        task["words"].as_array().context("words")?.iter().filter_map(Value::as_str).collect();
    // Every eighth word: fifty of the four hundred, starting elsewhere each time.
    let lists: Vec<String> = (0..4)
        .map(|start| words.iter().skip(start).step_by(8).copied().collect::<Vec<_>>().join(" "))
        .collect();
    let cache = tempfile::tempdir()?;
    for options in [
        ["--stages", "1"],
        ["--stages", "2"],
        // Every kind of cut: inside a run of shared layers, before a full one, and a stage of shared layers alone.
        ["--split", "3,3,3,3"],
        ["--split", "5,2,2,1,1,1"],
    ] {
        let server = demo(cache.path(), &options).await?;
        for list in &lists {
            ensure!(list.split(' ').count() == 50, "{list}");
            let copy = text(&server, &format!("Repeat: {list}\nCopy:")).await?;
            ensure!(copy == format!(" {list}\n"), "{options:?}: {list:?} became {copy:?}");
        }
    }
    Ok(())
}
