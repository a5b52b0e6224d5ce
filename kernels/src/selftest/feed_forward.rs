//! Dense and routed feed-forward layers.

use super::Bench;
use super::values::Stored;
use crate::backend::{Backend, ExpertMatrices, KernelError, RouterParams};

pub(super) fn check<B: Backend>(bench: &mut Bench<'_, B>) -> Result<(), KernelError> {
    for (rows, hidden, width, stored) in [
        (3, 64, 40, Stored::F32),
        (9, 100, 36, Stored::Bf16),
        (1, 512, 256, Stored::Fp8(128)),
        (33, 512, 256, Stored::Fp8(128)),
    ] {
        dense(bench, rows, hidden, width, stored)?;
    }
    let plain = RouterParams {
        experts_per_token: 3,
        groups: 1,
        topk_groups: 1,
        normalise: true,
        scaling: 2.5,
    };
    routed(bench, 7, 64, 24, 12, Stored::F32, &plain)?;
    let grouped = RouterParams { groups: 4, topk_groups: 2, normalise: false, ..plain };
    routed(bench, 7, 64, 24, 16, Stored::Bf16, &grouped)?;
    // GLM's router over 256 experts; small experts, so that the reference is done soon.
    let glm = RouterParams { experts_per_token: 8, ..plain };
    let rows: &[usize] = if bench.full { &[1, 5, 128, 300] } else { &[5] };
    for &rows in rows {
        routed(bench, rows, 256, 128, 256, Stored::Fp8(128), &glm)?;
    }
    // The full width of an expert, few of them.
    if bench.full {
        routed(bench, 2, 6144, 2048, 8, Stored::Fp8(128), &glm)?;
    }
    Ok(())
}

fn dense<B: Backend>(
    bench: &mut Bench<'_, B>,
    rows: usize,
    hidden: usize,
    width: usize,
    stored: Stored,
) -> Result<(), KernelError> {
    let matrices = [(width, hidden), (width, hidden), (hidden, width)]
        .map(|(rows, cols)| bench.values.matrix(rows, cols, stored));
    let [gate, up, down] = &matrices;
    let (device, cpu) = (bench.device, &bench.cpu);
    let (g, u, d) =
        (device.weight(gate.view())?, device.weight(up.view())?, device.weight(down.view())?);
    let (cg, cu, cd) = (cpu.weight(gate.view())?, cpu.weight(up.view())?, cpu.weight(down.view())?);
    let (x, cx) = bench.tensors(rows, hidden);
    let found = device.swiglu(&g, &u, &d, &x);
    let expected = bench.cpu.swiglu(&cg, &cu, &cd, &cx);
    let case = format!("{rows} x {hidden}, width {width}, {stored:?}");
    let bound = bound(bench, stored);
    bench.compare("swiglu", case, &found, &expected, bound);
    Ok(())
}

fn routed<B: Backend>(
    bench: &mut Bench<'_, B>,
    rows: usize,
    hidden: usize,
    width: usize,
    count: usize,
    stored: Stored,
    params: &RouterParams,
) -> Result<(), KernelError> {
    let router = bench.values.matrix(count, hidden, Stored::Bf16);
    // The correction bias lies near 7 in real checkpoints.
    let bias: Vec<f32> = bench.values.take(count).iter().map(|v| 7.0 + 0.1 * v).collect();
    let matrices: Vec<_> = (0..count)
        .map(|_| {
            [(width, hidden), (width, hidden), (hidden, width)]
                .map(|(rows, cols)| bench.values.matrix(rows, cols, stored))
        })
        .collect();
    let views: Vec<ExpertMatrices<'_>> = matrices
        .iter()
        .map(|[gate, up, down]| ExpertMatrices {
            gate: gate.view(),
            up: up.view(),
            down: down.view(),
        })
        .collect();
    let (device, cpu) = (bench.device, &bench.cpu);
    let (experts, cexperts) = (device.experts(&views)?, cpu.experts(&views)?);
    let (gate, cgate) = (device.weight(router.view())?, cpu.weight(router.view())?);
    let (vector, cvector) = (device.vector(&bias)?, cpu.vector(&bias)?);
    let (x, cx) = bench.tensors(rows, hidden);
    let routes = bench.device.route(&gate, &vector, &x, params);
    let croutes = bench.cpu.route(&cgate, &cvector, &cx, params);
    let found = bench.device.run_experts(&experts, &routes, &x);
    let expected = bench.cpu.run_experts(&cexperts, &croutes, &cx);
    let case = format!(
        "{rows} x {hidden}, {} of {count} experts of {width} in {} groups, {stored:?}",
        params.experts_per_token, params.groups
    );
    let bound = bound(bench, stored);
    bench.compare("route + run_experts", case, &found, &expected, bound);
    Ok(())
}

fn bound<B: Backend>(bench: &Bench<'_, B>, stored: Stored) -> f64 {
    match stored {
        Stored::Fp8(_) => bench.precision.fp8_bound,
        _ => bench.precision.bound,
    }
}
