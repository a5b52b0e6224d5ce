//! Runs the steps and times them.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::time::Instant;

use anyhow::Context as _;
use baton_kernels::cuda::{Element, KernelTime};
use baton_kernels::{Batch, CudaBackend, CudaOptions, Segment};
use baton_model::{Slice, StepInput, StepRequest};
use baton_plan::{
    Contract, ContractOptions, HiddenDtype, IndexDtype, ModelConfig, Partition, StageContract,
};
use baton_transport::{ExpectedStep, HandOff, SentCarry};
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;

use super::floor::Floor;
use crate::args::BenchStageArgs;

/// Tokens per KV block.
const BLOCK: usize = 64;
/// Share of the memory that weights leave which the caches take.
const CACHE_SHARE: f64 = 0.9;

/// One measured step.
struct Measured {
    name: String,
    millis: f64,
    floor_millis: f64,
    kernels: BTreeMap<&'static str, KernelTime>,
}

pub(crate) fn run(args: &BenchStageArgs) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(&args.config)
        .with_context(|| format!("--config {}", args.config.display()))?;
    let config = ModelConfig::from_json(&text)?;
    let contract = contract(&config, args)?;
    let workspace = baton_model::slice::workspace_bytes(&config, &contract);
    let activations = match contract.hidden_dtype {
        HiddenDtype::F32 => Element::F32,
        HiddenDtype::Bf16 => Element::Bf16,
    };
    let backend = CudaBackend::new(CudaOptions { ordinal: args.gpu, activations, workspace })?;
    let name = backend.device_name().to_owned();
    let (free, _) = backend.memory()?;
    let weights = baton_model::slice::bytes_needed(&config, &contract);
    let layout = baton_plan::KvLayout::Plain(contract.hidden_dtype);
    let block = baton_model::slice::kv_bytes_per_block(&config, &contract, layout);
    let left = free.checked_sub(weights).with_context(|| {
        format!("--layers {:?}: {weights} bytes of weights, {free} bytes are free", args.layers)
    })?;
    let most = args.batch.iter().copied().max().unwrap_or(1).max(1);
    let wanted = (most * args.context.div_ceil(BLOCK)) as u64;
    let blocks = ((left as f64 * CACHE_SHARE) as u64 / block.max(1)).min(wanted).max(1) as usize;
    let started = Instant::now();
    let mut slice = Slice::made_up(backend, &config, contract, blocks, &mut |_| {})?;
    slice.backend().synchronise();
    tracing::info!(
        "{weights} bytes of weights made up in {:.1} s, {blocks} KV blocks",
        started.elapsed().as_secs_f64()
    );
    let floor = Floor::new(&config, args.layers.clone(), args.bandwidth);
    let mut measured = Vec::new();
    let cases =
        args.batch.iter().map(|&n| (n, true)).chain(args.prefill.iter().map(|&n| (n, false)));
    for (rows, decode) in cases {
        let case = Case::new(&slice, rows, decode, args.context, blocks)?;
        let (millis, kernels) = case.measure(&mut slice, args.repeats)?;
        let sequences = if decode { rows } else { 1 };
        measured.push(Measured {
            name: if decode {
                format!("decode, batch {rows}")
            } else {
                format!("prefill of {rows}")
            },
            millis,
            floor_millis: floor.seconds(rows, sequences, args.context) * 1e3,
            kernels,
        });
    }
    print(&name, args, &measured)
}

/// The stage of these layers, between two others where the model goes on.
fn contract(config: &ModelConfig, args: &BenchStageArgs) -> anyhow::Result<StageContract> {
    let layers = &args.layers;
    let counts: Vec<usize> =
        [layers.start, layers.len(), config.num_layers.saturating_sub(layers.end)]
            .into_iter()
            .filter(|n| *n > 0)
            .collect();
    let partition = Partition::from_counts(&counts, config.num_layers)?;
    let rows = args.batch.iter().chain(&args.prefill).copied().max().unwrap_or(1);
    let options = ContractOptions {
        hidden_dtype: args.activation_dtype.into(),
        index_dtype: IndexDtype::I32,
        row_capacity: rows,
        block_size: BLOCK,
    };
    let contract = Contract::new(config, &partition, &options)?;
    let stage = contract.stages.into_iter().find(|stage| stage.layers == *layers);
    let stage = stage.with_context(|| {
        format!("--layers {layers:?}: the model has {} layers", config.num_layers)
    })?;
    anyhow::ensure!(
        !stage.is_first() && !stage.is_last(),
        "--layers {layers:?}: expected layers in the middle of the {} of the model",
        config.num_layers
    );
    Ok(stage)
}

/// A step that can be run again and again: it writes what it wrote before.
struct Case {
    request: StepRequest,
    expected: ExpectedStep,
    hand_off: HandOff,
    contract: StageContract,
}

