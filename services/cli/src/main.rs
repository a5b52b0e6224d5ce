//! `baton`: the one binary. Each subcommand has a module of its name.

mod args;
mod bench;
mod children;
mod coordinator;
mod demo;
mod plan;
mod progress;
mod serve;
mod shutdown;
mod stage;
mod up;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{BenchCommand, Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One message: the chain of causes on one line.
            eprintln!("baton: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    baton_telemetry::LogConfig::from_env("info")?.install()?;
    match cli.command {
        Command::Plan(args) => plan::run(&args),
        Command::Up(args) => block_on(up::run(args)),
        Command::Coordinator(args) => block_on(coordinator::run(args)),
        Command::Stage(args) => block_on(stage::run(args)),
        Command::Bench(BenchCommand::Pipeline(args)) => block_on(bench::pipeline::run(args)),
    }
}

fn block_on<T>(future: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(future)
}
