use super::*;
use crate::cpu::gemm::{Left, Product, Right};
use crate::cpu::simd::{Kernel, Lane, Width};
use crate::cpu::tensor::LANES;

/// A matrix in every stored type, each with the values it stands for.
fn stored(rows: usize, cols: usize, seed: u64) -> Vec<(Weight, Vec<f32>)> {
    let backend = cpu(1);
    let mut values = Values::new(seed);
    let plain = values.take(rows * cols);
    let b: Vec<bf16> = plain.iter().map(|v| bf16::from_f32(*v)).collect();
    let h: Vec<f16> = plain.iter().map(|v| f16::from_f32(*v)).collect();
    let view = |data| MatrixView { rows, cols, data };
    let (block_rows, block_cols) = (12, 5);
    let wide = cols.div_ceil(block_cols);
    let scales: Vec<f32> =
        values.take(rows.div_ceil(block_rows) * wide).iter().map(|v| v + 1.5).collect();
    let codes: Vec<u8> = (0..rows * cols)
        .map(|i| (i as u32 * 97 % 256) as u8)
        .map(|c| if c & 127 == 127 { 3 } else { c })
        .collect();
    let fp8 = |code: u8| {
        let sign = if code > 127 { -1.0 } else { 1.0 };
        let (e, m) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
        sign * if e == 0 { m * 2_f32.powi(-6) } else { (1.0 + m) * 2_f32.powi(e - 7) }
    };
    let fp8_values = codes
        .iter()
        .enumerate()
        .map(|(at, c)| fp8(*c) * scales[at / cols / block_rows * wide + at % cols / block_cols])
        .collect();
    let raw = bytes(&plain);
    let raw_b: Vec<u8> = b.iter().flat_map(|v| v.to_le_bytes()).collect();
    let raw_h: Vec<u8> = h.iter().flat_map(|v| v.to_le_bytes()).collect();
    let raw_scales = bytes(&scales);
    let coded = MatrixData::Fp8Block { codes: &codes, scales: &raw_scales, block_rows, block_cols };
    vec![
        (backend.weight(view(MatrixData::F32(&raw))).unwrap(), plain),
        (
            backend.weight(view(MatrixData::Bf16(&raw_b))).unwrap(),
            b.iter().map(|v| v.to_f32()).collect(),
        ),
        (
            backend.weight(view(MatrixData::F16(&raw_h))).unwrap(),
            h.iter().map(|v| v.to_f32()).collect(),
        ),
        (backend.weight(view(coded)).unwrap(), fp8_values),
    ]
}

