//! What a load shows, in figures.

use std::collections::BTreeMap;
use std::fmt;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;

use super::ask::Answer;
use super::load::Outcome;

/// Percentiles that are reported.
const PERCENTILES: [(&str, f64); 4] = [("p50", 50.0), ("p90", 90.0), ("p95", 95.0), ("p99", 99.0)];

/// The report of one load.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) url: String,
    pub(crate) model: String,
    /// How it was loaded, in words.
    pub(crate) load: String,
    pub(crate) seed: u64,
    pub(crate) seconds: f64,
    pub(crate) completed: usize,
    pub(crate) failed: usize,
    /// What failed requests said, and how many said so.
    pub(crate) failures: BTreeMap<String, usize>,
    pub(crate) most_under_way: usize,
    pub(crate) requests_per_second: f64,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) completion_tokens: u64,
    pub(crate) prompt_tokens_per_second: f64,
    pub(crate) completion_tokens_per_second: f64,
    /// From when a request was due to its first text.
    pub(crate) time_to_first_token_ms: Spread,
    /// Between two pieces of one answer's text. A server that sends several tokens in one piece has fewer, longer gaps.
    pub(crate) inter_token_ms: Spread,
    /// An answer's time after its first text, over its further tokens.
    pub(crate) per_output_token_ms: Spread,
    /// From when a request was due to the end of its answer.
    pub(crate) latency_ms: Spread,
    /// Every answer, in the order of their ends.
    pub(crate) answers: Vec<Line>,
}

/// One answer.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Line {
    pub(crate) due_s: f64,
    pub(crate) time_to_first_token_ms: Option<f64>,
    pub(crate) latency_ms: f64,
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
}

/// How a time is spread over its samples, in ms; all 0 without any.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) samples: usize,
    pub(crate) mean: f64,
    #[serde(flatten)]
    pub(crate) percentiles: BTreeMap<&'static str, f64>,
    pub(crate) max: f64,
    /// The samples in ascending order, for plots.
    #[serde(skip)]
    pub(crate) sorted: Vec<f64>,
}

impl Spread {
    pub(crate) fn of(samples: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = samples.collect();
        sorted.sort_by(f64::total_cmp);
        let mean = sorted.iter().sum::<f64>() / sorted.len().max(1) as f64;
        let percentiles = PERCENTILES.iter().map(|(name, p)| (*name, percentile(&sorted, *p)));
        Self {
            samples: sorted.len(),
            mean,
            percentiles: percentiles.collect(),
            max: sorted.last().copied().unwrap_or(0.0),
            sorted,
        }
    }
}

/// Linear between the two nearest samples, as numpy has it.
pub(crate) fn percentile(sorted: &[f64], p: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let at = p / 100.0 * last as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

impl Answer {
    pub(crate) fn first_ms(&self) -> Option<f64> {
        Some((self.pieces.first()?.saturating_sub(self.due)).as_secs_f64() * 1e3)
    }

    fn latency_ms(&self) -> f64 {
        self.ended.saturating_sub(self.due).as_secs_f64() * 1e3
    }

    fn gaps_ms(&self) -> impl Iterator<Item = f64> + '_ {
        self.pieces.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3)
    }

    fn per_token_ms(&self) -> Option<f64> {
        let (first, last) = (self.pieces.first()?, self.pieces.last()?);
        let further = self.completion_tokens.checked_sub(1).filter(|further| *further > 0)?;
        Some((*last - *first).as_secs_f64() * 1e3 / further as f64)
    }
}

/// When requests were under way: number after each change, in order of time.
pub(crate) fn under_way(answers: &[Answer]) -> Vec<(f64, usize)> {
    let begins = answers.iter().map(|a| (a.due, true));
    let mut changes: Vec<_> = begins.chain(answers.iter().map(|a| (a.ended, false))).collect();
    changes.sort();
    let mut now = 0_usize;
    let counted = changes.into_iter().map(|(at, begins)| {
        now = if begins { now + 1 } else { now.saturating_sub(1) };
        (at.as_secs_f64(), now)
    });
    counted.collect()
}

