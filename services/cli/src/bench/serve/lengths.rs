//! How many tokens a request has.

use std::str::FromStr;

use rand::{Rng, RngExt as _};
use rand_distr::{Distribution as _, LogNormal, Normal};

/// A number of tokens, the same for every request or drawn for each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lengths {
    /// All alike.
    Fixed(usize),
    /// From the first to the second, both included.
    Uniform(usize, usize),
    /// Around a mean.
    Normal(Normal<f64>),
    /// Around a median, with a long tail.
    LogNormal(LogNormal<f64>),
}

impl Lengths {
    /// A length; never 0.
    pub(crate) fn draw(&self, random: &mut impl Rng) -> usize {
        let drawn = match self {
            Self::Fixed(tokens) => return *tokens,
            Self::Uniform(low, high) => return random.random_range(*low..=*high),
            Self::Normal(normal) => normal.sample(random),
            Self::LogNormal(log_normal) => log_normal.sample(random),
        };
        // A float becomes the nearest number that there is.
        (drawn.round() as usize).max(1)
    }
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "{text:?}, expected a number above 0, LOW-HIGH, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA"
            )
        };
        let count = |part: &str| part.parse().ok().filter(|tokens: &usize| *tokens > 0);
        let pair = |text: &str| -> Option<(f64, f64)> {
            let (centre, spread) = text.split_once(',')?;
            let (centre, spread) = (centre.parse().ok()?, spread.parse().ok()?);
            (centre > 0.0 && spread >= 0.0).then_some((centre, spread))
        };
        let lengths = if let Some(rest) = text.strip_prefix("normal:") {
            pair(rest)
                .and_then(|(mean, deviation)| Normal::new(mean, deviation).ok())
                .map(Self::Normal)
        } else if let Some(rest) = text.strip_prefix("lognormal:") {
            pair(rest)
                .and_then(|(median, sigma)| LogNormal::new(median.ln(), sigma).ok())
                .map(Self::LogNormal)
        } else if let Some((low, high)) = text.split_once('-') {
            count(low)
                .zip(count(high))
                .filter(|(low, high)| low <= high)
                .map(|(l, h)| Self::Uniform(l, h))
        } else {
            count(text).map(Self::Fixed)
        };
        lengths.ok_or_else(bad)
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;
    use rand_chacha::ChaCha8Rng;

    use super::*;

    fn draws(text: &str) -> Vec<usize> {
        let lengths: Lengths = text.parse().unwrap();
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let mut draws: Vec<usize> = (0..2000).map(|_| lengths.draw(&mut random)).collect();
        draws.sort_unstable();
        draws
    }

    #[test]
    fn draws_follow_their_distribution() {
        assert_eq!(draws("12")[..2], [12, 12]);
        let uniform = draws("16-3000");
        assert!(uniform[0] >= 16 && uniform[0] < 40, "{}", uniform[0]);
        assert!(uniform[1999] <= 3000 && uniform[1999] > 2960, "{}", uniform[1999]);
        let normal = draws("normal:500,50");
        assert!((490..510).contains(&normal[1000]), "{}", normal[1000]);
        // A standard deviation below the mean lies a sixth of all.
        assert!((440..460).contains(&normal[317]), "{}", normal[317]);
        let tailed = draws("lognormal:300,1");
        assert!((270..330).contains(&tailed[1000]), "{}", tailed[1000]);
        assert!(tailed[1999] > 3000, "{}", tailed[1999]);
        assert_eq!(draws("normal:1,30")[0], 1);
    }

    #[test]
    fn what_is_no_length_is_refused() {
        for bad in ["0", "-4", "9-3", "0-3", "normal:5", "normal:0,1", "lognormal:4,-1", "many", ""]
        {
            assert!(bad.parse::<Lengths>().unwrap_err().contains(&format!("{bad:?}")), "{bad}");
        }
    }
}
