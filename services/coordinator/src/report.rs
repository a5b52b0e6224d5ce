//! The pipeline's state as JSON, for `/pipeline`.

use baton_plan::{Contract, StageContract};
use baton_proto::v1;
use serde_json::{Value, json};

use crate::driver::Failure;
use crate::scheduler::Scheduler;
use crate::startup::Start;
use crate::wiring::Wired;

/// A pipeline that runs.
pub(crate) struct Running<'a> {
    pub(crate) contract: &'a Contract,
    pub(crate) wired: &'a Wired,
    pub(crate) scheduler: &'a Scheduler,
    /// What every stage last said of itself.
    pub(crate) statuses: &'a [v1::StatusReply],
    pub(crate) compute_micros: &'a [u64],
    /// Stages that wait to take another one's place.
    pub(crate) standbys: usize,
}

/// Stages that join, load and are wired.
pub(crate) fn starting(contract: &Contract, starts: &[Start]) -> Value {
    json!({"epoch": 0, "failure": null, "stages": started(contract, starts)})
}

/// How far every stage is.
fn started(contract: &Contract, starts: &[Start]) -> Vec<Value> {
    let stages = contract.stages.iter().zip(starts).map(|(stage, start)| {
        let mut stage = planned(contract, stage, start);
        stage["state"] = start.phase.name().into();
        stage
    });
    stages.collect()
}

/// The same after the pipeline of this epoch failed.
pub(crate) fn recovering(
    contract: &Contract,
    starts: &[Start],
    failure: &Failure,
    scheduler: &Scheduler,
    epoch: u64,
) -> Value {
    let mut stages = started(contract, starts);
    if let Some(stage) = stages.get_mut(failure.stage) {
        stage["failure"] = json!(failure.reason);
    }
    let mut state = requests(scheduler);
    state["epoch"] = json!(epoch);
    state["failure"] = json!(failure.to_string());
    state["stages"] = json!(stages);
    state
}

pub(crate) fn running(pipeline: &Running<'_>) -> Value {
    let stages = pipeline.contract.stages.iter().map(|contract| stage(pipeline, contract));
    let mut state = requests(pipeline.scheduler);
    state["epoch"] = json!(pipeline.wired.epoch);
    state["failure"] = json!(null);
    state["standbys"] = json!(pipeline.standbys);
    state["stages"] = json!(stages.collect::<Vec<_>>());
    state
}

/// What the scheduler says, whether its pipeline runs or comes back.
fn requests(scheduler: &Scheduler) -> Value {
    let (running, waiting) = scheduler.live();
    let cache = scheduler.cache_counts();
    json!({
        "kv_blocks": {"total": scheduler.total_blocks(), "free": scheduler.free_blocks()},
        "prefix_cache": {
            "enabled": scheduler.caches_prefixes(),
            "queried_tokens": cache.queried_tokens,
            "hit_tokens": cache.hit_tokens,
            "cached_blocks": cache.blocks,
        },
        "preemptions": scheduler.preemptions(),
        "running": running,
        "waiting": waiting,
        "steps_in_flight": scheduler.steps_in_flight(),
    })
}

fn stage(pipeline: &Running<'_>, contract: &StageContract) -> Value {
    let at = contract.stage;
    let (wired, status) = (pipeline.wired, &pipeline.statuses[at]);
    let mut stage = planned(pipeline.contract, contract, &wired.starts[at]);
    stage["state"] = "wired".into();
    stage["link"] = json!(wired.links[at]);
    stage["kv_blocks"] = json!(status.kv_blocks);
    stage["kv_blocks_held"] = json!(status.kv_blocks_held);
    stage["steps_done"] = json!(status.steps_done);
    stage["compute_micros"] = json!(pipeline.compute_micros[at]);
    stage["handoff_bytes_sent"] = json!(status.handoff_bytes_sent);
    stage["handoff_rows_sent"] = json!(status.handoff_rows_sent);
    stage["carry_rows_sent"] = json!(status.carry_rows_sent);
    stage["nan_scores"] = json!(status.nan_scores);
    stage
}

/// What is known of a stage from the plan and from its start.
fn planned(contract: &Contract, stage: &StageContract, start: &Start) -> Value {
    let full = contract.full_layers.iter().filter(|layer| stage.layers.contains(layer));
    json!({
        "index": stage.stage,
        "layers": [stage.layers.start, stage.layers.end],
        "full_layers": full.collect::<Vec<_>>(),
        "state": null,
        "failure": null,
        "backend": start.backend,
        "device": start.device,
        "address": start.address,
        "metrics": Some(start.metrics.as_str()).filter(|address| !address.is_empty()),
        "receives_from_layer": stage.receives_from_layer,
        "sends_from_layer": stage.sends_from_layer,
        "handoff_bytes_per_row": stage.handoff_bytes_per_row(),
        "bytes_read": start.bytes_read,
        "bytes_total": start.bytes_total,
    })
}
