//! Temperature, filters and the draw.

use std::cmp::Ordering;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::SampleRequest;

/// Better first: higher logit, then lower id; NaN last, -0 equal to +0.
pub(super) fn better(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    let by_logit = match (a.1.is_nan(), b.1.is_nan()) {
        (false, false) => b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal),
        (a_nan, b_nan) => a_nan.cmp(&b_nan),
    };
    by_logit.then(a.0.cmp(&b.0))
}

/// Keeps the `k` best, best first.
pub(super) fn keep_best(candidates: &mut Vec<(u32, f32)>, k: usize) {
    if k == 0 {
        candidates.clear();
    } else if k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, better);
        candidates.truncate(k);
    }
    candidates.sort_unstable_by(better);
}

/// The token a request draws from `logits`.
pub(super) fn choose(logits: &[f32], request: &SampleRequest) -> u32 {
    let all = || logits.iter().enumerate().map(|(id, l)| (id as u32, *l));
    let mut banned = request.banned.clone();
    banned.sort_unstable();
    let mut candidates: Vec<(u32, f32)> = if banned.is_empty() && request.adjustments.is_empty() {
        all().collect()
    } else {
        let free = |id: u32| request.adjustments.allows(id) && banned.binary_search(&id).is_err();
        all().filter(|(id, _)| free(*id)).collect()
    };
    let Some(best) = candidates.iter().min_by(|a, b| better(a, b)).copied() else {
        // No token is allowed: there is nothing to obey, so the model's own choice stands.
        return all().min_by(better).map_or(0, |(id, _)| id);
    };
    // Nothing to draw from when the best is not finite: all are impossible, or one is certain.
    if request.temperature <= 0.0 || !best.1.is_finite() {
        return best.0;
    }
    candidates.retain(|(_, logit)| !logit.is_nan());
    if request.top_k > 0 {
        keep_best(&mut candidates, request.top_k);
    }
    let temperature = f64::from(request.temperature);
    let weight = |logit: f32| (f64::from(logit - best.1) / temperature).exp();
    if request.top_p < 1.0 {
        if request.top_k == 0 {
            candidates.sort_unstable_by(better);
        }
        let total: f64 = candidates.iter().map(|(_, l)| weight(*l)).sum();
        let enough = f64::from(request.top_p) * total;
        let mut reached = 0.0;
        let mut kept = 0;
        for (_, logit) in &candidates {
            kept += 1;
            reached += weight(*logit);
            if reached >= enough {
                break;
            }
        }
        candidates.truncate(kept);
    }
    if request.min_p > 0.0 {
        // The best token weighs 1.
        let least = f64::from(request.min_p);
        candidates.retain(|(id, logit)| *id == best.0 || weight(*logit) >= least);
    }
    let total: f64 = candidates.iter().map(|(_, l)| weight(*l)).sum();
    let mut left = uniform(request.seed, request.draw) * total;
    for (id, logit) in &candidates {
        left -= weight(*logit);
        if left < 0.0 {
            return *id;
        }
    }
    // Rounding left a remainder after the last candidate that can be drawn.
    candidates.iter().rev().find(|(_, l)| weight(*l) > 0.0).map_or(best.0, |(id, _)| *id)
}

/// A number in `[0, 1)` that `(seed, draw)` fixes.
fn uniform(seed: u64, draw: u64) -> f64 {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&draw.to_le_bytes());
    let bits = ChaCha8Rng::from_seed(key).next_u64() >> 11;
    bits as f64 / (1_u64 << 53) as f64
}
