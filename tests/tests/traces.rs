//! One trace from the request to every stage's part of its steps, over real processes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use baton_tests::collector::{int, string};
use baton_tests::models::model_dir;
use baton_tests::{Collector, Program, Server};
use opentelemetry_proto::tonic::trace::v1::Span;
use reqwest::Client;
use serde_json::{Value, json};

const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
/// Exports happen at once, so that a test need not wait for them.
const SOON: [&str; 2] = ["OTEL_BSP_SCHEDULE_DELAY=50", "OTEL_METRIC_EXPORT_INTERVAL=100"];
const LAYERS: [&str; 3] = ["0..4", "4..6", "6..10"];

async fn server(options: &[&str]) -> anyhow::Result<Server> {
    let model = model_dir("share-4-3");
    let path = model.to_str().context("a path in UTF-8")?;
    let fixed = ["up", "--model", path, "--port", "0", "--threads", "1", "--split", "4,2,4"];
    Server::ready(Program::start_with(SOON, fixed.iter().chain(options))?, "share-4-3").await
}

/// A completion of 40 tokens' prompt in two chunks; returns the status and the id in the answer's header.
async fn ask(server: &Server, traceparent: Option<&str>, tokens: usize) -> anyhow::Result<String> {
    let prompt: Vec<u32> = (1..=40).collect();
    let body = server.client.body(&prompt, &json!({"max_tokens": tokens}));
    let mut request =
        Client::builder().no_proxy().build()?.post(format!("{}/v1/completions", server.url));
    if let Some(traceparent) = traceparent {
        request = request.header("traceparent", traceparent);
    }
    let response = request.json(&body).send().await?;
    ensure!(response.status() == 200, "{}", response.status());
    let id = response.headers().get("x-request-id").context("an id")?.to_str()?.to_owned();
    let answer: Value = response.json().await?;
    ensure!(answer["usage"]["completion_tokens"] == tokens, "{answer}");
    Ok(id)
}

fn named<'a>(spans: &'a [(String, Span)], name: &str) -> Vec<&'a Span> {
    spans.iter().map(|(_, span)| span).filter(|span| span.name == name).collect()
}

fn root(spans: &[(String, Span)]) -> Option<&Span> {
    spans.iter().map(|(_, span)| span).find(|span| span.name == "text_completion share-4-3")
}

#[tokio::test]
async fn a_request_is_one_trace_down_to_every_stage_of_every_step() -> anyhow::Result<()> {
    let (collector, url) = Collector::grpc().await?;
    let options = ["--prefill-chunk", "32", "--otlp-endpoint", &url, "--trace-decode-every", "2"];
    let server = server(&options).await?;
    let id = ask(&server, Some(TRACEPARENT), 6).await?;
    // Two chunks; of five decode steps the first, third and fifth.
    let spans =
        collector.wait(|spans| root(spans).is_some() && named(spans, "stage").len() >= 15).await?;
    let root = root(&spans).context("a root")?;
    assert_eq!(root.trace_id, hex("0af7651916cd43dd8448eb211c80319c"));
    assert_eq!(root.parent_span_id, hex("b7ad6b7169203331"));
    assert_eq!(string(root, "baton.request.id"), Some(id));
    assert_eq!(string(root, "gen_ai.operation.name").as_deref(), Some("text_completion"));
    assert_eq!(string(root, "gen_ai.request.model").as_deref(), Some("share-4-3"));
    assert_eq!(int(root, "gen_ai.usage.input_tokens"), Some(40));
    assert_eq!(int(root, "gen_ai.usage.output_tokens"), Some(6));
    assert_eq!(int(root, "http.response.status_code"), Some(200));
    for (_, span) in &spans {
        assert_eq!(span.trace_id, root.trace_id, "{}", span.name);
    }
    for (name, count) in [("queue", 1), ("tokenize", 1), ("prefill chunk", 2), ("decode step", 3)] {
        let found = named(&spans, name);
        assert_eq!(found.len(), count, "{name}");
        for span in found {
            assert_eq!(span.parent_span_id, root.span_id, "{name}");
            ensure!(root.start_time_unix_nano <= span.start_time_unix_nano, "{name}");
            ensure!(span.end_time_unix_nano <= root.end_time_unix_nano, "{name}");
        }
    }
    let chunks = named(&spans, "prefill chunk");
    let rows = chunks.iter().map(|span| (int(span, "baton.position"), int(span, "baton.rows")));
    let expected = BTreeSet::from([(Some(0), Some(32)), (Some(32), Some(8))]);
    assert_eq!(rows.collect::<BTreeSet<_>>(), expected);
    let steps = [chunks, named(&spans, "decode step")].concat();
    for step in steps {
        let below = spans.iter().filter(|(_, span)| span.parent_span_id == step.span_id);
        let mut below: Vec<_> = below.collect();
        below.sort_by_key(|(_, span)| int(span, "baton.stage.index"));
        assert_eq!(below.len(), 3, "one span per stage below {}", step.name);
        for (stage, (service, span)) in below.into_iter().enumerate() {
            assert_eq!((service.as_str(), span.name.as_str()), ("baton-stage", "stage"));
            check_stage(stage, span, step)?;
        }
    }
    Ok(())
}

