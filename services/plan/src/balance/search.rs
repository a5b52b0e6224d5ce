//! The exact search over all cuts.

use std::ops::Range;

/// What a split should keep small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Objective {
    /// The cost of its costliest stage.
    Largest,
    /// The squares of all costs, which evens them out.
    SumOfSquares,
}

impl Objective {
    fn add(self, sum: u128, cost: u64) -> u128 {
        let cost = u128::from(cost);
        match self {
            Self::Largest => sum.max(cost),
            Self::SumOfSquares => sum + cost * cost,
        }
    }
}

/// A split and its value under the objective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Split {
    pub(super) value: u128,
    pub(super) slices: Vec<Range<usize>>,
}

/// Value of the best way to reach a state, and where its last slice starts.
type Best = Option<(u128, usize)>;

/// The best split for every number of carries, fewest first; `None` where there is none. `starts_shared` tells for each layer
/// whether a stage that starts there receives a carry; `cost` is a stage's cost, or `None` when it may not hold the slice.
pub(super) fn search(
    stages: usize,
    starts_shared: &[bool],
    objective: Objective,
    cost: impl Fn(usize, &Range<usize>) -> Option<u64>,
) -> Vec<Option<Split>> {
    let layers = starts_shared.len();
    // best[s][end][carries]: s stages hold the layers before `end`, and this many of them receive a carry.
    let mut best: Vec<Vec<Vec<Best>>> = vec![vec![vec![None; stages]; layers + 1]; stages + 1];
    best[0][0][0] = Some((0, 0));
    for stage in 0..stages {
        let still_to_come = stages - stage - 1;
        for start in stage..layers - still_to_come {
            let received = usize::from(starts_shared[start]);
            for end in start + 1..=layers - still_to_come {
                let Some(cost) = cost(stage, &(start..end)) else { continue };
                for carries in 0..stages - received {
                    let Some((sum, _)) = best[stage][start][carries] else { continue };
                    let value = objective.add(sum, cost);
                    let entry = &mut best[stage + 1][end][carries + received];
                    if entry.is_none_or(|(other, _)| value < other) {
                        *entry = Some((value, start));
                    }
                }
            }
        }
    }
    (0..stages).map(|carries| trace(&best, starts_shared, carries)).collect()
}

/// Follows the starts back from the last layer.
fn trace(best: &[Vec<Vec<Best>>], starts_shared: &[bool], mut carries: usize) -> Option<Split> {
    let (mut stage, mut end) = (best.len() - 1, starts_shared.len());
    let (value, _) = best[stage][end][carries]?;
    let mut slices = Vec::with_capacity(stage);
    while stage > 0 {
        let (_, start) = best[stage][end][carries]?;
        slices.push(start..end);
        carries -= usize::from(starts_shared[start]);
        (stage, end) = (stage - 1, start);
    }
    slices.reverse();
    Some(Split { value, slices })
}
