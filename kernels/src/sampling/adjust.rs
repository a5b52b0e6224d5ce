//! What a request changes about the logits of its row before a token is chosen.

use std::borrow::Cow;

/// Changes of one row's logits, in this order: the mask, `bias`, `penalties`. Nothing by default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Adjustments {
    /// Tokens that may be chosen, bit `id % 8` of byte `id / 8`; ids beyond its end may not. `None` allows all.
    pub allowed: Option<Vec<u8>>,
    /// Added to the logits of these tokens.
    pub bias: Vec<(u32, f32)>,
    /// Makes tokens of the text less likely, or more.
    pub penalties: Option<Penalties>,
}

/// How tokens that occur in the text are changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Penalties {
    /// Subtracted once from every generated token; 0 is off.
    pub presence: f32,
    /// Subtracted for every time a token was generated; 0 is off.
    pub frequency: f32,
    /// Divides positive and multiplies negative logits of all tokens of prompt and answer; 1 is off.
    pub repetition: f32,
    /// The distinct tokens of prompt and answer, and how often each was generated (0: only in the prompt).
    pub seen: Vec<(u32, u32)>,
}

impl Adjustments {
    /// Whether the logits stay as they are.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.allowed.is_none() && self.bias.is_empty() && self.penalties.is_none()
    }

    /// Whether this token may be chosen.
    #[must_use]
    pub fn allows(&self, token: u32) -> bool {
        self.allowed.as_ref().is_none_or(|mask| {
            mask.get(token as usize / 8).is_some_and(|byte| byte >> (token % 8) & 1 == 1)
        })
    }

    /// The logits with bias and penalties; ids outside the vocabulary are passed over.
    pub(super) fn apply<'a>(&self, logits: &'a [f32]) -> Cow<'a, [f32]> {
        let mut logits = Cow::Borrowed(logits);
        if self.bias.is_empty() && self.penalties.is_none() {
            return logits;
        }
        let changed = logits.to_mut();
        for &(token, bias) in &self.bias {
            if let Some(logit) = changed.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if let Some(penalties) = &self.penalties {
            for &(token, generated) in &penalties.seen {
                if let Some(logit) = changed.get_mut(token as usize) {
                    *logit = penalties.penalise(*logit, generated);
                }
            }
        }
        logits
    }
}

impl Penalties {
    fn penalise(&self, logit: f32, generated: u32) -> f32 {
        let repeated = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        let present = if generated > 0 { self.presence } else { 0.0 };
        repeated - present - self.frequency * generated as f32
    }
}
