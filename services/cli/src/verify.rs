//! `baton verify`.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use anyhow::Context as _;
use baton_plan::ModelConfig;
use baton_verify::local::{self, LocalOptions, Reproduce};
use baton_verify::remote::{self, RemoteOptions};
use baton_verify::{Report, Verdict, report};
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::{Device, Fault, VerifyArgs};
use crate::{demo, plan};

/// Exit status of a verdict; an error that prevents one ends with 2.
const DIFFERS: u8 = 1;

pub(crate) async fn run(args: VerifyArgs) -> anyhow::Result<ExitCode> {
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("{msg:>10} {bar:30} {pos}/{len}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut said = String::new();
    let mut progress = |what: &str, done: usize, of: usize| {
        bar.set_length(of as u64);
        bar.set_position(done as u64);
        if said != what {
            bar.set_message(what.to_owned());
            // Without a terminal there is no bar, but a line for every part.
            if !std::io::stderr().is_terminal() {
                tracing::info!("{what}");
            }
            said = what.to_owned();
        }
    };
    let report = match (&args.endpoint, &args.reference) {
        (Some(endpoint), Some(reference)) => {
            let options = RemoteOptions {
                endpoint: endpoint.clone(),
                reference: reference.clone(),
                model: args.model_name.clone(),
                reference_model: args.reference_model_name.clone(),
                api_key: args.api_key.clone(),
                text: args.text.clone(),
                segment: args.segment,
                trials: args.trials,
                tolerance: args.tolerance,
            };
            remote::verify(&options, &mut progress).await?
        }
        _ => {
            let directory = match &args.model {
                Some(directory) => directory.clone(),
                None => demo::directory()?,
            };
            let config = ModelConfig::load(&directory)?;
            let options = LocalOptions {
                partition: plan::partition(&config, &args.split)?,
                directory,
                reproduce: args.reproduce.map(|Fault::Stale| Reproduce::Stale),
                text: args.text.clone(),
                trials: args.trials,
                device: device(args.backend),
                reference_device: device(args.reference_backend.unwrap_or(args.backend)),
            };
            // Nothing else runs meanwhile: this thread may compute.
            local::verify(&options, &mut progress)?
        }
    };
    bar.finish_and_clear();
    if let Some(path) = &args.html {
        let page = report::to_html(&report).map_err(anyhow::Error::msg).context("--html")?;
        std::fs::write(path, page).with_context(|| format!("--html {}", path.display()))?;
    }
    print(&report, args.json)?;
    Ok(match report.verdict {
        Verdict::Same => ExitCode::SUCCESS,
        Verdict::Differs => ExitCode::from(DIFFERS),
    })
}

fn device(device: Device) -> local::Device {
    match device {
        Device::Cpu => local::Device::Cpu,
        Device::Cuda => local::Device::Cuda { ordinal: 0 },
    }
}

fn print(report: &Report, json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, report)?;
        writeln!(out)?;
    } else {
        writeln!(out, "{report}")?;
    }
    Ok(())
}