#[test]
fn a_product_is_the_sum_of_products_in_every_stored_type() {
    let backend = cpu(2);
    for (rows, out, cols) in [(1, 1, 1), (3, 17, 5), (9, 47, 129), (13, 130, 67), (37, 33, 200)] {
        let x = Values::new(9).tensor(rows, cols);
        for (weight, values) in stored(out, cols, 4) {
            let y = backend.linear(&weight, &x);
            for r in 0..rows {
                for o in 0..out {
                    let w = &values[o * cols..(o + 1) * cols];
                    let terms = x.row(r).iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
                    let size: f64 = terms.clone().map(f64::abs).sum();
                    let expected: f64 = terms.sum();
                    let error = (f64::from(y.row(r)[o]) - expected).abs();
                    assert!(error <= 1e-5 * (1e-3 + size), "{rows} {out} {cols}: {error}");
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_among_others_and_on_any_number_of_threads() {
    let (one, many) = (cpu(1), cpu(3));
    // Large enough that the pool takes part in all but the rows alone.
    for (weight, _) in stored(613, 331, 1) {
        let x = Values::new(2).tensor(70, 331);
        let whole = one.linear(&weight, &x);
        assert_eq!(many.linear(&weight, &x), whole);
        for rows in [1, 2, 3, 4, 5, 7, 8, 13, 31] {
            let first = 70 - rows;
            let some = one.gather(&x, &(first..70).collect::<Vec<_>>());
            for backend in [&one, &many] {
                let y = backend.linear(&weight, &some);
                assert_eq!(y.data, whole.data[first * 613..], "{rows} rows");
            }
        }
    }
}

#[test]
fn a_product_is_one_chain_of_fused_scalars() {
    let (rows, out, cols) = (11, 40, 77);
    let x = Values::new(5).tensor(rows, cols);
    for (weight, values) in stored(out, cols, 6) {
        let y = cpu(1).linear(&weight, &x);
        for r in 0..rows {
            for o in 0..out {
                let chain = |sum: f32, (x, w): (&f32, &f32)| x.mul_add(*w, sum);
                let expected = x.row(r).iter().zip(&values[o * cols..]).fold(0.0, chain);
                assert_eq!(y.row(r)[o].to_bits(), expected.to_bits());
            }
        }
    }
}

/// Every operation of a lane, once.
struct Operations<'a> {
    inputs: [&'a [f32; LANES]; 3],
    out: &'a mut Vec<u32>,
}

impl Kernel for Operations<'_> {
    #[inline(always)]
    fn run<L: Lane>(self) {
        let [a, b, c] = self.inputs.map(L::load);
        for value in [a.fma(b, c), a.mul(b), a.relu(), L::splat(self.inputs[0][3])] {
            let mut lanes = [0.0; LANES];
            value.store(&mut lanes);
            // Which NaN it is may differ.
            self.out.extend(lanes.map(|v| if v.is_nan() { f32::NAN } else { v }.to_bits()));
        }
        self.out.push(b.sum().to_bits());
    }
}

#[test]
fn lanes_of_every_width_agree_to_the_bit() {
    let mut values = Values::new(9);
    let inputs = [0; 3].map(|_| {
        let mut lanes: [f32; LANES] = values.tensor(1, LANES).data.try_into().unwrap();
        // What the comparison in `relu` could get wrong.
        lanes[1] = -0.0;
        lanes
    });
    let mut with_nan = inputs[0];
    with_nan[5] = f32::NAN;
    let (rows, inner, cols) = (23, 37, 5 * LANES - 3);
    let left = values.tensor(rows, inner);
    let right = values.tensor(cols.div_ceil(LANES), inner * LANES);
    let results: Vec<_> = Width::available()
        .map(|width| {
            let mut out = Vec::new();
            width.run(Operations { inputs: [&with_nan, &inputs[1], &inputs[2]], out: &mut out });
            assert!(f32::from_bits(out[2 * LANES + 5]).is_nan(), "a NaN stays");
            let mut product = vec![0.0; rows * cols];
            for resume in [false, true] {
                width.run(Product {
                    left: Left { data: &left.data, row: inner, step: 1 },
                    right: Right { data: &right.data, panel: inner * LANES, step: LANES },
                    rows,
                    inner,
                    cols,
                    out: &mut product,
                    stride: cols,
                    resume,
                });
            }
            out.extend(product.iter().map(|v| v.to_bits()));
            (width, out)
        })
        .collect();
    // On a processor without vectors there is one width, and nothing to compare it with.
    for (width, result) in &results {
        assert_eq!(result, &results[0].1, "{width:?} and {:?}", results[0].0);
    }
}

#[test]
fn embedding_rows_are_the_stored_values_and_padding_is_zero() {
    let backend = cpu(1);
    for (weight, values) in stored(19, 7, 3) {
        let x = backend.embed(&weight, &[18, 0, 16], 2);
        assert_eq!(backend.shape(&x), (5, 7));
        for (row, id) in [18, 0, 16].into_iter().enumerate() {
            assert_eq!(x.row(row), &values[id * 7..(id + 1) * 7]);
        }
        assert!(x.data[3 * 7..].iter().all(|v| *v == 0.0));
    }
}

#[test]
fn wrong_sizes_are_named() {
    let backend = cpu(1);
    let view = |data| MatrixView { rows: 2, cols: 3, data };
    let error = backend.weight(view(MatrixData::Bf16(&[0; 11]))).unwrap_err();
    assert_eq!(error.to_string(), "bf16 matrix: expected 2 x 3 values of 2 bytes, found 11 bytes");
    let short =
        MatrixData::Fp8Block { codes: &[0; 6], scales: &[0; 4], block_rows: 1, block_cols: 3 };
    assert!(backend.weight(view(short)).is_err());
    assert!(backend.absorbed(view(MatrixData::F32(&[0; 24])), 2, 1, 1).is_err());
    assert!(CpuBackend::new(CpuOptions { threads: Some(0) }).is_err());
}

#[test]
fn the_exponential_is_exact_to_two_units() {
    for i in -8_600..8_700 {
        let x = i as f32 / 100.0;
        let expected = f64::from(x).exp();
        let error = (f64::from(simd::exp(x)) - expected).abs() / expected;
        assert!(error < 2.4e-7, "e^{x}: {error}");
    }
    assert!(simd::exp(f32::NAN).is_nan());
    assert!(simd::exp(f32::NEG_INFINITY) < 1e-37);
}

#[test]
fn values_survive_export_and_rounding_follows_every_addition() {
    let backend = cpu(1);
    let x = Values::new(8).tensor(3, 5);
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let mut sum = Tensor::zeros(3, 5);
        backend.add(&mut sum, &x, dtype);
        let back = backend.import(&backend.export(&sum, dtype), 3, 5, dtype);
        assert_eq!(back, sum, "{dtype:?}");
    }
}

#[test]
fn norms_match_their_formulas() {
    let backend = cpu(1);
    let mut values = Values::new(11);
    let (x, w) = (values.tensor(2, 37), values.take(37));
    let y = backend.rms_norm(&x, &Vector(w.clone()), 1e-5);
    for r in 0..2 {
        let mean = x.row(r).iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 37.0;
        for ((x, w), y) in x.row(r).iter().zip(&w).zip(y.row(r)) {
            let expected = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*w);
            close(*y, expected, 1e-6);
        }
    }
}

#[test]
fn rotation_keeps_places_in_both_layouts() {
    let backend = cpu(1);
    let rope = table(2);
    let x = Values::new(1).tensor(1, 12);
    let batch = sequence(5, 1, 4, 0);
    for layout in [RopeLayout::Interleaved, RopeLayout::HalfSplit] {
        let mut y = x.clone();
        backend.rope(&mut y, &batch, &rope, layout, 2, 6, 1);
        let mut expected: Vec<f64> = x.data.iter().map(|v| f64::from(*v)).collect();
        for head in [0, 6] {
            for (i, freq) in [1.0, 0.01].into_iter().enumerate() {
                let (a, b) = match layout {
                    RopeLayout::Interleaved => (2 * i, 2 * i + 1),
                    RopeLayout::HalfSplit => (i, i + 2),
                };
                let (a, b) = (head + 1 + a, head + 1 + b);
                let (sin, cos) = f64::sin_cos(5.0 * freq);
                let (va, vb) = (expected[a], expected[b]);
                expected[a] = va * cos - vb * sin;
                expected[b] = va * sin + vb * cos;
            }
        }
        y.data.iter().zip(expected).for_each(|(y, e)| close(*y, e, 1e-6));
    }
}