impl Case {
    fn new(
        slice: &Slice<CudaBackend>,
        rows: usize,
        decode: bool,
        context: usize,
        blocks: usize,
    ) -> anyhow::Result<Self> {
        let contract = slice.contract().clone();
        anyhow::ensure!(
            decode || rows <= context,
            "--prefill {rows}: more than the context of {context}"
        );
        let per_sequence = context.div_ceil(BLOCK);
        // Sequences that do not fit share blocks; every one has blocks of its own first.
        let table = |sequence: usize| -> Vec<u32> {
            (0..per_sequence).map(|b| ((sequence * per_sequence + b) % blocks) as u32).collect()
        };
        let segments: Vec<Segment> = if decode {
            let segment =
                |s| Segment { first_row: s, rows: 1, start: context - 1, blocks: table(s) };
            (0..rows).map(segment).collect()
        } else {
            vec![Segment { first_row: 0, rows, start: context - rows, blocks: table(0) }]
        };
        let batch = Batch { segments, padding: 0, block_size: BLOCK };
        let positions: Vec<u32> = batch.positions().map(|(_, p)| p as u32).collect();
        let topk = contract.index_topk;
        let carry = contract.receives_from_layer.map(|source_layer| SentCarry {
            epoch: 1,
            step_id: 1,
            source_layer,
            indices: positions
                .iter()
                .filter(|p| **p as usize >= topk)
                .flat_map(|p| spread(*p, topk))
                .collect(),
        });
        // bf16 or f32 values of about one, of no pattern.
        let values = (0..rows * contract.hidden_size)
            .map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0);
        let hidden = match contract.hidden_dtype {
            HiddenDtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
            HiddenDtype::Bf16 => {
                values.flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect()
            }
        };
        Ok(Self {
            hand_off: HandOff { epoch: 1, step_id: 1, rows, hidden, residual: None, carry },
            expected: ExpectedStep { epoch: 1, step_id: 1, positions, padding: 0 },
            request: StepRequest {
                epoch: 1,
                step_id: 1,
                batch,
                samples: Vec::new(),
                scores: Vec::new(),
            },
            contract,
        })
    }

    /// Median milliseconds of a step, hand-off in and out included, and the kernels of one more step.
    fn measure(
        &self,
        slice: &mut Slice<CudaBackend>,
        repeats: usize,
    ) -> anyhow::Result<(f64, BTreeMap<&'static str, KernelTime>)> {
        self.step(slice)?;
        let mut times = Vec::with_capacity(repeats);
        for _ in 0..repeats.max(1) {
            times.push(self.step(slice)?);
        }
        times.sort_by(f64::total_cmp);
        slice.backend().start_profile();
        self.step(slice)?;
        Ok((times[times.len() / 2] * 1e3, slice.backend().stop_profile()))
    }

    fn step(&self, slice: &mut Slice<CudaBackend>) -> anyhow::Result<f64> {
        let accepted = self.hand_off.clone().accept(&self.contract, &self.expected)?;
        slice.backend().synchronise();
        let started = Instant::now();
        slice.forward(&self.request, StepInput::HandOff(accepted))?;
        slice.backend().synchronise();
        Ok(started.elapsed().as_secs_f64())
    }
}

/// `topk` positions up to `position`, ascending and spread over the context.
fn spread(position: u32, topk: usize) -> impl Iterator<Item = i32> {
    let context = position as usize + 1;
    (0..topk).map(move |i| (i * context / topk) as i32)
}

fn print(device: &str, args: &BenchStageArgs, measured: &[Measured]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if args.json {
        let kernel = |(name, time): (&&str, &KernelTime)| serde_json::json!({"kernel": name, "launches": time.launches, "micros": time.micros});
        let case = |m: &Measured| {
            serde_json::json!({
                "case": m.name,
                "millis": m.millis,
                "floor_millis": m.floor_millis,
                "ratio": m.millis / m.floor_millis,
                "kernels": m.kernels.iter().map(kernel).collect::<Vec<_>>(),
            })
        };
        let report = serde_json::json!({
            "device": device,
            "layers": [args.layers.start, args.layers.end],
            "context": args.context,
            "cases": measured.iter().map(case).collect::<Vec<_>>(),
        });
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
        return Ok(());
    }
    writeln!(out, "{device}, layers {:?}, context {}", args.layers, args.context)?;
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(["step", "ms", "floor ms", "ratio", "kernels ms", "launches"]);
    for m in measured {
        let kernels: f64 = m.kernels.values().map(|t| t.micros).sum::<f64>() / 1e3;
        let launches: usize = m.kernels.values().map(|t| t.launches).sum();
        table.add_row([
            m.name.clone(),
            format!("{:.3}", m.millis),
            format!("{:.3}", m.floor_millis),
            format!("{:.2}", m.millis / m.floor_millis),
            format!("{kernels:.3}"),
            launches.to_string(),
        ]);
    }
    writeln!(out, "{table}")?;
    for m in measured {
        let mut kernels: Vec<_> = m.kernels.iter().collect();
        kernels.sort_by(|a, b| b.1.micros.total_cmp(&a.1.micros));
        writeln!(out, "{}:", m.name)?;
        for (name, time) in kernels.iter().take(10) {
            writeln!(out, "  {name:<28} {:>5} launches {:>11.1} us", time.launches, time.micros)?;
        }
    }
    Ok(())
}
