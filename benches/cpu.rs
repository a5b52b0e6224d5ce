//! Prefill and decode speed of the CPU path: beside Hugging Face transformers in the same run, and against its floor.
//!
//!     cargo bench -p baton-benches --bench cpu -- --peer .venv/bin/python
#![allow(clippy::print_stdout)] // The table is the product.

use anyhow::Context as _;
use baton_benches::floor::Work;
use baton_benches::median;
use baton_benches::model::{Model, checkpoint};
use baton_benches::peer::Peer;
use baton_plan::ModelConfig;
use clap::Parser;
use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;

#[derive(Debug, Parser)]
struct Arguments {
    /// Python with torch and transformers (tests/oracle/requirements.txt); without it there is no peer in the table.
    #[arg(long, value_name = "PYTHON")]
    peer: Option<String>,
    /// Tokens of the prompt, and where decoding ends.
    #[arg(long, default_value_t = 512)]
    context: usize,
    /// Decode steps per run.
    #[arg(long, default_value_t = 64)]
    steps: usize,
    /// Runs on each side of the peer's.
    #[arg(long, default_value_t = 9)]
    repeat: usize,
    /// Threads; the processors there are when absent.
    #[arg(long)]
    threads: Option<usize>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Seconds of every run of every measure.
#[derive(Default)]
struct Seconds {
    prefill: Vec<f64>,
    decode_1: Vec<f64>,
    decode_8: Vec<f64>,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    anyhow::ensure!(
        0 < arguments.steps && arguments.steps < arguments.context,
        "--steps {}: expected at least 1 and fewer than --context {}",
        arguments.steps,
        arguments.context
    );
    let dir = checkpoint(std::path::Path::new(env!("CARGO_TARGET_TMPDIR")))?;
    let config = ModelConfig::load(&dir)?;
    let mut model = Model::load(&dir, arguments.context, arguments.threads)?;

    // Half of the runs before the peer's and half after: a machine that slows down slows both.
    let mut seconds = Seconds::default();
    run(&mut model, &arguments, &mut seconds)?;
    let peer = arguments
        .peer
        .as_ref()
        .map(|python| Peer::measure(python, &dir, arguments.context, arguments.steps))
        .transpose()?;
    run(&mut model, &arguments, &mut seconds)?;

    let (context, steps) = (arguments.context, arguments.steps);
    // Decoding is counted in the middle of its steps.
    let middle = context - steps / 2;
    let rows = [
        (
            "prefill",
            1,
            context,
            context,
            context,
            seconds.prefill,
            peer.as_ref().map(|p| p.prefill),
        ),
        (
            "decode, batch 1",
            1,
            1,
            middle,
            steps,
            seconds.decode_1,
            peer.as_ref().map(|p| p.decode_1),
        ),
        (
            "decode, batch 8",
            8,
            1,
            middle,
            8 * steps,
            seconds.decode_8,
            peer.as_ref().map(|p| p.decode_8),
        ),
    ];
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    let name = peer.as_ref().map_or("peer".to_owned(), |p| p.name.clone());
    table.set_header([
        "tokens/s".to_owned(),
        "baton".to_owned(),
        name,
        "ratio".to_owned(),
        "floor: bytes".to_owned(),
        "floor: FLOP".to_owned(),
        "at the floor".to_owned(),
        "of the floor".to_owned(),
    ]);
    for (name, sequences, each, end, tokens, runs, peer) in rows {
        let speed = tokens as f64 / median(runs);
        let work = Work::count(&config, sequences, each, end);
        let ceiling = model.backend().ceiling(work.bytes as usize);
        let floor = (sequences * each) as f64 / work.seconds(ceiling);
        table.add_row([
            name.to_owned(),
            format!("{speed:.0}"),
            peer.map_or("not run".to_owned(), |p| format!("{p:.0}")),
            peer.map_or("-".to_owned(), |p| format!("{:.1}", speed / p)),
            format!("{:.1} MB at {:.0} GB/s", work.bytes / 1e6, ceiling.read / 1e9),
            format!("{:.2} G at {:.0} GFLOP/s", work.flops / 1e9, ceiling.flops / 1e9),
            format!("{floor:.0}"),
            format!("{:.0}%", 100.0 * speed / floor),
        ]);
    }
    println!("{table}");
    Ok(())
}

fn run(model: &mut Model, arguments: &Arguments, seconds: &mut Seconds) -> anyhow::Result<()> {
    for round in 0..=arguments.repeat {
        let prefill = model.prefill().context("prefill")?;
        let decode_1 = model.decode(1, arguments.steps).context("decode, batch 1")?;
        let decode_8 = model.decode(8, arguments.steps).context("decode, batch 8")?;
        // The first round warms up.
        if round > 0 {
            seconds.prefill.push(prefill);
            seconds.decode_1.push(decode_1);
            seconds.decode_8.push(decode_8);
        }
    }
    Ok(())
}
