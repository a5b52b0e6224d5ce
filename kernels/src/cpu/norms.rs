//! RMSNorm and LayerNorm of one row, in f32.

/// Sum of `value(x)` in sixteen interleaved partial sums folded in a fixed order: the order depends on the width alone.
fn sum(x: &[f32], value: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0_f32; 16];
    let chunks = x.chunks_exact(16);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += value(*x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += value(*x);
    }
    lanes.iter().sum()
}

/// `x / sqrt(mean(x^2) + eps) * weight`, written to `to`.
pub(crate) fn rms(x: &[f32], weight: &[f32], eps: f32, to: &mut [f32]) {
    let mean = sum(x, |v| v * v) / x.len() as f32;
    let inverse = 1.0 / (mean + eps).sqrt();
    for ((to, x), weight) in to.iter_mut().zip(x).zip(weight) {
        *to = x * inverse * weight;
    }
}

/// `(x - mean) / sqrt(var + eps) * weight + bias`, written to `to`; the variance is the biased one.
pub(crate) fn layer(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, to: &mut [f32]) {
    let mean = sum(x, |v| v) / x.len() as f32;
    let variance = sum(x, |v| (v - mean) * (v - mean)) / x.len() as f32;
    let inverse = 1.0 / (variance + eps).sqrt();
    for (((to, x), weight), bias) in to.iter_mut().zip(x).zip(weight).zip(bias) {
        *to = (x - mean) * inverse * weight + bias;
    }
}
