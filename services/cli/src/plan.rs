//! `baton plan`, and the plan that `up` and `coordinator` serve.

use std::io::Write as _;

use anyhow::Context as _;
use baton_plan::{BalanceOptions, HiddenDtype, ModelConfig, Partition, PlanReport};

use crate::args::{PlanArgs, SplitArgs};

pub(crate) fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let path = args.config.as_ref().or(args.model.as_ref()).context("--model or --config")?;
    let config = ModelConfig::load(path)?;
    let partition = partition(&config, &args.split)?;
    let hidden = args.activation_dtype.map_or(config.dtype.activations(), HiddenDtype::from);
    let report = PlanReport::new(&config, &partition, hidden)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
    } else {
        writeln!(out, "{}", report.to_table())?;
    }
    Ok(())
}

/// The split that was asked for: given, or balanced over the stages (two when nothing is said and the model allows it).
pub(crate) fn partition(config: &ModelConfig, split: &SplitArgs) -> anyhow::Result<Partition> {
    if let Some(split) = &split.split {
        return Ok(Partition::parse(split, config.num_layers)?);
    }
    let stages = split.stages.unwrap_or_else(|| config.num_layers.min(2));
    let options =
        BalanceOptions { memory: split.memory.clone(), ..BalanceOptions::new(config, stages) };
    Ok(Partition::balanced(config, &options)?)
}
