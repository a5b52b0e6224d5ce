//! Row-wise operations and linear layers.

use super::values::Stored;
use super::{Bench, values};
use crate::backend::{Backend, KernelError};
use crate::cpu::CpuBackend;
use crate::sampling::{SampleRequest, ScoreRequest};

pub(super) fn check<B: Backend>(bench: &mut Bench<'_, B>) -> Result<(), KernelError> {
    for (rows, width) in [(1, 64), (5, 100), (33, 6144)] {
        stream(bench, rows, width)?;
    }
    let plain = [Stored::F32, Stored::Bf16, Stored::F16, Stored::Fp8(16)];
    for (rows, out, cols) in [(1, 40, 96), (3, 17, 33), (37, 130, 256)] {
        for stored in plain {
            linear(bench, rows, out, cols, stored)?;
        }
    }
    // Shapes of GLM-5: one token, a decode batch, a prefill chunk; a last block of 64 rows.
    let rows: &[usize] = if bench.full { &[1, 8, 32, 100, 128, 300] } else { &[3] };
    for &rows in rows {
        linear(bench, rows, 576, 6144, Stored::Fp8(128))?;
        linear(bench, rows, 2048, 6144, Stored::Fp8(128))?;
    }
    let rows: &[usize] = if bench.full { &[1, 17, 128] } else { &[2] };
    for &rows in rows {
        linear(bench, rows, 256, 6144, Stored::Bf16)?;
    }
    ends(bench)
}

fn stream<B: Backend>(
    bench: &mut Bench<'_, B>,
    rows: usize,
    width: usize,
) -> Result<(), KernelError> {
    let case = || format!("{rows} x {width}");
    let bound = bench.precision.bound;
    let (x, cx) = bench.tensors(rows, width);
    let weight = bench.values.take(width);
    let found = bench.device.rms_norm(&x, &bench.device.vector(&weight)?, 1e-5);
    let expected = bench.cpu.rms_norm(&cx, &bench.cpu.vector(&weight)?, 1e-5);
    bench.compare("rms_norm", case(), &found, &expected, bound);
    let (mut x, mut cx) = bench.tensors(rows, width);
    let (delta, cdelta) = bench.tensors(rows, width);
    let dtype = bench.precision.dtype;
    bench.device.add(&mut x, &delta, dtype);
    bench.cpu.add(&mut cx, &cdelta, dtype);
    // One addition, rounded once on both: not a bit may differ.
    bench.compare("add", case(), &x, &cx, 0.0);
    bench.device.accumulate(&mut x, &delta);
    bench.cpu.accumulate(&mut cx, &cdelta);
    bench.compare("accumulate", case(), &x, &cx, bound);
    let picked: Vec<usize> = (0..rows).rev().step_by(2).collect();
    let (found, expected) =
        (bench.device.gather(&delta, &picked), bench.cpu.gather(&cdelta, &picked));
    bench.compare("gather", case(), &found, &expected, 0.0);
    let bytes = values::bytes(&bench.values.take(rows * width), dtype);
    let there = bench.device.import(&bytes, rows, width, dtype);
    let back = bench.device.export(&there, dtype);
    bench.compare_lines("export", case(), &back, &bytes, width);
    Ok(())
}

fn linear<B: Backend>(
    bench: &mut Bench<'_, B>,
    rows: usize,
    out: usize,
    cols: usize,
    stored: Stored,
) -> Result<(), KernelError> {
    let case = format!("{rows} x {cols} -> {out}, {stored:?}");
    let bound = match stored {
        Stored::Fp8(128) => bench.precision.fp8_bound,
        _ => bench.precision.bound,
    };
    let matrix = bench.values.matrix(out, cols, stored);
    let (weight, cweight) = (bench.device.weight(matrix.view())?, bench.cpu.weight(matrix.view())?);
    let (x, cx) = bench.tensors(rows, cols);
    let (found, expected) = (bench.device.linear(&weight, &x), bench.cpu.linear(&cweight, &cx));
    bench.compare("linear", case.clone(), &found, &expected, bound);
    if !matches!(stored, Stored::Fp8(_)) {
        let found = bench.device.linear_f32(&weight, &x);
        // The result is not rounded: what is left is the order of the sums.
        bench.compare("linear_f32", case, &found, &expected, 1e-5);
    }
    Ok(())
}

