//! `baton selftest`.

use std::io::Write as _;
use std::process::ExitCode;

use baton_kernels::selftest::{self, Check, Precision};
use baton_kernels::{CpuBackend, CpuOptions};
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;

use crate::args::{Device, SelftestArgs};

/// The results for one compute type of a device.
struct Run {
    name: String,
    checks: Vec<Check>,
}

pub(crate) fn run(args: &SelftestArgs) -> anyhow::Result<ExitCode> {
    let runs = match args.backend {
        Device::Cpu => {
            let backend = CpuBackend::new(CpuOptions::default())?;
            let checks = selftest::run(&backend, Precision::F32, !args.small)?;
            vec![Run { name: "cpu, f32".into(), checks }]
        }
        Device::Cuda => cuda(args)?,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        let all: Vec<serde_json::Value> = runs.iter().map(json).collect();
        serde_json::to_writer_pretty(&mut out, &all)?;
        writeln!(out)?;
    } else {
        for run in &runs {
            writeln!(out, "{}\n{}", run.name, table(&run.checks))?;
        }
    }
    let all = || runs.iter().flat_map(|run| &run.checks);
    let failed = all().filter(|check| !check.passes()).count();
    if !args.json {
        writeln!(out, "{} checks, {failed} out of bounds", all().count())?;
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(feature = "cuda")]
fn cuda(args: &SelftestArgs) -> anyhow::Result<Vec<Run>> {
    use baton_kernels::cuda::{CudaBackend, CudaOptions, Element};
    let types = [(Element::F32, "f32", Precision::F32), (Element::Bf16, "bf16", Precision::BF16)];
    types
        .into_iter()
        .map(|(activations, name, precision)| {
            let workspace = 6 << 30;
            let backend =
                CudaBackend::new(CudaOptions { ordinal: args.gpu, activations, workspace })?;
            let name = format!("{}, {name}", backend.device_name());
            let checks = selftest::run(&backend, precision, !args.small)?;
            Ok(Run { name, checks })
        })
        .collect()
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: &SelftestArgs) -> anyhow::Result<Vec<Run>> {
    anyhow::bail!("--backend cuda: this binary was built without the feature `cuda`")
}

fn table(checks: &[Check]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(["operation", "case", "error", "bound", ""]);
    for check in checks {
        table.add_row([
            check.operation.to_owned(),
            check.case.clone(),
            format!("{:.1e}", check.error),
            format!("{:.0e}", check.bound),
            if check.passes() { "ok" } else { "FAILED" }.to_owned(),
        ]);
    }
    table
}

fn json(run: &Run) -> serde_json::Value {
    let check = |check: &Check| {
        serde_json::json!({
            "operation": check.operation,
            "case": check.case,
            "error": check.error,
            "bound": check.bound,
            "passes": check.passes(),
        })
    };
    serde_json::json!({"device": run.name, "checks": run.checks.iter().map(check).collect::<Vec<_>>()})
}
