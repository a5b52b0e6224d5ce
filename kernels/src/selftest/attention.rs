//! Rotation, caches, selection and attention.

use super::values::Stored;
use super::{Bench, Check};
use crate::backend::{Backend, Dtype, IndexParams, KernelError, RopeLayout, RopeTable};
use crate::batch::{Batch, Segment};
use crate::cpu::CpuBackend;

/// One model's attention sizes.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    heads: usize,
    nope: usize,
    rope: usize,
    value: usize,
    latent: usize,
    index_heads: usize,
    index_dim: usize,
    topk: usize,
    block: usize,
    layout: RopeLayout,
}

const TINY: Sizes = Sizes {
    heads: 4,
    nope: 24,
    rope: 8,
    value: 20,
    latent: 40,
    index_heads: 16,
    index_dim: 16,
    topk: 8,
    block: 4,
    layout: RopeLayout::HalfSplit,
};

const GLM: Sizes = Sizes {
    heads: 64,
    nope: 192,
    rope: 64,
    value: 256,
    latent: 512,
    index_heads: 32,
    index_dim: 128,
    topk: 2048,
    block: 64,
    layout: RopeLayout::Interleaved,
};

pub(super) fn check<B: Backend>(bench: &mut Bench<'_, B>) -> Result<(), KernelError> {
    // One long sequence, in chunks; then decode rows of several sequences with padding.
    attention(bench, TINY, &[(0, 30), (30, 7), (37, 1)], 0)?;
    attention(bench, TINY, &[(0, 5)], 3)?;
    if bench.full {
        attention(bench, GLM, &[(0, 100), (100, 1)], 0)?;
        attention(bench, GLM, &[(0, 2200), (2200, 3), (2203, 1)], 2)?;
    }
    Ok(())
}

/// Runs the steps of one sequence, given as (start, rows), beside a second, short one; compares every step.
fn attention<B: Backend>(
    bench: &mut Bench<'_, B>,
    sizes: Sizes,
    steps: &[(usize, usize)],
    padding: usize,
) -> Result<(), KernelError> {
    let Sizes { heads, nope, rope, value, latent, index_heads, index_dim, topk, block, layout } =
        sizes;
    let table = RopeTable {
        inv_freq: (0..rope / 2).map(|i| 10_000_f32.powf(-2.0 * i as f32 / rope as f32)).collect(),
        magnitude: 1.0,
    };
    let params = IndexParams { heads: index_heads, head_dim: index_dim, topk };
    let longest = steps.iter().map(|(start, rows)| start + rows).max().unwrap_or(0);
    let blocks = longest.div_ceil(block);
    // The short sequence has the first block, the long one the others in descending order.
    let long_blocks: Vec<u32> = (1..=blocks as u32).rev().collect();
    let (device, total) = (bench.device, blocks + 1);
    let kv_b = bench.values.matrix(heads * (nope + value), latent, Stored::Bf16);
    let absorbed = device.absorbed(kv_b.view(), heads, nope, value)?;
    let cabsorbed = bench.cpu.absorbed(kv_b.view(), heads, nope, value)?;
    let mut latents = device.latent_cache(total, block, latent, rope)?;
    let mut clatents = bench.cpu.latent_cache(total, block, latent, rope)?;
    let mut keys = device.index_cache(total, block, index_dim)?;
    let mut ckeys = bench.cpu.index_cache(total, block, index_dim)?;
    let (norm, weight, bias) =
        (bench.values.take(latent), bench.values.take(index_dim), bench.values.take(index_dim));
    for &(start, rows) in steps {
        let short = usize::from(start > 0);
        let mut segments = vec![Segment { first_row: 0, rows, start, blocks: long_blocks.clone() }];
        if short > 0 {
            segments.push(Segment { first_row: rows, rows: 1, start: start % 3, blocks: vec![0] });
        }
        let batch = Batch { segments, padding, block_size: block };
        let (placed, cplaced) = (device.place(&batch), bench.cpu.place(&batch));
        let all = batch.rows();
        let case = format!("{all} rows at {start}, {heads} heads, top {topk}");

        let (mut queries, mut cqueries) = bench.tensors(all, heads * (nope + rope));
        device.rope(&mut queries, &placed, &table, layout, heads, nope + rope, nope);
        bench.cpu.rope(&mut cqueries, &cplaced, &table, layout, heads, nope + rope, nope);
        let bound = bench.precision.bound;
        bench.compare("rope", case.clone(), &queries, &cqueries, bound);

        let (kv, ckv) = bench.tensors(all, latent + rope);
        device.write_latent(&mut latents, &placed, &kv, &device.vector(&norm)?, 1e-5, &table);
        let cnorm = bench.cpu.vector(&norm)?;
        bench.cpu.write_latent(&mut clatents, &cplaced, &ckv, &cnorm, 1e-5, &table);
        let (key, ckey) = bench.tensors(all, index_dim);
        let vectors = (device.vector(&weight)?, device.vector(&bias)?);
        device.write_index_key(
            &mut keys, &placed, &key, &vectors.0, &vectors.1, 1e-6, &table, layout,
        );
        let cvectors = (bench.cpu.vector(&weight)?, bench.cpu.vector(&bias)?);
        bench.cpu.write_index_key(
            &mut ckeys,
            &cplaced,
            &ckey,
            &cvectors.0,
            &cvectors.1,
            1e-6,
            &table,
            layout,
        );

        let (q, cq) = bench.tensors(all, index_heads * index_dim);
        // Head weights are f32 on every device: a product with one column gives them so.
        let (w, cw) = head_weights(bench, all, index_heads)?;
        let selection = device.select(&keys, &placed, &q, &w, &params);
        let cselection = bench.cpu.select(&ckeys, &cplaced, &cq, &cw, &params);
        let every: Vec<usize> = (0..all).collect();
        let found = device.export_selection(&selection, &every);
        let expected = bench.cpu.export_selection(&cselection, &every);
        overlap(bench, case.clone(), &found, &expected, topk);

        // Both attend to the reference's choice, which also tests the way in from a hand-off.
        let long: Vec<usize> = batch
            .positions()
            .enumerate()
            .filter(|(_, (_, p))| *p >= topk)
            .map(|(row, _)| row)
            .collect();
        let carried = bench.cpu.export_selection(&cselection, &long);
        let imported = device.import_selection(&placed, topk, &carried);
        let back = device.export_selection(&imported, &every);
        bench.compare_lines("import_selection", case.clone(), &back, &expected, topk);
        let scale = 1.0 / ((nope + rope) as f32).sqrt();
        let found =
            device.sparse_attention(&latents, &placed, &queries, &absorbed, &imported, scale);
        let expected = bench.cpu.sparse_attention(
            &clatents,
            &cplaced,
            &cqueries,
            &cabsorbed,
            &cselection,
            scale,
        );
        let real = batch.real_rows();
        let real: Vec<usize> = (0..real).collect();
        let (found, expected) = (device.gather(&found, &real), bench.cpu.gather(&expected, &real));
        let bound = bench.precision.fp8_bound;
        bench.compare("sparse_attention", case, &found, &expected, bound);
    }
    device.check()
}

