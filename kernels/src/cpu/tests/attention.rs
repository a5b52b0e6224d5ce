use super::*;

const HEADS: usize = 5;
const NOPE: usize = 6;
const ROPE: usize = 4;
const VALUE: usize = 7;
const LATENT: usize = 19;
const SCALE: f32 = 0.4;

struct Setup {
    backend: CpuBackend,
    cache: LatentCache,
    kv_b: Vec<f32>,
    absorbed: Absorbed,
    a: Batch,
    b: Batch,
    queries: Tensor,
    other: Tensor,
}

fn setup() -> Setup {
    let backend = cpu(3);
    let mut v = Values::new(21);
    let mut cache = backend.latent_cache(20, 4, LATENT, ROPE).unwrap();
    let (a, b) = (sequence(0, 26, 4, 2), sequence(0, 15, 4, 12));
    let norm = Vector(v.take(LATENT));
    for batch in [&a, &b] {
        let kv = v.tensor(batch.rows(), LATENT + ROPE);
        backend.write_latent(&mut cache, batch, &kv, &norm, 1e-6, &table(ROPE / 2));
    }
    let rows = HEADS * (NOPE + VALUE);
    let kv_b = v.take(rows * LATENT);
    let raw = bytes(&kv_b);
    let view = MatrixView { rows, cols: LATENT, data: MatrixData::F32(&raw) };
    let absorbed = backend.absorbed(view, HEADS, NOPE, VALUE).unwrap();
    let queries = v.tensor(26, HEADS * (NOPE + ROPE));
    let other = v.tensor(15, HEADS * (NOPE + ROPE));
    Setup { backend, cache, kv_b, absorbed, a, b, queries, other }
}

impl Setup {
    /// Unabsorbed attention in f64: keys and values are expanded from the latent for every head.
    fn reference(&self, row: usize, positions: &[usize]) -> Vec<f64> {
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
        };
        let width = LATENT + ROPE;
        let mut out = Vec::new();
        for h in 0..HEADS {
            let q = &self.queries.row(row)[h * (NOPE + ROPE)..][..NOPE + ROPE];
            let up = |i: usize| &self.kv_b[(h * (NOPE + VALUE) + i) * LATENT..][..LATENT];
            let held: Vec<&[f32]> = positions
                .iter()
                .map(|p| &self.cache.data[self.a.segments[0].slot(*p, 4) * width..][..width])
                .collect();
            let logit = |c: &&[f32]| {
                let nope: f64 = (0..NOPE).map(|n| f64::from(q[n]) * dot(up(n), &c[..LATENT])).sum();
                ((nope + dot(&q[NOPE..], &c[LATENT..])) * f64::from(SCALE)).exp()
            };
            let weights: Vec<f64> = held.iter().map(logit).collect();
            let sum: f64 = weights.iter().sum();
            for v in 0..VALUE {
                let terms = held.iter().zip(&weights);
                out.push(terms.map(|(c, w)| w / sum * dot(up(NOPE + v), &c[..LATENT])).sum());
            }
        }
        out
    }
}

#[test]
fn absorbed_attention_is_the_unabsorbed_one() {
    let s = setup();
    let topk = 8;
    let long: Vec<i32> =
        (topk..26).flat_map(|p| (0..topk).map(move |j| (j * p / topk) as i32)).collect();
    let selection = s.backend.import_selection(&s.a, topk, &long);
    let out =
        s.backend.sparse_attention(&s.cache, &s.a, &s.queries, &s.absorbed, &selection, SCALE);
    for row in 0..26 {
        let positions: Vec<usize> = if row < topk {
            (0..=row).collect()
        } else {
            (0..topk).map(|j| j * row / topk).collect()
        };
        let expected = s.reference(row, &positions);
        out.row(row).iter().zip(expected).for_each(|(y, e)| close(*y, e, 2e-5));
    }
}

#[test]
fn a_list_of_everything_has_the_bits_of_selecting_everything() {
    let s = setup();
    let everything = s.backend.import_selection(&s.a, 100, &[]);
    let listed = Selection {
        topk: 100,
        rows: (0..26).map(|p| index::Chosen::These((0..=p).collect())).collect(),
    };
    let run = |selection| {
        s.backend.sparse_attention(&s.cache, &s.a, &s.queries, &s.absorbed, selection, SCALE)
    };
    assert_eq!(run(&everything), run(&listed));
}

#[test]
fn a_row_has_the_same_bits_alone_and_beside_another_sequence() {
    let s = setup();
    let whole = s.backend.sparse_attention(
        &s.cache,
        &s.a,
        &s.queries,
        &s.absorbed,
        &s.backend.import_selection(&s.a, 100, &[]),
        SCALE,
    );
    let both = join(&[&s.b, &s.a], 2);
    let mut data = [s.other.data.clone(), s.queries.data.clone()].concat();
    data.resize(43 * s.queries.width, 0.5);
    let queries = Tensor { rows: 43, width: s.queries.width, data };
    let selection = s.backend.import_selection(&both, 100, &[]);
    let out = s.backend.sparse_attention(&s.cache, &both, &queries, &s.absorbed, &selection, SCALE);
    assert_eq!(out.data[15 * out.width..41 * out.width], whole.data);
    assert!(out.data[41 * out.width..].iter().all(|v| *v == 0.0), "padding rows yield zeros");
    for row in [0, 3, 25] {
        let mut batch = s.a.clone();
        batch.segments[0].start = row;
        batch.segments[0].rows = 1;
        let q = s.backend.gather(&s.queries, &[row]);
        let selection = s.backend.import_selection(&batch, 100, &[]);
        let alone = cpu(1).sparse_attention(&s.cache, &batch, &q, &s.absorbed, &selection, SCALE);
        assert_eq!(alone.row(0), whole.row(row), "row {row}");
    }
}
