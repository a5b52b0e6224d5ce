use proptest::prelude::*;

use super::*;
use crate::contract::HiddenDtype;
use crate::kv::KvLayout;
use crate::test_models::{BLOCK, glm_5_3, tiny};

/// Every way to cut `layers` into `stages` slices.
fn all_splits(layers: usize, stages: usize) -> Vec<Vec<Range<usize>>> {
    if stages == 1 {
        return vec![std::iter::once(0..layers).collect()];
    }
    (stages - 1..layers)
        .flat_map(|start| {
            let heads = all_splits(start, stages - 1).into_iter();
            heads.map(move |head| head.into_iter().chain(std::iter::once(start..layers)).collect())
        })
        .collect()
}

fn carries(split: &[Range<usize>], starts_shared: &[bool]) -> usize {
    split.iter().filter(|slice| starts_shared[slice.start]).count()
}

prop_compose! {
    fn problem()(layers in 1usize..9)(
        time in prop::collection::vec(1u64..60, layers),
        memory in prop::collection::vec(1u64..20, layers),
        shared in prop::collection::vec(any::<bool>(), layers),
        limits in prop::collection::vec(5u64..60, 1..=layers.min(4)),
    ) -> (Vec<u64>, Vec<u64>, Vec<bool>, Vec<u64>) {
        let mut shared = shared;
        shared[0] = false;
        (time, memory, shared, limits)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// The chosen split is what trying all of them finds: fewest carries within the tolerance, then the smallest largest
    /// stage, then the most even one.
    #[test]
    fn the_search_is_exact((time, memory, shared, limits) in problem()) {
        let loads = Loads::from_layers(&time, &memory);
        let stages = limits.len();
        let largest = |split: &[Range<usize>]| {
            split.iter().map(|slice| loads.time(slice.clone())).max().expect("a stage")
        };
        let squares = |split: &[Range<usize>]| {
            split.iter().map(|slice| u128::from(loads.time(slice.clone())).pow(2)).sum::<u128>()
        };
        let feasible: Vec<_> = all_splits(time.len(), stages)
            .into_iter()
            .filter(|split| {
                split.iter().zip(&limits).all(|(slice, limit)| loads.memory(slice.clone()) <= *limit)
            })
            .collect();
        let found = choose(&loads, &limits, &shared);
        let Some(best) = feasible.iter().map(|split| largest(split)).min() else {
            prop_assert_eq!(found, None);
            return Ok(());
        };
        let found = found.expect("some split is feasible");
        prop_assert!(feasible.contains(&found.slices));
        let near = |split: &&Vec<Range<usize>>| {
            let cost = largest(split);
            cost == best || cost * 100 < best * (100 + CARRY_FREE_TOLERANCE)
        };
        let fewest =
            feasible.iter().filter(near).map(|split| carries(split, &shared)).min().expect("best is near");
        prop_assert_eq!(carries(&found.slices, &shared), fewest);
        let same_carries = || feasible.iter().filter(|split| carries(split, &shared) == fewest);
        let bound = same_carries().map(|split| largest(split)).min().expect("one is near");
        prop_assert_eq!(largest(&found.slices), bound);
        let evenest =
            same_carries().filter(|split| largest(split) == bound).map(|split| squares(split)).min();
        prop_assert_eq!(Some(squares(&found.slices)), evenest);
    }

    #[test]
    fn every_split_covers_every_layer_once(pattern in "F[FS]{0,11}", stages in 1usize..6) {
        let config = tiny(&pattern);
        let options = BalanceOptions::new(&config, stages);
        match balance(&config, &options) {
            Ok(split) => {
                prop_assert_eq!(split.slices.len(), stages);
                let layers: Vec<usize> = split.slices.iter().cloned().flatten().collect();
                prop_assert_eq!(layers, (0..config.num_layers).collect::<Vec<_>>());
                prop_assert!(split.slices.iter().all(|slice| !slice.is_empty()));
            }
            Err(error) => {
                let layers = config.num_layers;
                prop_assert_eq!(error, BalanceError::StageCount { stages, layers });
                prop_assert!(stages > layers);
            }
        }
    }
}

#[test]
fn the_cost_of_glm_layers_is_what_the_model_documents() {
    let config = glm_5_3();
    let million = |cost: u64| (cost as f64 / 1e6).round() as u64;
    let shared = layer_cost(&config, 3, 16_384);
    assert_eq!(million(shared.total()), 649);
    assert_eq!(shared.indexer, 0);
    assert_eq!(million(layer_cost(&config, 6, 16_384).indexer), 76);
    let dense = layer_cost(&config, 0, 16_384);
    assert_eq!(million(shared.mlp - dense.mlp), 115);
    assert_eq!(dense.attention, shared.attention);
}

#[test]
fn attention_stops_growing_at_index_topk_and_the_indexer_does_not() {
    let config = glm_5_3();
    let at = |context| layer_cost(&config, 6, context);
    assert!(at(1024).attention < at(2048).attention);
    assert_eq!(at(2048).attention, at(1_000_000).attention);
    assert_eq!(at(1_000_000).indexer - at(999_999).indexer, 32 * 128);
}

#[test]
fn the_head_makes_the_last_stage_shorter() {
    let plain = tiny("FFFFFFFF");
    let split = |config: &ModelConfig| {
        let split = balance(config, &BalanceOptions::new(config, 2)).expect("a split");
        split.slices.iter().map(ExactSizeIterator::len).collect::<Vec<_>>()
    };
    assert_eq!(split(&plain), [4, 4]);
    // A head that costs as much as two layers.
    let layer = layer_cost(&plain, 1, plain.max_positions).total() as usize;
    let vocab_size = 2 * layer / plain.hidden_size;
    assert_eq!(split(&ModelConfig { vocab_size, ..plain }), [5, 3]);
}

#[test]
fn a_carry_free_split_is_taken_only_when_it_is_nearly_as_good() {
    // Ten equal layers of cost 100; only a cut before layer 6 is free of a carry.
    let shared = [0, 1, 1, 1, 1, 1, 0, 1, 1, 1].map(|flag| flag == 1);
    let even = choose(&Loads::from_layers(&[100; 10], &[0; 10]), &[0; 2], &shared);
    let even = even.expect("a split");
    assert_eq!(even.slices, [0..5, 5..10]);
    assert_eq!(even.notes, ["1 carry is sent: carry-free cuts (at 0,6) would cost 20.00% balance"]);

    // A light layer 5 makes the cut before 6 nearly as good as the one before 5: 509 against 500.
    let time = [100, 100, 100, 100, 100, 9, 120, 120, 120, 131];
    let near = choose(&Loads::from_layers(&time, &[0; 10]), &[0; 2], &shared).expect("a split");
    assert_eq!(near.slices, [0..6, 6..10]);
    assert_eq!(near.costs, [509, 491]);
    assert_eq!(
        near.notes,
        [
            "carry-free cuts cost 1.80% balance: the best split starts its stages at 0,5 and sends 1 carry"
        ]
    );

    // Two percent exactly is too much.
    let time = [100, 100, 100, 100, 100, 10, 120, 120, 120, 130];
    let far = choose(&Loads::from_layers(&time, &[0; 10]), &[0; 2], &shared).expect("a split");
    assert_eq!(far.slices, [0..5, 5..10]);
}

#[test]
fn the_cuts_of_a_published_model_say_what_avoiding_carries_would_cost() {
    let config = ModelConfig { fp8: Some(BLOCK), ..glm_5_3() };
    let split = balance(&config, &BalanceOptions::new(&config, 8)).expect("a split");
    let starts: Vec<usize> = split.slices.iter().map(|slice| slice.start).collect();
    assert_eq!(starts, [0, 10, 20, 30, 40, 50, 60, 70]);
    assert_eq!(
        split.notes,
        [
            "3 carries are sent: carry-free cuts (at 0,10,18,26,34,46,58,70) would cost 19.32% balance"
        ]
    );
}

#[test]
fn memory_bounds_what_a_stage_may_hold() {
    let config = ModelConfig { fp8: Some(BLOCK), ..glm_5_3() };
    let mut options = BalanceOptions::new(&config, 2);
    options.memory = vec![200_000_000_000, 700_000_000_000];
    let split = balance(&config, &options).expect("a split");
    let loads = Loads::new(&config, &options);
    for (slice, limit) in split.slices.iter().zip(&options.memory) {
        assert!(loads.memory(slice.clone()) <= *limit);
    }
    // One more layer, with or without a carry, would not have fitted the first stage.
    assert!(loads.memory(0..split.slices[0].end + 4) > options.memory[0]);
}

#[test]
fn kv_takes_memory_from_the_layers() {
    let config = tiny("FSFSFS");
    let mut options = BalanceOptions::new(&config, 1);
    options.kv_layout = KvLayout::Plain(HiddenDtype::F32);
    let weights = {
        options.kv_tokens = 0;
        Loads::new(&config, &options).memory(0..6)
    };
    options.kv_tokens = 10;
    options.memory = vec![weights];
    let error = balance(&config, &options).expect_err("no room for KV");
    let kv = 10 * 4 * (6 * (24 + 8) + 3 * 16);
    assert_eq!(
        error,
        BalanceError::TooLittleMemory {
            stages: 1,
            needed: weights + kv,
            available: weights,
            limits: weights.to_string(),
            fullest: weights + kv,
            kv_tokens: 10,
        }
    );
    options.memory = vec![weights + kv];
    assert_eq!(balance(&config, &options).expect("a split").slices.len(), 1);
}

#[test]
fn too_little_memory_is_refused_with_the_numbers() {
    let config = ModelConfig { fp8: Some(BLOCK), ..glm_5_3() };
    let mut options = BalanceOptions::new(&config, 8);
    options.memory = vec![80_000_000_000];
    let message = balance(&config, &options).expect_err("too little").to_string();
    let needed = 745_584_507_456_u64 + 16_384 * 95_232;
    for number in ["80000000000", "640000000000", "16384", &needed.to_string()] {
        assert!(message.contains(number), "{number} is not in: {message}");
    }
}

#[test]
fn stages_and_limits_must_match_the_model() {
    let config = tiny("FSS");
    let refused = |stages, memory: &[u64]| {
        let options =
            BalanceOptions { memory: memory.to_vec(), ..BalanceOptions::new(&config, stages) };
        balance(&config, &options).expect_err("refused")
    };
    assert_eq!(refused(4, &[]), BalanceError::StageCount { stages: 4, layers: 3 });
    assert_eq!(refused(0, &[]), BalanceError::StageCount { stages: 0, layers: 3 });
    assert_eq!(refused(3, &[1, 2]), BalanceError::MemoryLimits { limits: 2, stages: 3 });
}
