//! Every metric: its name, unit, labels and meaning. `deploy/metrics.md` shows this list, and a test keeps the two equal.
//!
//! Names are OpenTelemetry's; [`Metric::prometheus`] derives Prometheus' from name, unit and kind, as the exporter does. No
//! label grows with the number of requests.

/// How values behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts values by size.
    Histogram,
}

/// The process that shows a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// Coordinator and stages.
    Everywhere,
    /// The process that answers the HTTP API.
    Coordinator,
    /// Every stage.
    Stage,
}

/// One metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// OpenTelemetry's name.
    pub name: &'static str,
    /// Behaviour.
    pub kind: Kind,
    /// Unit as in UCUM; those in braces are for people.
    pub unit: &'static str,
    /// Labels beside those that the scraper adds.
    pub labels: &'static [&'static str],
    /// What the value says.
    pub meaning: &'static str,
    /// Upper bounds of a histogram's buckets.
    pub buckets: &'static [f64],
    /// Who shows it.
    pub shown: Shown,
}

impl Metric {
    /// The name that Prometheus sees.
    #[must_use]
    pub fn prometheus(&self) -> String {
        let mut name = self.name.replace('.', "_");
        match (self.unit, self.kind) {
            ("s", _) => name.push_str("_seconds"),
            ("By", _) => name.push_str("_bytes"),
            ("1", Kind::Gauge) => name.push_str("_ratio"),
            _ => {}
        }
        if self.kind == Kind::Counter {
            name.push_str("_total");
        }
        name
    }
}

/// Seconds from a millisecond to half an hour: waits of requests.
const LATENCY: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 1800.0,
];
/// Seconds from half a millisecond to a minute: waits within an answer.
const STEP: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
];
/// Tokens.
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5,
    5e5, 1e6,
];

macro_rules! metrics {
    ($($constant:ident: $shown:ident $kind:ident $name:literal [$unit:literal] ($($label:literal),*)
       $(in $buckets:ident)? = $meaning:literal;)*) => {
        $(
            #[doc = $meaning]
            pub const $constant: Metric = Metric {
                name: $name,
                kind: Kind::$kind,
                unit: $unit,
                labels: &[$($label),*],
                meaning: $meaning,
                buckets: metrics!(@buckets $($buckets)?),
                shown: Shown::$shown,
            };
        )*
        /// All of them.
        pub const ALL: &[Metric] = &[$($constant),*];
    };
    (@buckets) => { &[] };
    (@buckets $buckets:ident) => { $buckets };
}