/// Embedding, sampling and scoring.
fn ends<B: Backend>(bench: &mut Bench<'_, B>) -> Result<(), KernelError> {
    for stored in [Stored::F32, Stored::Bf16] {
        let matrix = bench.values.matrix(500, 96, stored);
        let (table, ctable) =
            (bench.device.weight(matrix.view())?, bench.cpu.weight(matrix.view())?);
        let ids = bench.values.below(13, 500);
        let found = bench.device.embed(&table, &ids, 3);
        let expected = bench.cpu.embed(&ctable, &ids, 3);
        let bound = bench.precision.bound;
        bench.compare("embed", format!("13 + 3 of 500 x 96, {stored:?}"), &found, &expected, bound);
    }
    for vocab in if bench.full { [1000, 154_880] } else { [10, 1000] } {
        let rows = 5;
        let mut matrix = bench.values.matrix(vocab, 64, Stored::Bf16);
        // Two equal best ones for some row or other: the lower id wins.
        matrix.repeat_row(1, 7);
        let (head, chead) = (bench.device.weight(matrix.view())?, bench.cpu.weight(matrix.view())?);
        let (x, cx) = bench.tensors(rows, 64);
        let logits = (bench.device.linear_f32(&head, &x), bench.cpu.linear_f32(&chead, &cx));
        let (found, expected) = sampled(bench, &logits.0, &logits.1, rows, vocab);
        bench.compare_lines("sample", format!("{rows} x {vocab}"), &found.0, &expected.0, 1);
        bench.compare_lines("score", format!("{rows} x {vocab}"), &found.1, &expected.1, 1);
    }
    Ok(())
}

/// Tokens of greedy and drawn requests, and log-probabilities to 3 decimals, on both sides.
type Answers = (Vec<u32>, Vec<i64>);

fn sampled<B: Backend>(
    bench: &Bench<'_, B>,
    x: &B::Tensor,
    cx: &<CpuBackend as Backend>::Tensor,
    rows: usize,
    vocab: usize,
) -> (Answers, Answers) {
    let request = |row: usize, temperature: f32| SampleRequest {
        row,
        temperature,
        top_p: 0.9,
        top_k: 40,
        min_p: 0.0,
        seed: 11,
        draw: row as u64,
        logprobs: None,
        banned: Vec::new(),
        adjustments: Default::default(),
    };
    let greedy: Vec<SampleRequest> = (0..rows).map(|row| request(row, 0.0)).collect();
    let drawn: Vec<SampleRequest> = (0..rows).map(|row| request(row, 0.8)).collect();
    let score = |row: usize| ScoreRequest { row, target: (row * 31 % vocab) as u32, top: 0 };
    let scores: Vec<ScoreRequest> = (0..rows).map(score).collect();
    let round = |v: f32| (f64::from(v) * 1e3).round() as i64;
    let mut found: Answers = (Vec::new(), Vec::new());
    let mut expected: Answers = (Vec::new(), Vec::new());
    for requests in [&greedy, &drawn] {
        for s in bench.device.sample(x, requests) {
            found.0.push(s.token);
            found.1.push(round(s.logprob));
        }
        for s in bench.cpu.sample(cx, requests) {
            expected.0.push(s.token);
            expected.1.push(round(s.logprob));
        }
    }
    found.1.extend(bench.device.score(x, &scores).iter().map(|s| round(s.logprob)));
    expected.1.extend(bench.cpu.score(cx, &scores).iter().map(|s| round(s.logprob)));
    (found, expected)
}
