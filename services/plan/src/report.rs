//! `baton plan`: a partition as JSON and as a table.

use std::ops::Range;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;

use crate::config::ModelConfig;
use crate::contract::{Contract, ContractError, ContractOptions, HiddenDtype, IndexDtype};
use crate::kv::KvLayout;
use crate::partition::Partition;
use crate::tensors::{Storage, slice_tensors, total_bytes};

/// The plan of a pipeline. Serialises to the JSON of `baton plan --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlanReport {
    /// Full and shared layers.
    pub index_schedule: ScheduleReport,
    /// In pipeline order.
    pub stages: Vec<StageReport>,
    /// Layers that an engine that forwards only hidden states would compute from stale indices.
    pub affected_layers: Vec<usize>,
    /// Positions a row attends to.
    pub index_topk: usize,
    /// What was traded against balance.
    pub notes: Vec<String>,
}

/// Full and shared layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ScheduleReport {
    /// Layers that run their indexer.
    pub full: Vec<usize>,
    /// Layers that reuse.
    pub shared: Vec<usize>,
}

/// One stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StageReport {
    /// Index.
    pub index: usize,
    /// First layer and one past the last.
    pub layers: [usize; 2],
    /// Its layers that run an indexer.
    pub full_layers: Vec<usize>,
    /// Whether index rows arrive with every step.
    pub receives_carry: bool,
    /// Whether index rows leave with every step.
    pub sends_carry: bool,
    /// The layer whose rows arrive.
    pub carry_source_layer: Option<usize>,
    /// Its layers that depend on them.
    pub orphaned_layers: Vec<usize>,
    /// Weights, in the checkpoint's types.
    pub weight_bytes: u64,
    /// KV of one token, in the type of the residual stream.
    pub kv_bytes_per_token: u64,
    /// What a row with a long context costs on the link to the next stage.
    pub handoff_bytes_per_row: usize,
}

impl PlanReport {
    /// The plan of `partition`, with a residual stream of `hidden_dtype`.
    ///
    /// # Errors
    /// When no contract can be made.
    pub fn new(
        config: &ModelConfig,
        partition: &Partition,
        hidden_dtype: HiddenDtype,
    ) -> Result<Self, ContractError> {
        let options = ContractOptions {
            hidden_dtype,
            index_dtype: IndexDtype::I32,
            row_capacity: 1,
            block_size: 1,
        };
        let contract = Contract::new(config, partition, &options)?;
        let kv = KvLayout::Plain(hidden_dtype);
        let stages: Vec<StageReport> = contract
            .stages
            .iter()
            .map(|stage| StageReport {
                index: stage.stage,
                layers: [stage.layers.start, stage.layers.end],
                full_layers: stage
                    .layers
                    .clone()
                    .filter(|&layer| config.schedule.is_full(layer))
                    .collect(),
                receives_carry: stage.receives_from_layer.is_some(),
                sends_carry: stage.sends_from_layer.is_some(),
                carry_source_layer: stage.receives_from_layer,
                orphaned_layers: orphaned(config, stage.layers.clone()),
                weight_bytes: total_bytes(
                    &slice_tensors(config, stage.layers.clone()),
                    Storage::of(config),
                ),
                kv_bytes_per_token: stage
                    .layers
                    .clone()
                    .map(|layer| kv.layer_bytes(config, layer))
                    .sum(),
                handoff_bytes_per_row: stage.handoff_bytes_per_row(),
            })
            .collect();
        Ok(Self {
            index_schedule: ScheduleReport {
                full: config.schedule.full(),
                shared: config.schedule.shared(),
            },
            affected_layers: stages.iter().flat_map(|s| s.orphaned_layers.clone()).collect(),
            stages,
            index_topk: config.index_topk,
            notes: partition.notes().to_vec(),
        })
    }

    /// The plan for a person.
    #[must_use]
    pub fn to_table(&self) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header([
            "stage",
            "layers",
            "full",
            "carry in",
            "carry out",
            "stock engine wrong",
            "weights",
            "KV B/token",
            "link B/row",
        ]);
        for stage in &self.stages {
            table.add_row([
                stage.index.to_string(),
                format!("{}-{}", stage.layers[0], stage.layers[1] - 1),
                ranges(&stage.full_layers),
                stage.carry_source_layer.map_or_else(|| "-".into(), |l| format!("from {l}")),
                if stage.sends_carry { "yes".into() } else { "-".into() },
                ranges(&stage.orphaned_layers),
                bytes(stage.weight_bytes),
                stage.kv_bytes_per_token.to_string(),
                stage.handoff_bytes_per_row.to_string(),
            ]);
        }
        for column in [6, 7, 8] {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let weights: u64 = self.stages.iter().map(|s| s.weight_bytes).sum();
        let mut text = format!(
            "{table}\nfull layers: {}; top-k {}; weights {weights} bytes\nlayers that an engine without carries computes \
             from stale indices: {}",
            ranges(&self.index_schedule.full),
            self.index_topk,
            ranges(&self.affected_layers),
        );
        for note in &self.notes {
            text.push_str("\nnote: ");
            text.push_str(note);
        }
        text
    }
}

/// Layers of a slice before its first full one: they depend on rows from outside.
fn orphaned(config: &ModelConfig, layers: Range<usize>) -> Vec<usize> {
    layers.take_while(|&layer| !config.schedule.is_full(layer)).collect()
}

/// `0-2, 6, 10` for a sorted list.
fn ranges(layers: &[usize]) -> String {
    if layers.is_empty() {
        return "-".into();
    }
    layers
        .chunk_by(|a, b| a + 1 == *b)
        .map(|run| match run {
            [first, .., last] => format!("{first}-{last}"),
            _ => run[0].to_string(),
        })
        .collect::<Vec<_>>()
        .join(", ")
}

fn bytes(count: u64) -> String {
    const UNITS: [(&str, f64); 3] = [("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    let value = count as f64;
    UNITS
        .iter()
        .find(|(_, size)| value >= *size)
        .map_or_else(|| format!("{count} B"), |(unit, size)| format!("{:.1} {unit}", value / size))
}
