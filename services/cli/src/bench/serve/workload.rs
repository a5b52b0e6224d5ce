//! What is asked, and when: the same for the same seed, however fast the server is.

use std::time::Duration;

use baton_verify::text::PASSAGE;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution as _, Exp};

use super::lengths::Lengths;

/// One request to come.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Planned {
    /// When it is due, since the beginning.
    pub(crate) due: Duration,
    pub(crate) prompt: String,
    /// Most tokens to write.
    pub(crate) tokens: usize,
    /// Of its draws at the server.
    pub(crate) seed: u64,
}

/// How requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Arrivals {
    /// Whenever an earlier one has been answered.
    Closed,
    /// At even times, this many per second.
    Even(f64),
    /// Independently of each other, this many per second on average.
    Poisson(f64),
}

/// An endless sequence of requests.
#[derive(Debug)]
pub(crate) struct Workload {
    random: ChaCha8Rng,
    arrivals: Arrivals,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    /// Tokens that a word of [`words`] takes at this server, on average.
    tokens_per_word: f64,
    /// How every prompt begins.
    prefix: String,
    due: Duration,
}

impl Workload {
    pub(crate) fn new(
        seed: u64,
        arrivals: Arrivals,
        (prompt_tokens, output_tokens): (Lengths, Lengths),
        shared_prefix: usize,
        tokens_per_word: f64,
    ) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let prefix = text(&mut random, shared_prefix, tokens_per_word);
        let due = Duration::ZERO;
        Self { random, arrivals, prompt_tokens, output_tokens, tokens_per_word, prefix, due }
    }
}

impl Iterator for Workload {
    type Item = Planned;

    fn next(&mut self) -> Option<Planned> {
        let due = self.due;
        let pause = match self.arrivals {
            Arrivals::Closed => 0.0,
            Arrivals::Even(rate) => 1.0 / rate,
            // The command line refuses a rate that is not above 0.
            Arrivals::Poisson(rate) => {
                Exp::new(rate).map_or(0.0, |gaps| gaps.sample(&mut self.random))
            }
        };
        self.due = due.saturating_add(Duration::try_from_secs_f64(pause).unwrap_or(Duration::MAX));
        let length = self.prompt_tokens.draw(&mut self.random);
        let own = text(&mut self.random, length, self.tokens_per_word);
        Some(Planned {
            due,
            prompt: format!("{}{own}", self.prefix),
            tokens: self.output_tokens.draw(&mut self.random),
            seed: self.random.random::<u32>().into(),
        })
    }
}

/// Words in no order, about `tokens` tokens of them: no two prompts begin alike, so that no cache helps.
pub(crate) fn text(random: &mut ChaCha8Rng, tokens: usize, tokens_per_word: f64) -> String {
    if tokens == 0 {
        return String::new();
    }
    let count = (tokens as f64 / tokens_per_word).round().max(1.0) as usize;
    let words: Vec<&str> = PASSAGE.split_whitespace().collect();
    (0..count).fold(String::new(), |text, _| {
        text + words.choose(random).copied().unwrap_or_default() + " "
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(seed: u64, arrivals: Arrivals) -> Workload {
        Workload::new(seed, arrivals, (Lengths::Uniform(16, 64), Lengths::Fixed(8)), 40, 2.0)
    }

    #[test]
    fn a_seed_gives_one_workload() {
        let requests = |seed| workload(seed, Arrivals::Poisson(10.0)).take(20).collect::<Vec<_>>();
        assert_eq!(requests(3), requests(3));
        assert_ne!(requests(3), requests(4));
    }

    #[test]
    fn requests_arrive_at_their_rate() {
        for arrivals in [Arrivals::Poisson(50.0), Arrivals::Even(50.0)] {
            let last = workload(1, arrivals).nth(2000).unwrap().due.as_secs_f64();
            assert!((38.0..42.0).contains(&last), "{arrivals:?}: 2000 requests in {last} s");
        }
        assert_eq!(workload(1, Arrivals::Closed).nth(9).unwrap().due, Duration::ZERO);
    }

    #[test]
    fn prompts_share_their_prefix_and_no_more() {
        let prompts: Vec<_> = workload(1, Arrivals::Closed).take(2).map(|r| r.prompt).collect();
        let words = |at: usize| prompts[at].split_whitespace().collect::<Vec<_>>();
        let (a, b) = (words(0), words(1));
        assert_eq!(a[..20], b[..20]);
        assert_ne!(a[20..24], b[20..24]);
        for words in [a, b] {
            assert!((28..=52).contains(&words.len()), "{} words", words.len());
        }
    }
}
