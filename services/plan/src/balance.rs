//! Where to cut a model so that its stages take equally long.
//!
//! The slowest stage sets the pace of the pipeline, so the search minimises the cost of the costliest stage. It is exact:
//! dynamic programming over all cuts, with the memory of each stage as a hard limit. Among the splits that come within
//! [`CARRY_FREE_TOLERANCE`] percent of the best it takes one with the fewest carries, and says what that cost.

mod cost;
mod search;

use std::ops::Range;

use thiserror::Error;

pub use cost::{BalanceOptions, LayerCost, layer_cost};

use crate::config::ModelConfig;
use cost::Loads;
use search::{Objective, Split, search};

/// Percent of balance below which a split with fewer carries is preferred. A carry of GLM costs the link two
/// thirds of the hidden states again, and makes the receiving stage depend on rows it did not compute.
pub const CARRY_FREE_TOLERANCE: u64 = 2;

/// A balanced split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Balance {
    /// Layers of each stage.
    pub slices: Vec<Range<usize>>,
    /// Cost of each stage, in the units of [`LayerCost::total`].
    pub costs: Vec<u64>,
    /// What was traded against balance, in words.
    pub notes: Vec<String>,
}

/// Why no split can be made.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BalanceError {
    /// More stages than layers, or none.
    #[error(
        "{stages} stages for {layers} layers: expected 1 to {layers}, since no stage may be empty"
    )]
    StageCount {
        /// Stages asked for.
        stages: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// Neither one memory limit nor one per stage.
    #[error("{limits} memory limits for {stages} stages: expected one for all or one per stage")]
    MemoryLimits {
        /// Limits given.
        limits: usize,
        /// Stages asked for.
        stages: usize,
    },
    /// No cut keeps every stage within its memory.
    #[error(
        "too little memory: weights and KV of {kv_tokens} tokens take {needed} bytes, the {stages} stages have \
         {available} together ({limits}); cut as evenly as whole layers allow, the fullest stage takes {fullest} bytes"
    )]
    TooLittleMemory {
        /// Stages asked for.
        stages: usize,
        /// Bytes of the whole model with its KV.
        needed: u64,
        /// Bytes of all stages together.
        available: u64,
        /// The limits, as given.
        limits: String,
        /// Smallest uniform limit for which a cut exists.
        fullest: u64,
        /// Tokens whose KV each stage must have room for.
        kv_tokens: usize,
    },
}

/// Cuts the model into `options.stages` stages.
///
/// # Errors
/// When there are more stages than layers, when the limits are not one or one per stage, and when no cut fits them.
pub fn balance(config: &ModelConfig, options: &BalanceOptions) -> Result<Balance, BalanceError> {
    let (stages, layers) = (options.stages, config.num_layers);
    if stages == 0 || stages > layers {
        return Err(BalanceError::StageCount { stages, layers });
    }
    let limits = match options.memory[..] {
        [] => vec![u64::MAX; stages],
        [limit] => vec![limit; stages],
        _ if options.memory.len() == stages => options.memory.clone(),
        _ => return Err(BalanceError::MemoryLimits { limits: options.memory.len(), stages }),
    };
    let loads = Loads::new(config, options);
    let starts_shared: Vec<bool> =
        (0..layers).map(|layer| !config.schedule.is_full(layer)).collect();
    let split = choose(&loads, &limits, &starts_shared)
        .ok_or_else(|| too_little_memory(&loads, &limits, options))?;
    Ok(split)
}

fn choose(loads: &Loads, limits: &[u64], starts_shared: &[bool]) -> Option<Balance> {
    let fits = |stage: usize, slice: &Range<usize>| loads.memory(slice.clone()) <= limits[stage];
    let fastest = search(limits.len(), starts_shared, Objective::Largest, |stage, slice| {
        fits(stage, slice).then(|| loads.time(slice.clone()))
    });
    let best = fastest.iter().flatten().min_by_key(|split| split.value)?;
    let tolerated = best.value * u128::from(100 + CARRY_FREE_TOLERANCE);
    let carries = fastest.iter().position(|split| {
        split.as_ref().is_some_and(|s| s.value == best.value || s.value * 100 < tolerated)
    })?;
    let bound = fastest[carries].as_ref()?.value;
    // The bound says nothing of the other stages; even them out under it.
    let even = search(limits.len(), starts_shared, Objective::SumOfSquares, |stage, slice| {
        let time = loads.time(slice.clone());
        (fits(stage, slice) && u128::from(time) <= bound).then_some(time)
    });
    let split = even.into_iter().nth(carries)??;
    let notes = notes(&fastest, best, carries);
    let costs = split.slices.iter().map(|slice| loads.time(slice.clone())).collect();
    Some(Balance { slices: split.slices, costs, notes })
}

/// What the choice of this many carries cost or saved.
fn notes(fastest: &[Option<Split>], best: &Split, carries: usize) -> Vec<String> {
    let percent = |value: u128| (value as f64 / best.value as f64 - 1.0) * 100.0;
    let Some(chosen) = &fastest[carries] else { return Vec::new() };
    let mut notes = Vec::new();
    if chosen.value > best.value {
        let spared = fastest.iter().position(|s| s.as_ref() == Some(best)).unwrap_or(carries);
        notes.push(format!(
            "{} cost {:.2}% balance: the best split starts its stages at {} and sends {}",
            if carries == 0 { "carry-free cuts" } else { "cuts with fewer carries" },
            percent(chosen.value),
            starts(best),
            count(spared, "carry", "carries"),
        ));
    }
    if carries > 0 {
        let free = match &fastest[0] {
            Some(split) => format!(
                "carry-free cuts (at {}) would cost {:.2}% balance",
                starts(split),
                percent(split.value)
            ),
            None => "no carry-free split fits".into(),
        };
        notes.push(format!("{} sent: {free}", count(carries, "carry is", "carries are")));
    }
    notes
}

fn starts(split: &Split) -> String {
    let starts: Vec<String> = split.slices.iter().map(|slice| slice.start.to_string()).collect();
    starts.join(",")
}

fn count(n: usize, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

fn too_little_memory(loads: &Loads, limits: &[u64], options: &BalanceOptions) -> BalanceError {
    let layers = loads.layers();
    // Carries do not matter here, so no cut counts as one.
    let smallest = search(limits.len(), &vec![false; layers], Objective::Largest, |_, slice| {
        Some(loads.memory(slice.clone()))
    });
    let fullest = smallest.iter().flatten().map(|split| split.value).min().unwrap_or(0);
    let given: Vec<String> = options.memory.iter().map(u64::to_string).collect();
    BalanceError::TooLittleMemory {
        stages: limits.len(),
        needed: loads.memory(0..layers),
        available: limits.iter().fold(0, |sum, limit| sum.saturating_add(*limit)),
        limits: given.join(", "),
        fullest: u64::try_from(fullest).unwrap_or(u64::MAX),
        kv_tokens: options.kv_tokens,
    }
}

#[cfg(test)]
mod tests;