fn check_stage(stage: usize, span: &Span, step: &Span) -> anyhow::Result<()> {
    let value = |key: &str| int(span, key).with_context(|| format!("stage {stage} has no {key}"));
    assert_eq!(value("baton.stage.index")?, i64::try_from(stage)?);
    assert_eq!(string(span, "baton.stage.layers").as_deref(), Some(LAYERS[stage]));
    for key in ["baton.rows", "baton.step.id", "baton.epoch", "baton.step.rows"] {
        assert_eq!(Some(value(key)?), int(step, key), "{key}");
    }
    let parts = ["queue_wait_us", "receive_wait_us", "compute_us", "send_us"];
    let parts = parts.map(|part| value(&format!("baton.stage.{part}")));
    let sum = parts.into_iter().sum::<anyhow::Result<i64>>()?;
    let took = (span.end_time_unix_nano - span.start_time_unix_nano) / 1000;
    assert_eq!(i64::try_from(took)?, sum, "the span is its parts");
    ensure!(value("baton.stage.compute_us")? > 0, "it computed");
    // The last stage hands nothing on. Rows beyond the 8 positions of index_topk carry theirs.
    let (bytes, carried) = (value("baton.handoff.bytes")?, value("baton.handoff.carry_rows")?);
    assert_eq!(bytes > 0, stage < 2, "{bytes} bytes");
    ensure!(carried >= 0 && carried <= value("baton.step.rows")?, "{carried} rows carried");
    Ok(())
}

#[tokio::test]
async fn a_malformed_traceparent_begins_a_trace_of_its_own() -> anyhow::Result<()> {
    let (collector, url) = Collector::grpc().await?;
    let server = server(&["--otlp-endpoint", &url]).await?;
    ask(&server, Some("00-not-a-trace-01"), 2).await?;
    let spans = collector.wait(|s| root(s).is_some() && named(s, "stage").len() >= 6).await?;
    let root = root(&spans).context("a root")?;
    ensure!(root.parent_span_id.is_empty() && root.trace_id.iter().any(|byte| *byte != 0));
    Ok(())
}

