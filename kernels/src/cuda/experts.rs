//! Router and routed experts on the device.

use super::device::{Device, launch};
use super::memory::Memory;
use super::tensor::{Element, Tensor};
use super::weight::{Vector, Weight, mismatch};
use crate::backend::{ExpertMatrices, KernelError, MatrixView, RouterParams};

/// Experts that the router's shared memory holds.
const MOST_EXPERTS: usize = 1024;

/// All routed experts of a layer: each of the three is `[experts][rows][cols]`.
#[derive(Debug)]
pub struct Experts {
    gate: Weight,
    up: Weight,
    down: Weight,
}

/// Chosen experts, ascending, and their weights, `[rows][chosen]`.
#[derive(Debug)]
pub struct Routes {
    rows: usize,
    chosen: usize,
    ids: Memory,
    weights: Memory,
}

impl Experts {
    pub(crate) fn new(
        device: &Device,
        experts: &[ExpertMatrices<'_>],
    ) -> Result<Self, KernelError> {
        let Some(first) = experts.first() else {
            return Err(mismatch("routed experts", "at least one".to_owned(), "none".to_owned()));
        };
        if experts.len() > MOST_EXPERTS {
            return Err(mismatch(
                "routed experts",
                format!("at most {MOST_EXPERTS}"),
                experts.len().to_string(),
            ));
        }
        let (width, hidden) = (first.gate.rows, first.gate.cols);
        let gates: Vec<MatrixView<'_>> = experts.iter().map(|e| e.gate).collect();
        let ups: Vec<MatrixView<'_>> = experts.iter().map(|e| e.up).collect();
        let downs: Vec<MatrixView<'_>> = experts.iter().map(|e| e.down).collect();
        Ok(Self {
            gate: Weight::stack(device, "expert gate_proj", width, hidden, &gates)?,
            up: Weight::stack(device, "expert up_proj", width, hidden, &ups)?,
            down: Weight::stack(device, "expert down_proj", hidden, width, &downs)?,
        })
    }

    /// `sum_j weight_j * expert_j(x)` per row, in ascending expert id.
    pub(crate) fn run(&self, device: &Device, routes: &Routes, x: &Tensor) -> Tensor {
        let (width, hidden) = (self.gate.rows, self.gate.cols);
        let assignments = routes.rows * routes.chosen;
        let mid = Tensor::new(device, assignments, width, Element::F32);
        let out = Tensor::new(device, routes.rows, hidden, x.element);
        let chosen = routes.chosen as i32;
        launch!(device, x.element.pick("experts_gated_f32", "experts_gated_bf16"), (width.div_ceil(4), assignments), 128, 0;
            self.gate.matrix(), self.up.matrix(), routes.ids.at(0), x.at(), mid.at(), chosen);
        launch!(device, x.element.pick("experts_down_f32", "experts_down_bf16"), (hidden.div_ceil(4), routes.rows), 128, 0;
            self.down.matrix(), routes.ids.at(0), routes.weights.at(0), mid.at(), out.at(), chosen);
        out
    }
}

/// Chooses experts by logits f32 `[rows, experts]`.
pub(crate) fn route(
    device: &Device,
    logits: &Tensor,
    bias: &Vector,
    params: &RouterParams,
) -> Routes {
    let (rows, chosen) = (logits.rows, params.experts_per_token);
    let part = |bytes| Memory::part(device, "a step's routes", bytes);
    let routes =
        Routes { rows, chosen, ids: part(rows * chosen * 4), weights: part(rows * chosen * 4) };
    launch!(device, "route", rows, 32, 0;
        logits.at(), bias.0.at(0), routes.ids.at(0), routes.weights.at(0), logits.width as i32, chosen as i32,
        params.groups as i32, params.topk_groups as i32, i32::from(params.normalise), params.scaling);
    routes
}
