//! The published GLM-5.3 config against published figures.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use baton_plan::{
    BalanceOptions, Contract, ContractOptions, HiddenDtype, IndexDtype, ModelConfig, Partition,
    PlanReport, published,
};

fn config() -> ModelConfig {
    ModelConfig::from_json(published::GLM_5_3).unwrap()
}

#[test]
fn full_layers_are_the_published_ones() {
    let mut expected = vec![0, 1, 2];
    expected.extend((6..78).step_by(4));
    assert_eq!(config().schedule.full(), expected);
}

#[test]
fn the_default_split_of_stock_engines_breaks_thirteen_layers() {
    let config = config();
    let partition = Partition::parse("9,10,10,10,10,10,10,9", 78).unwrap();
    let report = PlanReport::new(&config, &partition, HiddenDtype::Bf16).unwrap();
    assert_eq!(report.affected_layers, [9, 19, 20, 21, 29, 39, 40, 41, 49, 59, 60, 61, 69]);
    let halves = Partition::parse("39,39", 78).unwrap();
    let report = PlanReport::new(&config, &halves, HiddenDtype::Bf16).unwrap();
    assert_eq!(report.affected_layers, [39, 40, 41]);
}

#[test]
fn eight_balanced_stages_hold_every_byte_but_the_mtp_layer() {
    let config = config();
    let partition = Partition::balanced(&config, &BalanceOptions::new(&config, 8)).unwrap();
    let report = PlanReport::new(&config, &partition, HiddenDtype::Bf16).unwrap();
    let weights: u64 = report.stages.iter().map(|s| s.weight_bytes).sum();
    assert_eq!(weights, 745_584_507_456);
    let kv: u64 = report.stages.iter().map(|s| s.kv_bytes_per_token).sum();
    assert_eq!(kv, 95_232);
}

#[test]
fn a_carry_costs_8192_bytes_a_row() {
    let config = config();
    let partition = Partition::parse("9,9,60", 78).unwrap();
    let report = PlanReport::new(&config, &partition, HiddenDtype::Bf16).unwrap();
    // Layer 9 is shared, layer 18 is full.
    let sent: Vec<usize> = report.stages.iter().map(|s| s.handoff_bytes_per_row).collect();
    assert_eq!(sent, [20_480, 12_288, 0]);
    assert_eq!(report.stages[1].carry_source_layer, Some(6));
}

#[test]
fn the_json_has_the_documented_shape() {
    let config = config();
    let partition = Partition::parse("39,39", 78).unwrap();
    let report = PlanReport::new(&config, &partition, HiddenDtype::Bf16).unwrap();
    let json = serde_json::to_value(&report).unwrap();
    let stage = &json["stages"][1];
    assert_eq!(stage["layers"], serde_json::json!([39, 78]));
    assert_eq!(stage["receives_carry"], true);
    assert_eq!(stage["carry_source_layer"], 38);
    assert_eq!(stage["orphaned_layers"], serde_json::json!([39, 40, 41]));
    assert_eq!(json["index_schedule"]["full"].as_array().unwrap().len(), 21);
    let table = report.to_table();
    assert!(table.contains("39-41") && table.contains("from 38"), "{table}");
}

#[test]
fn case_17_index_rows_of_a_long_context_do_not_go_as_u16() {
    let config = config();
    let partition = Partition::parse("39,39", 78).unwrap();
    let with = |index_dtype| {
        let options = ContractOptions {
            hidden_dtype: HiddenDtype::Bf16,
            index_dtype,
            row_capacity: 512,
            block_size: 64,
        };
        Contract::new(&config, &partition, &options)
    };
    assert!(with(IndexDtype::I32).is_ok());
    let refusal = with(IndexDtype::U16).unwrap_err().to_string();
    let context = config.max_positions.to_string();
    assert!(refusal.contains("65535") && refusal.contains(&context), "{refusal}");
}