#[tokio::test]
async fn traces_and_metrics_go_over_http_and_only_as_often_as_wanted() -> anyhow::Result<()> {
    let (collector, url) = Collector::http().await?;
    let options = ["--otlp-endpoint", &url, "--otlp-protocol", "http", "--trace-ratio", "0"];
    let server = server(&options).await?;
    // By itself a request is not sampled; with a parent that is, it is.
    ask(&server, None, 2).await?;
    ask(&server, Some(TRACEPARENT), 2).await?;
    let spans = collector.wait(|s| root(s).is_some() && named(s, "stage").len() >= 6).await?;
    for (_, span) in &spans {
        assert_eq!(span.trace_id, hex("0af7651916cd43dd8448eb211c80319c"));
    }
    let start = Instant::now();
    for wanted in [("baton", "baton.requests"), ("baton-stage", "baton.stage.time")] {
        let wanted = (wanted.0.to_owned(), wanted.1.to_owned());
        while !collector.metric_names().contains(&wanted) {
            ensure!(start.elapsed() < Duration::from_secs(20), "no {wanted:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_collector_out_of_reach_is_reported_once_and_serving_goes_on() -> anyhow::Result<()> {
    let nobody = baton_tests::pipeline::free_address()?;
    let url = format!("http://{nobody}");
    let server = server(&["--otlp-endpoint", &url, "--log-format", "json"]).await?;
    for _ in 0..5 {
        ask(&server, None, 4).await?;
        // Several exports have failed meanwhile.
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let log = server.program.stderr();
    // Stages have lines of their own, with their number first.
    for own in ["{\"timestamp", "{\"stage\":0", "{\"stage\":1", "{\"stage\":2"] {
        let warnings = log.lines().filter(|line| line.starts_with(own) && line.contains("WARN"));
        let mut warnings: Vec<&str> = warnings.collect();
        // One for each of the two signals.
        warnings.retain(|line| !line.contains("metrics cannot be exported"));
        ensure!(warnings.len() == 1, "{own}: {warnings:#?}");
        ensure!(warnings[0].contains("traces cannot be exported"), "{warnings:#?}");
    }
    Ok(())
}

#[tokio::test]
async fn log_lines_of_a_request_name_its_trace_on_coordinator_and_stages() -> anyhow::Result<()> {
    let (collector, url) = Collector::grpc().await?;
    let options = [
        "--otlp-endpoint",
        &url,
        "--log-format",
        "json",
        "--step-timeout",
        "1",
        "--recovery-timeout",
        "0",
    ];
    let server = server(&options).await?;
    let body = server.client.body(&[7; 40], &json!({"max_tokens": 450}));
    let request = Client::builder().no_proxy().build()?;
    let request = request.post(format!("{}/v1/completions", server.url)).json(&body);
    let request = request.header("traceparent", TRACEPARENT).header("x-request-id", "mine");
    let answer = tokio::spawn(request.send());
    collector.wait(|spans| named(spans, "stage").len() >= 3).await?;
    // Stage 2 waits for a hand-off in vain, and says so.
    server.stage(1)?.signal(rustix::process::Signal::STOP);
    let answer = answer.await??;
    assert_eq!(
        (answer.status().as_u16(), &answer.headers()["x-request-id"]),
        (503, &"mine".parse()?)
    );
    let start = Instant::now();
    let lines = loop {
        let log = server.program.stderr();
        let lines = log.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>();
        let lines = lines.with_context(|| log.clone())?;
        let said = |text: &str| lines.iter().find(|line| line["message"].as_str() == Some(text));
        let stage = |line: &&Value| line["stage"].is_number() && line["level"] == "ERROR";
        if let (Some(gateway), Some(stage)) = (said("request failed"), lines.iter().find(stage)) {
            assert_eq!(stage["stage"], 2, "{stage}");
            assert_eq!(gateway["span"]["request_id"], "mine", "{gateway}");
            assert_eq!(gateway["span"]["trace_id"], TRACEPARENT[3..35], "{gateway}");
            assert_eq!(stage["trace_ids"], TRACEPARENT[3..35], "{stage}");
            break lines;
        }
        ensure!(start.elapsed() < Duration::from_secs(20), "{log}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let find = |text: &str| {
        let line = lines.iter().find(|l| l["message"].as_str().is_some_and(|m| m.contains(text)));
        line.with_context(|| format!("no line says {text:?}"))
    };
    assert_eq!(find("the pipeline failed")?["trace_ids"], TRACEPARENT[3..35]);
    // What the start says: the plan, and every cut's link.
    find("plan: stage 1: layers 4-5")?;
    assert_eq!(find("stage 0 -> stage 1 over tcp")?["link"], "tcp");
    find("stage 1 -> stage 2 over tcp")?;
    Ok(())
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .filter_map(|i| u8::from_str_radix(&text[i..i + 2], 16).ok())
        .collect()
}
