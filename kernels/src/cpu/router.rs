//! From router scores to experts and their weights.

use super::tensor::Tensor;
use super::topk::order;
use crate::backend::RouterParams;

/// Experts and weights of every row, ascending expert id.
#[derive(Clone, Debug, PartialEq)]
pub struct Routes {
    pub(crate) rows: Vec<Vec<(u32, f32)>>,
}

/// Chooses for every row of router outputs `[rows, experts]` (before the sigmoid).
pub(crate) fn route(outputs: &Tensor, bias: &[f32], params: &RouterParams) -> Routes {
    Routes { rows: (0..outputs.rows).map(|r| choose(outputs.row(r), bias, params)).collect() }
}

fn choose(outputs: &[f32], bias: &[f32], params: &RouterParams) -> Vec<(u32, f32)> {
    let scores: Vec<f32> = outputs.iter().map(|v| 1.0 / (1.0 + (-v).exp())).collect();
    let biased: Vec<f32> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
    let group_size = (scores.len() / params.groups.max(1)).max(1);
    let mut candidates: Vec<usize> = (0..scores.len()).collect();
    if params.groups > 1 && params.topk_groups < params.groups {
        let of_group = |group: &[f32]| {
            let mut best = group.to_vec();
            best.sort_by_key(|b| !order(*b));
            best.iter().take(2).sum::<f32>()
        };
        let group_scores: Vec<f32> = biased.chunks(group_size).map(of_group).collect();
        let mut groups: Vec<usize> = (0..group_scores.len()).collect();
        groups.sort_by_key(|g| (!order(group_scores[*g]), *g));
        groups.truncate(params.topk_groups);
        candidates.retain(|e| groups.contains(&(e / group_size)));
    }
    candidates.sort_unstable_by_key(|e| (!order(biased[*e]), *e));
    candidates.truncate(params.experts_per_token);
    candidates.sort_unstable();
    let sum: f32 = candidates.iter().map(|e| scores[*e]).sum();
    let factor = if params.normalise { params.scaling / (sum + 1e-20) } else { params.scaling };
    candidates.into_iter().map(|e| (e as u32, scores[e] * factor)).collect()
}
