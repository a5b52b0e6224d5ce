//! Slices in one process against what transformers answered, at every cut.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::path::{Path, PathBuf};

use baton_kernels::sampling::{SampleRequest, ScoreRequest};
use baton_kernels::{Batch, CpuBackend, CpuOptions, Segment};
use baton_model::{Checkpoint, Slice, StepInput, StepOutput, StepRequest};
use baton_plan::{Contract, ContractOptions, HiddenDtype, IndexDtype, ModelConfig, Partition};
use baton_transport::frame::{decode, encode};
use baton_transport::{ExpectedStep, FrameLimits, HandOff};

const BLOCK: usize = 4;
const BLOCKS: usize = 128;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn config(model: &str) -> ModelConfig {
    ModelConfig::load(&repository().join("tests/models").join(model)).unwrap()
}

struct Prompt {
    name: String,
    tokens: Vec<u32>,
    logprobs: Vec<f64>,
    greedy: Vec<u32>,
}

fn prompts(answers: &str) -> Vec<Prompt> {
    let path = repository().join(format!("tests/oracle/answers/{answers}.json"));
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    json["prompts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| Prompt {
            name: p["name"].as_str().unwrap().into(),
            tokens: ids(&p["tokens"]),
            logprobs: p["logprobs"].as_array().unwrap()[1..]
                .iter()
                .map(|l| l.as_f64().unwrap())
                .collect(),
            greedy: ids(&p["greedy"]),
        })
        .collect()
}

/// A pipeline of slices; hand-offs go through their wire form.
struct Pipeline {
    slices: Vec<Slice<CpuBackend>>,
    vocabulary: usize,
    step_id: u64,
}

/// Rows of one sequence in a step: its tokens from `start`, on blocks of its own.
struct Part<'a> {
    sequence: usize,
    tokens: &'a [u32],
    start: usize,
    /// Tokens that follow each row, to be scored.
    targets: &'a [u32],
}

/// Per part: the most likely next token, its log-probability, and the scores of the targets.
type Answer = (u32, f32, Vec<f32>);

impl Pipeline {
    fn new(model: &str, counts: &[usize]) -> Self {
        Self::with_dtype(model, counts, HiddenDtype::F32)
    }

    fn with_dtype(model: &str, counts: &[usize], hidden_dtype: HiddenDtype) -> Self {
        let config = config(model);
        let partition = Partition::from_counts(counts, config.num_layers).unwrap();
        let options = ContractOptions {
            hidden_dtype,
            index_dtype: IndexDtype::I32,
            row_capacity: 512,
            block_size: BLOCK,
        };
        let contract = Contract::new(&config, &partition, &options).unwrap();
        let dir = repository().join("tests/models").join(model);
        let slices = contract
            .stages
            .into_iter()
            .map(|contract| {
                let checkpoint = Checkpoint::open(&dir).unwrap();
                let backend = CpuBackend::new(CpuOptions { threads: Some(1) }).unwrap();
                Slice::load(backend, &config, &checkpoint, contract, BLOCKS, &mut |_| {}).unwrap()
            })
            .collect();
        Self { slices, vocabulary: config.vocab_size, step_id: 0 }
    }

