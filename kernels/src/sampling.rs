//! From logits to a token: what is asked for and what comes back.

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
