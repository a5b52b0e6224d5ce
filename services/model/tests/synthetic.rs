//! Checkpoints of random weights load like any other and are the same on every machine.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::path::Path;

use baton_kernels::sampling::SampleRequest;
use baton_kernels::{Batch, CpuBackend, CpuOptions, Segment};
use baton_model::synthetic::{SyntheticError, write_checkpoint};
use baton_model::{Checkpoint, Slice, StepInput, StepOutput, StepRequest};
use baton_plan::{Contract, ContractOptions, HiddenDtype, IndexDtype, ModelConfig, Partition};

fn config_of(model: &str) -> String {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models");
    std::fs::read_to_string(models.join(model).join("config.json")).unwrap()
}

/// The most likely token after `rows` tokens, and its log-probability.
fn answer(dir: &Path, rows: usize) -> (u32, f32) {
    let config = ModelConfig::load(dir).unwrap();
    let options = ContractOptions {
        hidden_dtype: HiddenDtype::F32,
        index_dtype: IndexDtype::I32,
        row_capacity: rows,
        block_size: 16,
    };
    let whole = Partition::from_counts(&[config.num_layers], config.num_layers).unwrap();
    let stage = Contract::new(&config, &whole, &options).unwrap().stages.pop().unwrap();
    let backend = CpuBackend::new(CpuOptions { threads: Some(1) }).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let mut slice = Slice::load(backend, &config, &checkpoint, stage, 8, &mut |_| {}).unwrap();
    let request = StepRequest {
        epoch: 1,
        step_id: 1,
        batch: Batch {
            segments: vec![Segment { first_row: 0, rows, start: 0, blocks: (0..8).collect() }],
            padding: 0,
            block_size: 16,
        },
        samples: vec![SampleRequest {
            row: rows - 1,
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            draw: 0,
            logprobs: None,
            banned: Vec::new(),
            adjustments: Default::default(),
        }],
        scores: Vec::new(),
    };
    let tokens: Vec<u32> = (0..rows).map(|i| (i * 7 % config.vocab_size) as u32).collect();
    match slice.forward(&request, StepInput::Tokens(&tokens)).unwrap() {
        StepOutput::Tokens { sampled, .. } => (sampled[0].token, sampled[0].logprob),
        StepOutput::HandOff(_) => panic!("a whole model answers with tokens"),
    }
}

#[test]
fn a_seed_fixes_every_byte_and_the_model_runs_past_its_topk() {
    for model in ["share-4-3", "bf16", "deepseek-v32"] {
        let config = config_of(model);
        let topk = ModelConfig::from_json(&config).unwrap().index_topk;
        let dirs = [0, 0, 1].map(|seed| {
            let dir = tempfile::tempdir().unwrap();
            write_checkpoint(&config, seed, dir.path()).unwrap();
            dir
        });
        let bytes =
            dirs.each_ref().map(|dir| std::fs::read(dir.path().join("model.safetensors")).unwrap());
        assert!(bytes[0] == bytes[1], "{model}: the same seed");
        assert!(bytes[0] != bytes[2], "{model}: another seed");
        let [first, second, other] = dirs.each_ref().map(|dir| answer(dir.path(), 3 * topk));
        assert!(first.1.is_finite() && first.1 < 0.0, "{model}: {first:?}");
        assert_eq!(first, second, "{model}");
        assert_ne!(first.1, other.1, "{model}");
    }
}

#[test]
fn what_cannot_be_made_is_refused_and_leaves_no_config() {
    let dir = tempfile::tempdir().unwrap();
    let quantised = write_checkpoint(&config_of("fp8-block"), 0, dir.path());
    assert!(matches!(quantised, Err(SyntheticError::Quantised)), "{quantised:?}");
    let nonsense = write_checkpoint("{}", 0, dir.path());
    assert!(matches!(nonsense, Err(SyntheticError::Config(_))), "{nonsense:?}");
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let unwritable = write_checkpoint(&config_of("share-4-3"), 0, &file).unwrap_err();
    assert!(unwritable.to_string().contains("file"), "{unwritable}");
    assert!(!dir.path().join("config.json").exists());
}
