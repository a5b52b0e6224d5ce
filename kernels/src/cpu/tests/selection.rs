use proptest::prelude::*;

use super::super::topk::top_k;
use super::*;

fn score_value() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => (-3_i8..3).prop_map(f32::from),
        2 => -1e3_f32..1e3,
        1 => Just(-0.0_f32),
        1 => Just(f32::NAN),
        1 => Just(-f32::NAN),
        1 => Just(f32::INFINITY),
        1 => Just(f32::NEG_INFINITY),
    ]
}

proptest! {
    #[test]
    fn the_best_are_those_of_a_full_sort(
        scores in proptest::collection::vec(score_value(), 0..200),
        k in 0_usize..210,
    ) {
        let mut all: Vec<u32> = (0..scores.len() as u32).collect();
        all.sort_by(|a, b| {
            let (x, y) = (scores[*a as usize], scores[*b as usize]);
            x.is_nan().cmp(&y.is_nan()).then(y.partial_cmp(&x).unwrap_or(std::cmp::Ordering::Equal))
        });
        all.truncate(k);
        all.sort_unstable();
        let mut chosen = Vec::new();
        top_k(&scores, k, &mut Vec::new(), &mut chosen);
        prop_assert_eq!(chosen, all);
    }
}

#[test]
fn case_08_equal_scores_go_to_the_lowest_positions() {
    let chosen = |scores: &[f32], k| {
        let mut chosen = Vec::new();
        top_k(scores, k, &mut Vec::new(), &mut chosen);
        chosen
    };
    assert_eq!(chosen(&[0.0; 50], 6), [0, 1, 2, 3, 4, 5]);
    // Negative zero is no lower than zero.
    assert_eq!(chosen(&[-0.0, 0.0, -0.0, 0.0], 2), [0, 1]);
    assert_eq!(chosen(&[1.0, 2.0, 1.0, 2.0, 1.0], 3), [0, 1, 3]);
    assert_eq!(chosen(&[0.0; 3], 6), [0, 1, 2]);
}

const HEADS: usize = 18;
const DIM: usize = 10;
const PARAMS: IndexParams = IndexParams { heads: HEADS, head_dim: DIM, topk: 6 };

struct Step {
    batch: Batch,
    keys: Tensor,
    queries: Tensor,
    weights: Tensor,
}

fn step(seed: u64, start: usize, rows: usize, first_block: u32) -> Step {
    let mut v = Values::new(seed);
    Step {
        batch: sequence(start, rows, 4, first_block),
        keys: v.tensor(rows, DIM),
        queries: v.tensor(rows, HEADS * DIM),
        weights: v.tensor(rows, HEADS),
    }
}

fn write(backend: &CpuBackend, cache: &mut IndexCache, step: &Step) {
    let (one, zero) = (Vector(vec![1.0; DIM]), Vector(vec![0.25; DIM]));
    let layout = RopeLayout::HalfSplit;
    backend.write_index_key(cache, &step.batch, &step.keys, &one, &zero, 1e-6, &table(2), layout);
}

#[test]
fn rows_choose_by_the_score_formula() {
    let backend = cpu(2);
    let mut cache = backend.index_cache(9, 4, DIM).unwrap();
    let s = step(3, 0, 30, 1);
    write(&backend, &mut cache, &s);
    let chosen = backend.select(&cache, &s.batch, &s.queries, &s.weights, &PARAMS);
    let exported = backend.export_selection(&chosen, &(0..30).collect::<Vec<_>>());
    for (row, (segment, position)) in s.batch.positions().enumerate() {
        let mut list: Vec<(f64, usize)> = (0..=position)
            .map(|p| {
                let key = &cache.data[segment.slot(p, 4) * DIM..][..DIM];
                let head = |h: usize| {
                    let q = &s.queries.row(row)[h * DIM..][..DIM];
                    let dot: f64 = q.iter().zip(key).map(|(a, b)| f64::from(a * b)).sum();
                    f64::from(s.weights.row(row)[h]) * (dot / (DIM as f64).sqrt()).max(0.0)
                };
                ((0..HEADS).map(head).sum::<f64>(), p)
            })
            .collect();
        list.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut expected: Vec<i32> = list.iter().take(6).map(|(_, p)| *p as i32).collect();
        expected.sort_unstable();
        expected.resize(6, -1);
        assert_eq!(exported[row * 6..(row + 1) * 6], expected, "row {row}");
    }
    assert_eq!(backend.nan_scores(), 0);
}

#[test]
fn a_row_chooses_the_same_in_one_step_in_chunks_and_beside_others() {
    let backend = cpu(2);
    let mut cache = backend.index_cache(30, 4, DIM).unwrap();
    let (a, b) = (step(1, 0, 29, 0), step(2, 0, 23, 10));
    write(&backend, &mut cache, &a);
    write(&backend, &mut cache, &b);
    let whole = backend.select(&cache, &a.batch, &a.queries, &a.weights, &PARAMS);
    let stack = |x: &Tensor, y: &Tensor, padding: usize| {
        let mut data = [x.data.clone(), y.data.clone()].concat();
        data.resize(data.len() + padding * x.width, 0.0);
        Tensor { rows: x.rows + y.rows + padding, width: x.width, data }
    };
    let both = backend.select(
        &cache,
        &join(&[&b.batch, &a.batch], 3),
        &stack(&b.queries, &a.queries, 3),
        &stack(&b.weights, &a.weights, 3),
        &PARAMS,
    );
    assert_eq!(both.rows[23..52], whole.rows);
    assert!(both.rows[52..].iter().all(|r| *r == index::Chosen::Nothing));
    for row in 0..29 {
        let mut batch = a.batch.clone();
        batch.segments[0].start = row;
        batch.segments[0].rows = 1;
        let (q, w) = (backend.gather(&a.queries, &[row]), backend.gather(&a.weights, &[row]));
        let alone = backend.select(&cache, &batch, &q, &w, &PARAMS);
        assert_eq!(alone.rows[0], whole.rows[row], "row {row}");
    }
}

#[test]
fn index_rows_survive_the_hand_off() {
    let backend = cpu(1);
    let mut cache = backend.index_cache(9, 4, DIM).unwrap();
    let s = step(5, 0, 20, 0);
    write(&backend, &mut cache, &s);
    let mut batch = s.batch.clone();
    batch.padding = 2;
    let chosen = backend.select(&cache, &batch, &s.queries, &s.weights, &PARAMS);
    let long = backend.export_selection(&chosen, &(6..20).collect::<Vec<_>>());
    assert_eq!(backend.import_selection(&batch, 6, &long), chosen);
}

#[test]
fn scores_that_are_not_numbers_are_counted_and_come_last() {
    let backend = cpu(1);
    let mut cache = backend.index_cache(9, 4, DIM).unwrap();
    let mut s = step(5, 0, 12, 0);
    s.keys.data[..DIM].fill(f32::NAN);
    write(&backend, &mut cache, &s);
    let chosen = backend.select(&cache, &s.batch, &s.queries, &s.weights, &PARAMS);
    assert_eq!(backend.nan_scores(), 6, "one for each of the rows at 6 to 11");
    let long = backend.export_selection(&chosen, &(6..12).collect::<Vec<_>>());
    assert!(!long.contains(&0));
}