impl Summary {
    pub(crate) fn new(
        (url, model, load, seed): (&str, &str, String, u64),
        outcome: &Outcome,
    ) -> Self {
        let answers = &outcome.answers;
        let total = |count: fn(&Answer) -> u64| answers.iter().map(count).sum::<u64>();
        let mut failures = BTreeMap::new();
        for failure in &outcome.failures {
            *failures.entry(failure.clone()).or_insert(0) += 1;
        }
        let per_second = |count: f64| count / outcome.seconds.max(1e-9);
        let (prompt_tokens, completion_tokens) =
            (total(|a| a.prompt_tokens), total(|a| a.completion_tokens));
        Self {
            url: url.to_owned(),
            model: model.to_owned(),
            load,
            seed,
            seconds: outcome.seconds,
            completed: answers.len(),
            failed: outcome.failures.len(),
            failures,
            most_under_way: under_way(answers).iter().map(|(_, n)| *n).max().unwrap_or(0),
            requests_per_second: per_second(answers.len() as f64),
            prompt_tokens,
            cached_tokens: total(|a| a.cached_tokens),
            completion_tokens,
            prompt_tokens_per_second: per_second(prompt_tokens as f64),
            completion_tokens_per_second: per_second(completion_tokens as f64),
            time_to_first_token_ms: Spread::of(answers.iter().filter_map(Answer::first_ms)),
            inter_token_ms: Spread::of(answers.iter().flat_map(Answer::gaps_ms)),
            per_output_token_ms: Spread::of(answers.iter().filter_map(Answer::per_token_ms)),
            latency_ms: Spread::of(answers.iter().map(Answer::latency_ms)),
            answers: answers.iter().map(Line::from).collect(),
        }
    }
}

impl From<&Answer> for Line {
    fn from(answer: &Answer) -> Self {
        Self {
            due_s: answer.due.as_secs_f64(),
            time_to_first_token_ms: answer.first_ms(),
            latency_ms: answer.latency_ms(),
            prompt_tokens: answer.prompt_tokens,
            completion_tokens: answer.completion_tokens,
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ({}), {}, seed {}", self.url, self.model, self.load, self.seed)?;
        writeln!(
            f,
            "{} requests answered, {} failed, {:.1} s, at most {} under way",
            self.completed, self.failed, self.seconds, self.most_under_way
        )?;
        for (failure, count) in &self.failures {
            writeln!(f, "  {count} times: {failure}")?;
        }
        writeln!(
            f,
            "{:.2} requests/s; prompts {} tokens ({} cached), {:.0} tokens/s; answers {} tokens, {:.0} tokens/s",
            self.requests_per_second,
            self.prompt_tokens,
            self.cached_tokens,
            self.prompt_tokens_per_second,
            self.completion_tokens,
            self.completion_tokens_per_second
        )?;
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        let names = PERCENTILES.iter().map(|(name, _)| *name);
        table.set_header(["ms", "mean"].into_iter().chain(names).chain(["max"]));
        for (name, spread) in [
            ("time to first token", &self.time_to_first_token_ms),
            ("between tokens", &self.inter_token_ms),
            ("per output token", &self.per_output_token_ms),
            ("whole answer", &self.latency_ms),
        ] {
            let figures = std::iter::once(spread.mean)
                .chain(
                    PERCENTILES
                        .iter()
                        .filter_map(|(name, _)| spread.percentiles.get(name).copied()),
                )
                .chain([spread.max]);
            let cells = figures.map(|ms| format!("{ms:.2}"));
            table.add_row(std::iter::once(name.to_owned()).chain(cells));
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        write!(f, "{table}")
    }
}

#[cfg(test)]
mod tests;
