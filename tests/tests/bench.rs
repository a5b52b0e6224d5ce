//! `baton bench`: what it measures is plausible, and what it cannot measure is refused.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use baton_tests::Program;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

fn pipeline(arguments: &[&str]) -> anyhow::Result<(bool, String, String)> {
    let mut program = Program::start(["bench", "pipeline"].iter().chain(arguments))?;
    let status = program.wait(LIMIT)?;
    Ok((status.success(), program.stdout(), program.stderr()))
}

#[test]
fn a_pipeline_of_delays_keeps_to_its_delay() -> anyhow::Result<()> {
    let arguments =
        ["--stages", "3", "--stage-ms", "20", "--sequences", "7", "--seconds", "2", "--json"];
    let (succeeded, out, errors) = pipeline(&arguments)?;
    ensure!(succeeded, "{errors}");
    let report: Value = serde_json::from_str(&out).with_context(|| out.clone())?;
    let figure = |name: &str| report[name].as_f64().with_context(|| format!("{name}: {report}"));
    ensure!((figure("ideal_steps_per_second")? - 50.0).abs() < 1e-9, "{report}");
    // No stage is faster than its sleep; a machine under load may be a good deal slower.
    let efficiency = figure("efficiency")?;
    ensure!(0.3 < efficiency && efficiency < 1.02, "{report}");
    let steps = figure("steps_per_second")?;
    let tokens = figure("tokens")? / figure("seconds")?;
    ensure!(
        (tokens / steps - 7.0 / 3.0).abs() < 1e-6,
        "seven sequences over three steps: {report}"
    );
    Ok(())
}

#[test]
fn what_cannot_be_measured_is_refused() -> anyhow::Result<()> {
    for (arguments, name) in [
        (["--stages", "0"], "--stages 0"),
        (["--stages", "79"], "79 stages"),
        (["--stage-ms", "0"], "--stage-ms 0"),
        (["--sequences", "0"], "--sequences 0"),
        (["--seconds", "-1"], "--seconds"),
    ] {
        let (succeeded, _, errors) = pipeline(&arguments)?;
        ensure!(!succeeded && errors.contains(name), "{arguments:?}: {errors}");
    }
    Ok(())
}
