//! A real Prometheus scrapes a real pipeline: rules, alerts and the dashboard find what they ask for.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use baton_tests::Pipeline;
use baton_tests::prometheus::{Prometheus, deploy};
use rustix::process::Signal;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

#[test]
fn promtool_accepts_the_configuration_and_the_rules_pass_their_tests() -> anyhow::Result<()> {
    for (what, file) in [
        (["check", "config"], "prometheus/prometheus.yaml"),
        (["check", "rules"], "prometheus/rules.yaml"),
        (["test", "rules"], "prometheus/rules_test.yaml"),
    ] {
        let output = Command::new("promtool").args(what).arg(deploy(file)).output();
        let output = output.context("start promtool, of Debian's package prometheus")?;
        let said = [output.stdout, output.stderr].concat();
        ensure!(output.status.success(), "{what:?}: {}", String::from_utf8_lossy(&said));
    }
    Ok(())
}

/// Every expression of the dashboard, with its variables filled in.
fn dashboard() -> anyhow::Result<Vec<String>> {
    let dashboard: Value =
        serde_json::from_str(&std::fs::read_to_string(deploy("grafana/baton.json"))?)?;
    let panels = dashboard["panels"].as_array().context("panels")?;
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array()).flatten();
    let annotations = dashboard["annotations"]["list"].as_array().context("annotations")?;
    let expressions = targets.chain(annotations).map(|target| {
        let expression = target["expr"].as_str().context("an expression")?;
        Ok(expression.replace("$__rate_interval", "10s").replace("$job", ".*"))
    });
    expressions.collect()
}

/// The names of baton's metrics in an expression.
fn metrics(expression: &str) -> impl Iterator<Item = &str> {
    expression
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':')
        .filter(|word| word.starts_with("baton_") || word.starts_with("baton:"))
}

#[tokio::test]
async fn everything_that_is_asked_for_exists_and_a_dead_stage_fires_the_alert() -> anyhow::Result<()>
{
    let pipeline = Pipeline::start("share-4-3", "4,2,4", &[], &[]).await?;
    let server = &pipeline.server;
    let target = server.url.strip_prefix("http://").context("an address")?;
    let prometheus = Prometheus::scraping(target).await?;
    // The coordinator and, as it names them, three stages.
    prometheus.until("count(up == 1) == 4", SOON).await?;

    let rules = prometheus.rules().await?;
    ensure!(rules.len() > 10, "{} rules", rules.len());
    let mut asked = dashboard()?;
    ensure!(asked.len() > 50, "{} expressions", asked.len());
    asked.extend(rules.iter().filter_map(|rule| Some(rule["query"].as_str()?.to_owned())));
    let wanted: BTreeSet<&str> = asked.iter().flat_map(|expression| metrics(expression)).collect();

    // Some work for every counter, a few scrapes long.
    let prompt: Vec<u32> = (1..=40).collect();
    for _ in 0..8 {
        server.client.complete(&prompt, &json!({"max_tokens": 30})).await?;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    prometheus.until("baton:stage_bubble:share5m > 0", SOON).await?;
    let known: BTreeSet<String> = prometheus.names().await?.into_iter().collect();
    let missing: Vec<_> = wanted.iter().filter(|name| !known.contains(**name)).collect();
    ensure!(missing.is_empty(), "not in the scrape: {missing:?}");
    for expression in &dashboard()? {
        let series = prometheus.query(expression).await?;
        // The one mark on the time axis is set when the pipeline is wired anew.
        ensure!(!series.is_empty() || expression.ends_with("[1m]) > 0"), "empty: {expression}");
    }
    for rule in prometheus.rules().await? {
        assert_eq!((&rule["health"], &rule["lastError"]), (&json!("ok"), &Value::Null), "{rule}");
        ensure!(rule["state"].is_null() || rule["state"] == "inactive", "{rule}");
    }

    // Nobody starts it again.
    pipeline.stages[1].signal(Signal::KILL)?;
    let alert = |name: &str| format!("ALERTS{{alertname=\"{name}\", alertstate=\"firing\"}}");
    let down = prometheus.until(&alert("BatonStageDown"), 2 * SOON).await?;
    assert_eq!(down.len(), 1, "{down:?}");
    assert_eq!(down[0]["metric"]["stage"], "1");
    prometheus.until(&alert("BatonReadinessLost"), SOON).await?;
    Ok(())
}
