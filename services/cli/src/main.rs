//! `baton`: the one binary. Each subcommand has a module of its name.

mod args;
mod bench;
mod children;
mod coordinator;
mod demo;
mod plan;
mod progress;
mod selftest;
mod serve;
mod shutdown;
mod stage;
mod telemetry;
mod up;
mod verify;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{BenchCommand, Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    // A verification that fails has no verdict: 1 means that the answers differ.
    let failure = ExitCode::from(if matches!(cli.command, Command::Verify(_)) { 2 } else { 1 });
    run(cli).unwrap_or_else(|error| {
        // One message: the chain of causes on one line.
        eprintln!("baton: {error:#}");
        failure
    })
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let telemetry = cli.telemetry;
    telemetry.install_logs()?;
    match cli.command {
        Command::Plan(args) => plan::run(&args),
        Command::Up(args) => block_on(up::run(args, telemetry)),
        Command::Coordinator(args) => block_on(coordinator::run(args, telemetry)),
        Command::Stage(args) => block_on(stage::run(args, telemetry)),
        Command::Selftest(args) => return selftest::run(&args),
        Command::Bench(BenchCommand::Pipeline(args)) => {
            block_on(bench::pipeline::run(args, telemetry))
        }
        Command::Bench(BenchCommand::Serve(args)) => block_on(bench::serve::run(args)),
        Command::Bench(BenchCommand::Stage(args)) => bench::stage::run(&args),
        Command::Verify(args) => return block_on(verify::run(args)),
    }?;
    Ok(ExitCode::SUCCESS)
}

fn block_on<T>(future: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(future)
}
