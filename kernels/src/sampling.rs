//! From logits to a token: what is asked for and what comes back.

mod adjust;
mod filter;
#[cfg(test)]
mod tests;

pub use adjust::{Adjustments, Penalties};

/// How the next token of one row is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleRequest {
    /// Row of the logits.
    pub row: usize,
    /// 0 is greedy (ties: the lower id).
    pub temperature: f32,
    /// Smallest set of most likely tokens whose probability reaches this; 1 is off.
    pub top_p: f32,
    /// Most likely tokens kept; 0 is off.
    pub top_k: usize,
    /// Tokens less likely than this share of the most likely one are dropped; 0 is off.
    pub min_p: f32,
    /// With `draw`, fixes the random number: the same pair gives the same token on any pipeline.
    pub seed: u64,
    /// Index of the token in the generated text.
    pub draw: u64,
    /// How many most likely tokens to report beside the chosen one.
    pub logprobs: Option<usize>,
    /// Tokens that may not be chosen.
    pub banned: Vec<u32>,
    /// Changes of the logits before the choice.
    pub adjustments: Adjustments,
}

impl SampleRequest {
    /// Whether the answer is the most likely token and nothing else is asked: a device may find it without the host.
    #[must_use]
    pub fn is_plain_greedy(&self) -> bool {
        self.temperature == 0.0
            && self.logprobs.is_none_or(|n| n == 0)
            && self.banned.is_empty()
            && self.adjustments.is_empty()
    }
}

/// A chosen token. Log-probabilities are those of the model: before temperature and filters.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// The most likely tokens, best first (ties: the lower id).
    pub top: Vec<(u32, f32)>,
}

/// Asks for the log-probability of a given token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreRequest {
    /// Row of the logits.
    pub row: usize,
    /// The token that follows that row.
    pub target: u32,
    /// How many most likely tokens to report.
    pub top: usize,
}

/// Answer to a [`ScoreRequest`].
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// The target.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// The most likely tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// Chooses a token from one row of logits: its [`Adjustments`], temperature, then `top_k`, `top_p` and `min_p`, then the draw.
///
/// Banned tokens and those that the mask does not allow are left out before anything else; when none is left the most likely token is chosen. A NaN logit
/// is never drawn while there is another.
#[must_use]
pub fn sample(logits: &[f32], request: &SampleRequest) -> Sampled {
    let token = filter::choose(&request.adjustments.apply(logits), request);
    let norm = log_sum_exp(logits);
    let logprob = logprob(logits, norm, token);
    let top = request.logprobs.map_or_else(Vec::new, |n| best(logits, norm, n));
    Sampled { token, logprob, top }
}

/// Log-probability of `request.target` in one row of logits; minus infinity for a token outside the vocabulary.
#[must_use]
pub fn score(logits: &[f32], request: &ScoreRequest) -> Scored {
    let norm = log_sum_exp(logits);
    let logprob = logprob(logits, norm, request.target);
    Scored { token: request.target, logprob, top: best(logits, norm, request.top) }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    if max == f64::NEG_INFINITY {
        return max;
    }
    max + logits.iter().map(|l| (f64::from(*l) - max).exp()).sum::<f64>().ln()
}

fn logprob(logits: &[f32], norm: f64, token: u32) -> f32 {
    logits.get(token as usize).map_or(f32::NEG_INFINITY, |l| (f64::from(*l) - norm) as f32)
}

fn best(logits: &[f32], norm: f64, n: usize) -> Vec<(u32, f32)> {
    if n == 0 {
        return Vec::new();
    }
    let mut all: Vec<(u32, f32)> = logits.iter().enumerate().map(|(i, l)| (i as u32, *l)).collect();
    filter::keep_best(&mut all, n);
    all.into_iter().map(|(id, _)| (id, logprob(logits, norm, id))).collect()
}
