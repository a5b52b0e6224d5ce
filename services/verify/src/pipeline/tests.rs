#![allow(clippy::unwrap_used)] // A test fails by panicking.

use super::*;
use crate::text::{CopyTask, encode, tokenizer};

/// Room for a list of fifty words and its copy.
const LONGEST: usize = 384;

fn demo() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/demo")
}

/// The copies of fifty words that the demo model writes when it is cut so.
fn copies(counts: &[usize], trials: usize) -> Vec<Vec<u32>> {
    let config = ModelConfig::load(&demo()).unwrap();
    let partition = Partition::from_counts(counts, config.num_layers).unwrap();
    let mut pipeline =
        Pipeline::load(&demo(), &config, &partition, LONGEST, Device::Cpu, false).unwrap();
    let tokenizer = tokenizer(&demo()).unwrap();
    let lists = CopyTask::load(Some(&demo())).unwrap().trials(50, trials);
    lists
        .iter()
        .map(|list| {
            let prompt = encode(&tokenizer, &list.prompt).unwrap();
            let answer = encode(&tokenizer, &list.answer).unwrap();
            let copy = pipeline.generate(&prompt, answer.len(), |_| false).unwrap();
            assert_eq!(copy, answer, "{counts:?}");
            copy
        })
        .collect()
}

/// All ways to cut twelve layers into so many stages.
fn cuts(stages: usize) -> Vec<Vec<usize>> {
    (0..1_u32 << 11)
        .filter(|cuts| cuts.count_ones() as usize + 1 == stages)
        .map(|cuts| {
            let mut counts = vec![1];
            for layer in 0..11 {
                match cuts >> layer & 1 {
                    1 => counts.push(1),
                    _ => *counts.last_mut().unwrap() += 1,
                }
            }
            counts
        })
        .collect()
}

#[test]
fn every_cut_in_two_copies_fifty_words() {
    let whole = copies(&[12], 1);
    let halves = cuts(2);
    assert_eq!(halves.len(), 11);
    for counts in halves {
        assert_eq!(copies(&counts, 1), whole, "{counts:?}");
    }
}

#[test]
#[ignore = "693 pipelines take minutes: cargo nextest run --release -p baton-verify --run-ignored all"]
fn every_cut_into_two_three_four_and_six_stages_copies_fifty_words() {
    let whole = copies(&[12], 2);
    let mut count = 0;
    for counts in [2, 3, 4, 6].into_iter().flat_map(cuts) {
        assert_eq!(copies(&counts, 2), whole, "{counts:?}");
        count += 1;
    }
    assert_eq!(count, 11 + 55 + 165 + 462);
}