type CpuTensor = <CpuBackend as Backend>::Tensor;

fn head_weights<B: Backend>(
    bench: &mut Bench<'_, B>,
    rows: usize,
    heads: usize,
) -> Result<(B::Tensor, CpuTensor), KernelError> {
    let matrix = bench.values.matrix(heads, 64, Stored::Bf16);
    let (weight, cweight) = (bench.device.weight(matrix.view())?, bench.cpu.weight(matrix.view())?);
    let (x, cx) = bench.tensors(rows, 64);
    Ok((bench.device.linear_f32(&weight, &x), bench.cpu.linear_f32(&cweight, &cx)))
}

/// Choices are discrete: a near-tie may fall either way where scores are rounded. In f32 not one entry may differ.
fn overlap<B: Backend>(
    bench: &mut Bench<'_, B>,
    case: String,
    found: &[i32],
    expected: &[i32],
    topk: usize,
) {
    let (mut wrong, mut total) = (0, 0);
    for (found, expected) in found.chunks(topk).zip(expected.chunks(topk)) {
        let count = |list: &[i32]| list.iter().take_while(|p| **p >= 0).count();
        total += count(expected);
        let ascending = found.windows(2).all(|pair| pair[1] < 0 || pair[0] < pair[1]);
        if count(found) != count(expected) || !ascending {
            wrong += count(expected).max(1);
            continue;
        }
        let mut at = found.iter().peekable();
        for position in expected.iter().filter(|p| **p >= 0) {
            while at.next_if(|p| **p >= 0 && **p < *position).is_some() {}
            wrong += usize::from(at.peek() != Some(&position));
        }
    }
    let error = wrong as f64 / f64::from(total.max(1) as u32);
    let bound = if bench.precision.dtype == Dtype::F32 { 0.0 } else { bench.precision.fp8_bound };
    bench.checks.push(Check { operation: "select", case, error, bound });
}