metrics! {
    BUILD_INFO: Everywhere Gauge "baton.build.info" [""] ("version") =
        "1; the label names the version";
    PROCESS_START: Everywhere Gauge "baton.process.start_time" ["s"] () =
        "When the process started, since 1970; a change is a restart";

    REQUESTS: Coordinator Counter "baton.requests" ["{request}"] ("outcome") =
        "Choices that have ended: stop, length, cancelled (the client went away), expired (its deadline passed), failed, or rejected (not taken: queue full or pipeline not ready). A request with n choices counts n times";
    REQUESTS_RUNNING: Coordinator Gauge "baton.requests.running" ["{request}"] () =
        "Sequences that have a place in steps";
    REQUESTS_WAITING: Coordinator Gauge "baton.requests.waiting" ["{request}"] () =
        "Sequences that wait for such a place, those preempted among them";
    QUEUE_TIME: Coordinator Histogram "baton.request.queue_time" ["s"] () in LATENCY =
        "From submission until a sequence runs for the first time";
    TIME_TO_FIRST_TOKEN: Coordinator Histogram "baton.time_to_first_token" ["s"] () in LATENCY =
        "From submission until the first token";
    INTER_TOKEN_LATENCY: Coordinator Histogram "baton.inter_token_latency" ["s"] () in STEP =
        "From one token of a choice to its next";
    REQUEST_DURATION: Coordinator Histogram "baton.request.duration" ["s"] () in LATENCY =
        "From submission until the end of choices that ended with stop or length";
    REQUEST_PROMPT_TOKENS: Coordinator Histogram "baton.request.prompt_tokens" ["{token}"] () in TOKENS =
        "Prompt tokens of choices that ran";
    REQUEST_GENERATION_TOKENS: Coordinator Histogram "baton.request.generation_tokens" ["{token}"] () in TOKENS =
        "Tokens generated for choices that ended with stop or length";
    PROMPT_TOKENS: Coordinator Counter "baton.prompt_tokens" ["{token}"] () =
        "Prompt tokens of choices that ran, cached ones included";
    GENERATION_TOKENS: Coordinator Counter "baton.generation_tokens" ["{token}"] () =
        "Tokens generated";

    KV_BLOCKS: Coordinator Gauge "baton.kv.blocks" ["{block}"] ("state") =
        "KV blocks of the pipeline: used by sequences, or free (those kept for the prefix cache included)";
    KV_USAGE: Coordinator Gauge "baton.kv.usage" ["1"] () =
        "Used KV blocks over all KV blocks";
    PREEMPTIONS: Coordinator Counter "baton.preemptions" ["{preemption}"] () =
        "Sequences sent back to the queue for want of KV blocks; their tokens are computed again";
    PREFIX_QUERIES: Coordinator Counter "baton.prefix_cache.queries" ["{token}"] () =
        "Prompt tokens looked up in the prefix cache";
    PREFIX_HITS: Coordinator Counter "baton.prefix_cache.hits" ["{token}"] () =
        "Those of them whose KV was there";
    PREFIX_BLOCKS: Coordinator Gauge "baton.prefix_cache.blocks" ["{block}"] () =
        "KV blocks that the prefix cache knows";

    READY: Coordinator Gauge "baton.pipeline.ready" [""] () =
        "1 while requests are taken, as /ready says";
    EPOCH: Coordinator Gauge "baton.pipeline.epoch" [""] () =
        "Wiring in use, from 1; 0 before the first. A change is a rewiring";
    STEPS_IN_FLIGHT: Coordinator Gauge "baton.pipeline.steps_in_flight" ["{step}"] () =
        "Steps sent to the stages and not answered by the last";
    STEP_DURATION: Coordinator Histogram "baton.pipeline.step.duration" ["s"] () in STEP =
        "From sending a step until the last stage's answer";
    BUSY: Coordinator Counter "baton.pipeline.busy" ["s"] () =
        "Time with at least one step in flight, up to the last answer or sending";
    BUBBLE: Coordinator Counter "baton.pipeline.bubble" ["s"] ("stage") =
        "Busy time of the pipeline up to the stage's last answer, less the stage's compute and send time. Over baton_pipeline_busy_seconds_total it is the stage's bubble share";
    STAGE_UP: Coordinator Gauge "baton.pipeline.stage.up" [""] ("stage") =
        "1 from wiring until the coordinator gives the stage up";
    STAGE_ANSWERS: Coordinator Counter "baton.pipeline.stage.answers" ["{step}"] ("stage") =
        "Steps that the stage has answered";
    STAGE_PENDING: Coordinator Gauge "baton.pipeline.stage.pending" ["s"] ("stage") =
        "How long the stage has had a step that it could run next; 0 without one. Of a stalled pipeline only the stage that stands still has a value that grows";
    FAILURES: Coordinator Counter "baton.pipeline.failures" ["{failure}"] ("stage") =
        "Times the pipeline failed, by the stage it began with";

    STAGE_INFO: Stage Gauge "baton.stage.info" [""] ("stage", "layers", "backend") =
        "1; the labels say what the stage hosts";
    STAGE_STATE: Stage Gauge "baton.stage.state" [""] ("stage", "state") =
        "1 for the state that the stage is in (joined, loading, loaded, wired, draining, failed), 0 for the others";
    STAGE_READY: Stage Gauge "baton.stage.ready" [""] ("stage") =
        "1 while the stage is wired and its steps make progress, as its gRPC health says";
    STAGE_EPOCH: Stage Gauge "baton.stage.epoch" [""] ("stage") =
        "Wiring that the stage is part of; 0 before the first";
    STAGE_JOINS: Stage Counter "baton.stage.joins" ["{join}"] ("stage") =
        "Times the stage joined a coordinator in the life of its process";
    STAGE_FAILURES: Stage Counter "baton.stage.failures" ["{step}"] ("stage", "kind") =
        "Steps that the stage could not run";
    STAGE_STEPS: Stage Counter "baton.stage.steps" ["{step}"] ("stage") =
        "Steps done";
    STAGE_ROWS: Stage Counter "baton.stage.rows" ["{row}"] ("stage") =
        "Rows (tokens) computed";
    STAGE_TIME: Stage Counter "baton.stage.time" ["s"] ("stage", "part") =
        "Time of the steps done, by part: queue_wait (from the step's arrival until the compute thread took it), receive_wait (from then until the hand-off was there), compute, send (giving the hand-off to the link)";
    HANDOFF: Stage Counter "baton.stage.handoff" ["By"] ("stage", "cut", "direction") =
        "Payload of hand-offs, sent by the stage before the cut and received by the one after";
    HANDOFF_ROWS: Stage Counter "baton.stage.handoff.rows" ["{row}"] ("stage", "cut") =
        "Rows sent over the cut";
    CARRY_ROWS: Stage Counter "baton.stage.carry.rows" ["{row}"] ("stage", "cut", "direction") =
        "Rows whose index rows crossed the cut: those with a context longer than index_topk, where the next slice starts on a shared layer";
    LINK_INFO: Stage Gauge "baton.stage.link" [""] ("stage", "cut", "link") =
        "1; the label names the link in use towards the next stage";
    LOAD_READ: Stage Counter "baton.stage.load" ["By"] ("stage") =
        "Bytes read of the checkpoint, grows while the stage loads";
    LOAD_NEEDED: Stage Gauge "baton.stage.load.needed" ["By"] ("stage") =
        "Bytes of the tensors of the stage's slice; 0 before it was loaded";
    LOAD_DURATION: Stage Gauge "baton.stage.load.duration" ["s"] ("stage") =
        "How long the last load took; 0 before it";
    STAGE_KV_BLOCKS: Stage Gauge "baton.stage.kv.blocks" ["{block}"] ("stage") =
        "KV blocks that the stage can hold; the pipeline uses the least of all stages";
    NAN_SCORES: Stage Counter "baton.stage.nan_scores" ["{score}"] ("stage") =
        "Index scores that were not a number and were sorted last";
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use super::*;

    /// The catalog as the document's tables show it.
    fn table(shown: Shown) -> String {
        let mut lines = vec![
            "| Prometheus | OpenTelemetry | kind | labels | meaning |".to_owned(),
            "|---|---|---|---|---|".to_owned(),
        ];
        for metric in ALL.iter().filter(|metric| metric.shown == shown) {
            let labels: Vec<String> = metric.labels.iter().map(|l| format!("`{l}`")).collect();
            lines.push(format!(
                "| `{}` | `{}` | {} | {} | {} |",
                metric.prometheus(),
                metric.name,
                format!("{:?}", metric.kind).to_lowercase(),
                labels.join(", "),
                metric.meaning
            ));
        }
        lines.join("\n")
    }

    #[test]
    fn the_document_lists_exactly_these_metrics() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/metrics.md");
        let document = std::fs::read_to_string(path).unwrap();
        for shown in [Shown::Everywhere, Shown::Coordinator, Shown::Stage] {
            let table = table(shown);
            assert!(
                document.contains(&table),
                "deploy/metrics.md must have this table:\n{table}\n"
            );
        }
        let named = document.lines().filter(|line| line.starts_with("| `baton_")).count();
        assert_eq!(named, ALL.len(), "no metric beside those of the catalog");
    }
}