    fn step(&mut self, parts: &[Part<'_>], padding: usize) -> Vec<Answer> {
        self.step_id += 1;
        let (mut first_row, mut segments) = (0, Vec::new());
        let (mut tokens, mut positions) = (Vec::new(), Vec::new());
        let (mut samples, mut scores) = (Vec::new(), Vec::new());
        for part in parts {
            let rows = part.tokens.len();
            // Blocks of a sequence lie apart and backwards, so that logical and physical order differ.
            let blocks = (0..32).map(|b| ((31 - b) * 4 + part.sequence) as u32).collect();
            segments.push(Segment { first_row, rows, start: part.start, blocks });
            for (r, &target) in part.targets.iter().enumerate() {
                scores.push(ScoreRequest { row: first_row + r, target, top: 0 });
            }
            samples.push(SampleRequest {
                row: first_row + rows - 1,
                temperature: 0.0,
                top_p: 1.0,
                top_k: 0,
                min_p: 0.0,
                seed: 0,
                draw: 0,
                logprobs: None,
                banned: vec![],
                adjustments: Default::default(),
            });
            tokens.extend_from_slice(part.tokens);
            positions.extend((part.start..part.start + rows).map(|p| p as u32));
            first_row += rows;
        }
        let request = StepRequest {
            epoch: 1,
            step_id: self.step_id,
            batch: Batch { segments, padding, block_size: BLOCK },
            samples,
            scores,
        };
        let expected = ExpectedStep { epoch: 1, step_id: self.step_id, positions, padding };
        let mut wire: Option<HandOff> = None;
        for slice in &mut self.slices {
            let contract = slice.contract().clone();
            let input = match wire.take() {
                None => StepInput::Tokens(&tokens),
                Some(sent) => {
                    let limits = FrameLimits::from(&contract);
                    let bytes = encode(sent, &limits).to_bytes();
                    let received = decode(&bytes, &limits).unwrap();
                    StepInput::HandOff(received.accept(&contract, &expected).unwrap())
                }
            };
            match slice.forward(&request, input).unwrap() {
                StepOutput::HandOff(sent) => {
                    assert_eq!(sent.carry.is_some(), contract.sends_from_layer.is_some());
                    wire = Some(sent);
                }
                StepOutput::Tokens { sampled, scored } => {
                    let mut scored = scored.into_iter();
                    return sampled
                        .into_iter()
                        .zip(parts)
                        .map(|(s, part)| {
                            let scores =
                                scored.by_ref().take(part.targets.len()).map(|s| s.logprob);
                            (s.token, s.logprob, scores.collect())
                        })
                        .collect();
                }
            }
        }
        panic!("the last slice must answer");
    }

    /// Scores of the prompt and a greedy continuation, the prompt in chunks of the given size.
    fn generate(&mut self, prompt: &Prompt, chunk: usize) -> (Vec<f32>, Vec<u32>, Vec<f32>) {
        let (mut scores, mut generated, mut logprobs) = (Vec::new(), Vec::new(), Vec::new());
        let mut next = 0;
        for start in (0..prompt.tokens.len()).step_by(chunk) {
            let end = (start + chunk).min(prompt.tokens.len());
            let targets = &prompt.tokens[start + 1..(end + 1).min(prompt.tokens.len())];
            let part = Part { sequence: 0, tokens: &prompt.tokens[start..end], start, targets };
            let (token, logprob, scored) = self.step(&[part], 0).remove(0);
            scores.extend(scored);
            next = token;
            logprobs = vec![logprob];
        }
        generated.push(next);
        while generated.len() < prompt.greedy.len() {
            let start = prompt.tokens.len() + generated.len() - 1;
            let token = [next];
            let part = Part { sequence: 0, tokens: &token, start, targets: &[] };
            let (token, logprob, _) = self.step(&[part], 0).remove(0);
            next = token;
            generated.push(next);
            logprobs.push(logprob);
        }
        (scores, generated, logprobs)
    }
}

fn check_against_oracle(model: &str, answers: &str, counts: &[usize]) {
    let mut pipeline = Pipeline::new(model, counts);
    assert!(pipeline.vocabulary > 0);
    for prompt in prompts(answers) {
        let (scores, generated, _) = pipeline.generate(&prompt, 512);
        assert_eq!(scores.len(), prompt.logprobs.len());
        for (at, (found, expected)) in scores.iter().zip(&prompt.logprobs).enumerate() {
            let error = (f64::from(*found) - expected).abs();
            assert!(
                error < 1e-4,
                "{model} {counts:?}, prompt {}: token {} is off by {error:e}",
                prompt.name,
                at + 1
            );
        }
        assert_eq!(generated, prompt.greedy, "{model} {counts:?}, prompt {}", prompt.name);
    }
}

#[test]
fn every_model_answers_as_transformers_does_uncut_and_in_halves() {
    for (model, answers) in [
        ("share-4-3", "share-4-3"),
        ("share-8-2", "share-8-2"),
        ("pattern", "pattern"),
        ("all-full", "all-full"),
        ("bf16", "bf16"),
        ("bf16-sharded", "bf16"),
        ("bf16-fused-experts", "bf16"),
        ("fp8-block", "fp8-block"),
        ("deepseek-v32", "deepseek-v32"),
    ] {
        let layers = config(model).num_layers;
        check_against_oracle(model, answers, &[layers]);
        check_against_oracle(model, answers, &[layers / 2, layers - layers / 2]);
    }
}

#[test]
fn every_cut_of_ten_layers_gives_the_same_bits() {
    // F F F S S S F S S S
    let all = prompts("share-4-3");
    let long = all.iter().find(|p| p.name == "long").unwrap();
    let whole = Pipeline::new("share-4-3", &[10]).generate(long, 512);
    assert_eq!(whole.1, long.greedy);
    let mut splits: Vec<Vec<usize>> = (1..10).map(|cut| vec![cut, 10 - cut]).collect();
    splits.extend([vec![3, 1, 1, 1, 4], vec![4, 1, 1, 4], vec![2, 2, 2, 2, 2], vec![1; 10]]);
    for split in splits {
        assert_eq!(Pipeline::new("share-4-3", &split).generate(long, 512), whole, "{split:?}");
    }
}

#[test]
fn case_24_all_512_ways_to_cut_ten_layers_give_the_same_bits() {
    let mut mid = prompts("share-4-3").into_iter().find(|p| p.name == "mid").unwrap();
    mid.greedy.truncate(6);
    let whole = Pipeline::new("share-4-3", &[10]).generate(&mid, 512);
    assert_eq!(whole.1, mid.greedy);
    for cuts in 0..512_u32 {
        let mut counts = vec![1];
        for layer in 1..10 {
            // Bit `layer - 1` cuts before that layer.
            match cuts >> (layer - 1) & 1 {
                1 => counts.push(1),
                _ => *counts.last_mut().unwrap() += 1,
            }
        }
        assert_eq!(Pipeline::new("share-4-3", &counts).generate(&mid, 512), whole, "{counts:?}");
    }
}

#[test]
fn chunks_do_not_change_a_bit() {
    let all = prompts("share-4-3");
    let long = all.iter().find(|p| p.name == "long").unwrap();
    let whole = Pipeline::new("share-4-3", &[4, 6]).generate(long, 512);
    for chunk in [1, 7, 16, 99] {
        assert_eq!(Pipeline::new("share-4-3", &[4, 6]).generate(long, chunk), whole, "{chunk}");
    }
}

#[test]
fn a_bf16_residual_stream_is_the_same_at_every_cut() {
    let all = prompts("share-4-3");
    let mid = all.iter().find(|p| p.name == "mid").unwrap();
    let run = |split: &[usize]| {
        Pipeline::with_dtype("share-4-3", split, HiddenDtype::Bf16).generate(mid, 16)
    };
    let whole = run(&[10]);
    for split in [&[4, 6][..], &[5, 5], &[3, 3, 4], &[9, 1]] {
        assert_eq!(run(split), whole, "{split:?}");
    }
}

#[test]
fn a_request_answers_the_same_alone_and_among_others() {
    let all = prompts("share-4-3");
    let (mid, long) = (&all[3], &all[4]);
    let mut alone = Pipeline::new("share-4-3", &[5, 5]);
    let targets = &mid.tokens[1..];
    let part = || Part { sequence: 1, tokens: &mid.tokens, start: 0, targets };
    let expected = alone.step(&[part()], 0).remove(0);
    let mut mixed = Pipeline::new("share-4-3", &[5, 5]);
    // Another request's prompt first, then its next token and padding beside the prompt in question.
    let (head, tail) = long.tokens.split_at(60);
    mixed.step(&[Part { sequence: 0, tokens: head, start: 0, targets: &[] }], 0);
    let decode = Part { sequence: 0, tokens: &tail[..1], start: 60, targets: &[] };
    let short = Part { sequence: 2, tokens: &all[0].tokens, start: 0, targets: &[] };
    let found = mixed.step(&[decode, part(), short], 3);
    assert_eq!(found[1], expected);
}

#[test]
fn a_step_without_rows_passes_through() {
    for (model, split) in [("share-4-3", [4, 6]), ("pattern", [4, 6]), ("bf16", [5, 5])] {
        let mut pipeline = Pipeline::new(model, &split);
        assert!(pipeline.step(&[], 0).is_empty());
    }
    assert!(Pipeline::new("fp8-block", &[4, 3]).step(&[], 0).is_empty());
}

#[test]
fn a_slice_reads_its_own_bytes_and_needs_no_other_shard() {
    let config = config("bf16-sharded");
    let source = repository().join("tests/models/bf16-sharded");
    let partition = Partition::from_counts(&[4, 6], 10).unwrap();
    let options = ContractOptions {
        hidden_dtype: HiddenDtype::F32,
        index_dtype: IndexDtype::I32,
        row_capacity: 8,
        block_size: BLOCK,
    };
    let contract = Contract::new(&config, &partition, &options).unwrap();
    for stage in contract.stages {
        let checkpoint = Checkpoint::open(&source).unwrap();
        let needed: u64 = baton_model::slice::bytes_needed(&config, &stage);
        let backend = CpuBackend::new(CpuOptions { threads: Some(1) }).unwrap();
        Slice::load(backend, &config, &checkpoint, stage, 4, &mut |_| {}).unwrap();
        let read = checkpoint.tensor_bytes_read();
        assert!(read <= needed + needed / 100, "{read} bytes read, {needed} needed");
    }
}

#[test]
fn missing_and_unknown_tensors_are_named_and_counted() {
    let dir = repository().join("tests/models/share-4-3");
    let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    // One expert more than the checkpoint has.
    for field in ["n_routed_experts", "num_local_experts", "num_experts"] {
        if json.get(field).is_some() {
            json[field] = 9.into();
        }
    }
    let larger = ModelConfig::from_json(&json.to_string()).unwrap();
    let error = checkpoint.check_names(&larger, 0..10).unwrap_err().to_string();
    assert!(error.contains("missing") && error.contains("experts.8.gate_proj"), "{error}");
    for field in ["n_routed_experts", "num_local_experts", "num_experts"] {
        if json.get(field).is_some() {
            json[field] = 7.into();
        }
    }
    let smaller = ModelConfig::from_json(&json.to_string()).unwrap();
    let error = checkpoint.check_names(&smaller, 0..10).unwrap_err().to_string();
    assert!(error.contains("not part of the model") && error.contains("experts.7"), "{error}");
}
