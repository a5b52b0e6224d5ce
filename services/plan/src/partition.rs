//! Which layers each stage holds.

use std::ops::Range;

use thiserror::Error;

use crate::balance::{BalanceError, BalanceOptions, balance};
use crate::config::ModelConfig;

/// Consecutive, non-empty slices that cover every layer once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    slices: Vec<Range<usize>>,
    notes: Vec<String>,
}

/// A split that is not a partition of the layers.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PartitionError {
    /// Not a list of numbers.
    #[error("split {split:?}: {entry:?} is not a number of layers; expected for example 3,3,4")]
    NotANumber {
        /// The whole split.
        split: String,
        /// The entry.
        entry: String,
    },
    /// A stage without layers.
    #[error("stage {stage} of split {split} has no layers; every stage needs at least one")]
    EmptyStage {
        /// The stage.
        stage: usize,
        /// The whole split.
        split: String,
    },
    /// The counts do not add up to the model.
    #[error("split {split} has {sum} layers in {stages} stages, the model has {layers}")]
    WrongSum {
        /// The whole split.
        split: String,
        /// Its layers.
        sum: usize,
        /// Its stages.
        stages: usize,
        /// The model's layers.
        layers: usize,
    },
    /// A layer is in no stage, or in two.
    #[error("stage {stage} starts at layer {found}, expected {expected}: {}", gap_or_overlap(*.expected, *.found))]
    NotConsecutive {
        /// The stage.
        stage: usize,
        /// Where the one before ends.
        expected: usize,
        /// Where it starts.
        found: usize,
    },
    /// No balanced split exists.
    #[error(transparent)]
    Balance(#[from] BalanceError),
}

fn gap_or_overlap(expected: usize, found: usize) -> &'static str {
    if found > expected { "a gap" } else { "an overlap" }
}

impl Partition {
    /// Stages of the given numbers of layers.
    ///
    /// # Errors
    /// When a stage is empty or the numbers do not add up to `layers`.
    pub fn from_counts(counts: &[usize], layers: usize) -> Result<Self, PartitionError> {
        let split = || counts.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        if let Some(stage) = counts.iter().position(|&count| count == 0) {
            return Err(PartitionError::EmptyStage { stage, split: split() });
        }
        let sum = counts.iter().fold(0, |sum: usize, &count| sum.saturating_add(count));
        if sum != layers {
            let stages = counts.len();
            return Err(PartitionError::WrongSum { split: split(), sum, stages, layers });
        }
        let mut end = 0;
        let slices = counts
            .iter()
            .map(|count| {
                let start = end;
                end += count;
                start..end
            })
            .collect();
        Ok(Self { slices, notes: Vec::new() })
    }

    /// Stages of the given ranges of layers.
    ///
    /// # Errors
    /// When they leave a gap, overlap, or do not cover `layers`.
    pub fn from_ranges(slices: &[Range<usize>], layers: usize) -> Result<Self, PartitionError> {
        let mut expected = 0;
        for (stage, slice) in slices.iter().enumerate() {
            if slice.start != expected {
                let found = slice.start;
                return Err(PartitionError::NotConsecutive { stage, expected, found });
            }
            expected = slice.end.max(slice.start);
        }
        let counts: Vec<usize> = slices.iter().map(ExactSizeIterator::len).collect();
        Self::from_counts(&counts, layers)
    }

    /// Reads `3,3,4`.
    ///
    /// # Errors
    /// As [`Partition::from_counts`], and when an entry is not a number.
    pub fn parse(split: &str, layers: usize) -> Result<Self, PartitionError> {
        let counts = split
            .split(',')
            .map(|entry| {
                entry.trim().parse().map_err(|_| PartitionError::NotANumber {
                    split: split.to_owned(),
                    entry: entry.to_owned(),
                })
            })
            .collect::<Result<Vec<usize>, _>>()?;
        Self::from_counts(&counts, layers)
    }

    /// Cuts where the stages take equally long within their memory, and rather where no carry is needed when that costs
    /// little; [`Partition::notes`] says so.
    ///
    /// # Errors
    /// When there are more stages than layers or too little memory.
    pub fn balanced(
        config: &ModelConfig,
        options: &BalanceOptions,
    ) -> Result<Self, PartitionError> {
        let balance = balance(config, options)?;
        let partition = Self::from_ranges(&balance.slices, config.num_layers)?;
        Ok(Self { notes: balance.notes, ..partition })
    }

    /// Layers of every stage.
    #[must_use]
    pub fn slices(&self) -> &[Range<usize>] {
        &self.slices
    }

    /// Number of stages.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.slices.len()
    }

    /// What was traded against balance, in words.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn wrong_splits_are_refused_with_the_numbers() {
        let message = |split| Partition::parse(split, 10).unwrap_err().to_string();
        assert!(message("3,3,3").contains("9 layers in 3 stages, the model has 10"));
        assert!(message("5,0,5").contains("stage 1 of split 5,0,5 has no layers"));
        assert!(message("5,x").contains("\"x\""));
        assert!(message("").contains("not a number"));
        assert!(message("18446744073709551615,2").contains("the model has 10"));
    }

    #[test]
    fn gaps_and_overlaps_are_told_apart() {
        let gap = Partition::from_ranges(&[0..3, 4..10], 10).unwrap_err().to_string();
        assert!(gap.contains("stage 1 starts at layer 4, expected 3: a gap"), "{gap}");
        let overlap = Partition::from_ranges(&[0..3, 2..10], 10).unwrap_err().to_string();
        assert!(overlap.contains("an overlap"), "{overlap}");
    }

    proptest! {
        #[test]
        fn every_layer_is_in_exactly_one_stage(counts in prop::collection::vec(1usize..9, 1..9)) {
            let layers = counts.iter().sum();
            let partition = Partition::from_counts(&counts, layers).unwrap();
            let covered: Vec<usize> = partition.slices().iter().cloned().flatten().collect();
            prop_assert_eq!(covered, (0..layers).collect::<Vec<_>>());
            prop_assert_eq!(
                Partition::from_ranges(partition.slices(), layers).unwrap(),
                partition
            );
        }
    }
}
