//! The best positions by score, in a total order that every device can repeat.

/// Maps a score to an integer that grows with it: NaN lowest, -0 equal to +0.
pub(crate) fn order(score: f32) -> u32 {
    if score.is_nan() {
        return 0;
    }
    // Adding zero turns -0 into +0.
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// Appends to `chosen`, ascending, the `k` best positions of `scores`: higher score, then lower position, NaN last.
/// `scratch` is working memory.
pub(crate) fn top_k(scores: &[f32], k: usize, scratch: &mut Vec<u64>, chosen: &mut Vec<u32>) {
    scratch.clear();
    let key = |(at, score): (usize, &f32)| u64::from(!order(*score)) << 32 | at as u64;
    scratch.extend(scores.iter().enumerate().map(key));
    if k < scratch.len() && k > 0 {
        scratch.select_nth_unstable(k - 1);
    }
    scratch.truncate(k);
    let first = chosen.len();
    chosen.extend(scratch.iter().map(|key| *key as u32));
    chosen[first..].sort_unstable();
}
