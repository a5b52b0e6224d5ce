//! `baton bench stage`: one stage's layers on a GPU, beside what reading their bytes and doing their arithmetic takes at
//! least.

#[cfg(any(test, feature = "cuda"))]
mod floor;
#[cfg(feature = "cuda")]
mod measure;

use crate::args::BenchStageArgs;

#[cfg(feature = "cuda")]
pub(crate) fn run(args: &BenchStageArgs) -> anyhow::Result<()> {
    measure::run(args)
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn run(args: &BenchStageArgs) -> anyhow::Result<()> {
    anyhow::bail!(
        "baton bench stage --layers {}..{}: this binary was built without the feature `cuda`",
        args.layers.start,
        args.layers.end
    )
}
