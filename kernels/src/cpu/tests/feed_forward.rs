use super::*;

const HIDDEN: usize = 24;
const WIDTH: usize = 20;
const EXPERTS: usize = 8;

fn params() -> RouterParams {
    RouterParams { experts_per_token: 2, groups: 1, topk_groups: 1, normalise: true, scaling: 2.5 }
}

fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(x)).exp())
}

#[test]
fn the_bias_moves_the_choice_and_not_the_weights() {
    let outputs = Tensor { rows: 1, width: 4, data: vec![2.0, 1.0, 0.0, -1.0] };
    let routes = router::route(&outputs, &[0.0, 0.0, 0.0, 5.0], &params());
    let ids: Vec<u32> = routes.rows[0].iter().map(|r| r.0).collect();
    assert_eq!(ids, [0, 3]);
    let sum = sigmoid(2.0) + sigmoid(-1.0);
    close(routes.rows[0][0].1, 2.5 * sigmoid(2.0) / sum, 1e-6);
    close(routes.rows[0][1].1, 2.5 * sigmoid(-1.0) / sum, 1e-6);
}

#[test]
fn ties_go_to_the_lower_expert_and_groups_limit_the_choice() {
    let flat = Tensor { rows: 1, width: 6, data: vec![0.3; 6] };
    let ids = |r: Routes| r.rows[0].iter().map(|r| r.0).collect::<Vec<_>>();
    assert_eq!(ids(router::route(&flat, &[0.0; 6], &params())), [0, 1]);
    // The best expert is in the first group, but the second group's two best sum to more.
    let outputs = Tensor { rows: 1, width: 6, data: vec![3.0, -5.0, -5.0, 2.0, 2.0, 0.0] };
    let grouped = RouterParams { groups: 2, topk_groups: 1, normalise: false, ..params() };
    let routes = router::route(&outputs, &[0.0; 6], &grouped);
    close(routes.rows[0][0].1, 2.5 * sigmoid(2.0), 1e-6);
    assert_eq!(ids(routes), [3, 4]);
}

#[test]
fn experts_sum_to_the_weighted_swiglus_with_the_same_bits_in_any_company() {
    let (one, many) = (cpu(1), cpu(3));
    let mut v = Values::new(31);
    let raw: Vec<[Vec<u8>; 3]> =
        (0..EXPERTS).map(|_| [(); 3].map(|()| bytes(&v.take(WIDTH * HIDDEN)))).collect();
    let matrix = |data, rows, cols| MatrixView { rows, cols, data: MatrixData::F32(data) };
    let matrices: Vec<ExpertMatrices<'_>> = raw
        .iter()
        .map(|[gate, up, down]| ExpertMatrices {
            gate: matrix(gate, WIDTH, HIDDEN),
            up: matrix(up, WIDTH, HIDDEN),
            down: matrix(down, HIDDEN, WIDTH),
        })
        .collect();
    let experts = one.experts(&matrices).unwrap();
    let router = weight(&one, &v.take(EXPERTS * HIDDEN), EXPERTS, HIDDEN);
    let bias = Vector(v.take(EXPERTS));
    // Enough rows that the pool takes part.
    let x = v.tensor(400, HIDDEN);
    let routes = one.route(&router, &bias, &x, &params());
    let whole = one.run_experts(&experts, &routes, &x);
    assert_eq!(many.run_experts(&experts, &routes, &x), whole);
    for row in [0, 17, 399] {
        let alone = one.gather(&x, &[row]);
        let routes = one.route(&router, &bias, &alone, &params());
        assert_eq!(many.run_experts(&experts, &routes, &alone).row(0), whole.row(row));
        let mut expected = vec![0.0_f64; HIDDEN];
        for (expert, share) in &routes.rows[0] {
            let m = &matrices[*expert as usize];
            let [gate, up, down] = [m.gate, m.up, m.down].map(|m| one.weight(m).unwrap());
            let y = one.swiglu(&gate, &up, &down, &alone);
            for (e, y) in expected.iter_mut().zip(y.data) {
                *e += f64::from(*share) * f64::from(y);
            }
        }
        whole.row(row).iter().zip(expected).for_each(|(y, e)| close(*y, e, 1e-5));
    }
}

#[test]
fn swiglu_gates_with_silu() {
    let backend = cpu(1);
    let one = weight(&backend, &[1.0], 1, 1);
    let two = weight(&backend, &[2.0], 1, 1);
    for x in [-60.0, -1.5, 0.0, 0.7, 60.0_f32] {
        let y = backend.swiglu(&one, &two, &one, &Tensor { rows: 1, width: 1, data: vec![x] });
        close(y.data[0], f64::from(x) * sigmoid(x) * 2.0 * f64::from(x), 1e-6);
    }
}
