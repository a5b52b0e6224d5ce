//! Gated feed-forward layers and the routed experts made of them.

use rayon::prelude::*;

use super::gemm::{SiluMul, linear_into};
use super::router::Routes;
use super::simd::dispatch;
use super::team::Team;
use super::tensor::{Tensor, Weight};

/// One expert's packed matrices.
#[derive(Clone, Debug)]
pub(crate) struct Expert {
    pub(crate) gate: Weight,
    pub(crate) up: Weight,
    pub(crate) down: Weight,
}

/// All routed experts of a layer.
#[derive(Clone, Debug)]
pub struct Experts(pub(crate) Vec<Expert>);

impl Expert {
    /// `down(silu(gate x) * up x)` of `rows` contiguous rows, on the calling thread.
    fn run(&self, x: &[f32], rows: usize) -> Vec<f32> {
        let (width, hidden) = (self.gate.out, self.gate.cols);
        let mut gate = vec![0.0; rows * width];
        let mut up = vec![0.0; rows * width];
        linear_into(&self.gate, x, hidden, rows, &mut gate, width);
        linear_into(&self.up, x, hidden, rows, &mut up, width);
        dispatch(SiluMul { gate: &mut gate, up: &up });
        let mut out = vec![0.0; rows * self.down.out];
        linear_into(&self.down, &gate, width, rows, &mut out, self.down.out);
        out
    }
}

/// Weighted sum of every row's experts.
pub(crate) fn run(team: &Team, experts: &Experts, routes: &Routes, x: &Tensor) -> Tensor {
    let mut rows_of: Vec<Vec<(usize, f32)>> = vec![Vec::new(); experts.0.len()];
    for (row, chosen) in routes.rows.iter().enumerate() {
        for (expert, weight) in chosen {
            rows_of[*expert as usize].push((row, *weight));
        }
    }
    let busy: Vec<(&Expert, &Vec<(usize, f32)>)> =
        experts.0.iter().zip(&rows_of).filter(|(_, rows)| !rows.is_empty()).collect();
    let one = |(expert, rows): &(&Expert, &Vec<(usize, f32)>)| {
        if let [(row, _)] = rows.as_slice() {
            return expert.run(x.row(*row), 1);
        }
        let gathered: Vec<f32> = rows.iter().flat_map(|(row, _)| x.row(*row)).copied().collect();
        expert.run(&gathered, rows.len())
    };
    let work: usize = busy.iter().map(|(e, rows)| rows.len() * 3 * e.gate.out * e.gate.cols).sum();
    let results: Vec<Vec<f32>> = if busy.len() < 2 || team.parts(work) == 1 {
        busy.iter().map(one).collect()
    } else {
        team.install(|| busy.par_iter().with_max_len(1).map(one).collect())
    };
    // Experts come in ascending id, so every row adds its own in that order.
    let mut out = Tensor::zeros(x.rows, x.width);
    for ((_, rows), result) in busy.iter().zip(&results) {
        for ((row, weight), result) in rows.iter().zip(result.chunks_exact(x.width)) {
            for (out, value) in out.data[row * x.width..].iter_mut().zip(result) {
                *out += weight * value;
            }
        }
    }
    out
}
