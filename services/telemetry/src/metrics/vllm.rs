//! The same values under the names that dashboards and autoscalers made for vLLM read.

use prometheus::proto::{LabelPair, Metric, MetricFamily};

use super::catalog::{self, Metric as Definition};

/// baton's metric and vLLM's name.
const NAMES: &[(&Definition, &str)] = &[
    (&catalog::REQUESTS_RUNNING, "vllm:num_requests_running"),
    (&catalog::REQUESTS_WAITING, "vllm:num_requests_waiting"),
    (&catalog::KV_USAGE, "vllm:kv_cache_usage_perc"),
    (&catalog::PREEMPTIONS, "vllm:num_preemptions_total"),
    (&catalog::PREFIX_QUERIES, "vllm:prefix_cache_queries_total"),
    (&catalog::PREFIX_HITS, "vllm:prefix_cache_hits_total"),
    (&catalog::PROMPT_TOKENS, "vllm:prompt_tokens_total"),
    (&catalog::GENERATION_TOKENS, "vllm:generation_tokens_total"),
    (&catalog::REQUESTS, "vllm:request_success_total"),
    (&catalog::TIME_TO_FIRST_TOKEN, "vllm:time_to_first_token_seconds"),
    (&catalog::INTER_TOKEN_LATENCY, "vllm:inter_token_latency_seconds"),
    (&catalog::REQUEST_DURATION, "vllm:e2e_request_latency_seconds"),
    (&catalog::QUEUE_TIME, "vllm:request_queue_time_seconds"),
    (&catalog::REQUEST_PROMPT_TOKENS, "vllm:request_prompt_tokens"),
    (&catalog::REQUEST_GENERATION_TOKENS, "vllm:request_generation_tokens"),
];

/// Copies of the families that vLLM has too, under its names and with its labels.
pub(super) fn aliases(families: &[MetricFamily], model: &str) -> Vec<MetricFamily> {
    let alias = |(definition, name): &(&Definition, &str)| {
        let family = families.iter().find(|family| family.name() == definition.prometheus())?;
        let metrics: Vec<Metric> =
            family.get_metric().iter().filter_map(|metric| relabel(metric, model)).collect();
        let mut copy = family.clone();
        copy.set_name((*name).to_owned());
        copy.set_metric(metrics);
        Some(copy)
    };
    NAMES.iter().filter_map(alias).collect()
}

/// The series with vLLM's labels; none for outcomes that vLLM does not count as finished.
fn relabel(metric: &Metric, model: &str) -> Option<Metric> {
    let mut labels = vec![label("engine", "0"), label("model_name", model)];
    for own in metric.get_label() {
        match (own.name(), own.value()) {
            ("outcome", reason @ ("stop" | "length")) => {
                labels.push(label("finished_reason", reason));
            }
            ("outcome", "cancelled") => labels.push(label("finished_reason", "abort")),
            ("outcome", _) => return None,
            _ => labels.push(own.clone()),
        }
    }
    labels.sort_by(|a, b| a.name().cmp(b.name()));
    let mut copy = metric.clone();
    copy.set_label(labels);
    Some(copy)
}

fn label(name: &str, value: &str) -> LabelPair {
    let mut label = LabelPair::default();
    label.set_name(name.to_owned());
    label.set_value(value.to_owned());
    label
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use super::*;

    #[test]
    fn the_document_lists_exactly_these_names() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/metrics.md");
        let document = std::fs::read_to_string(path).unwrap();
        let row =
            |(own, name): &(&Definition, &str)| format!("| `{name}` | `{}` |", own.prometheus());
        let rows: Vec<String> = NAMES.iter().map(row).collect();
        let table = rows.join("\n");
        assert!(document.contains(&table), "deploy/metrics.md must have these rows:\n{table}\n");
        assert_eq!(document.lines().filter(|l| l.starts_with("| `vllm:")).count(), NAMES.len());
    }
}
