//! The benchmark's model, whole, in this process.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use baton_kernels::sampling::SampleRequest;
use baton_kernels::{Batch, CpuBackend, CpuOptions, Segment};
use baton_model::synthetic::write_checkpoint;
use baton_model::{Checkpoint, Slice, StepInput, StepOutput, StepRequest};
use baton_plan::{Contract, ContractOptions, HiddenDtype, IndexDtype, ModelConfig, Partition};

/// Tokens per KV block.
const BLOCK: usize = 16;
/// Most sequences at once.
const SEQUENCES: usize = 8;
/// Its config.
pub const CONFIG: &str = include_str!("model.json");

/// Writes the checkpoint, unless an earlier run has; returns its directory.
///
/// # Errors
/// When it cannot be written.
pub fn checkpoint(scratch: &Path) -> anyhow::Result<PathBuf> {
    let dir = scratch.join("bench-model");
    if std::fs::read_to_string(dir.join("config.json")).ok().as_deref() != Some(CONFIG) {
        write_checkpoint(CONFIG, 0, &dir).context("the benchmark's checkpoint")?;
    }
    Ok(dir)
}

/// One slice of all layers on the CPU backend.
pub struct Model {
    slice: Slice<CpuBackend>,
    context: usize,
    vocabulary: usize,
    step_id: u64,
}

impl Model {
    /// Loads a checkpoint, with room for eight sequences of `context` tokens.
    ///
    /// # Errors
    /// When it cannot be loaded.
    pub fn load(dir: &Path, context: usize, threads: Option<usize>) -> anyhow::Result<Self> {
        let config = ModelConfig::load(dir)?;
        let options = ContractOptions {
            hidden_dtype: HiddenDtype::F32,
            index_dtype: IndexDtype::I32,
            row_capacity: SEQUENCES * context,
            block_size: BLOCK,
        };
        let whole = Partition::from_counts(&[config.num_layers], config.num_layers)?;
        let mut contract = Contract::new(&config, &whole, &options)?;
        let stage = contract.stages.pop().context("a contract has a stage")?;
        let blocks = SEQUENCES * context.div_ceil(BLOCK);
        let backend = CpuBackend::new(CpuOptions { threads })?;
        let checkpoint = Checkpoint::open(dir)?;
        let slice = Slice::load(backend, &config, &checkpoint, stage, blocks, &mut |_| {})?;
        Ok(Self { slice, context, vocabulary: config.vocab_size, step_id: 0 })
    }

    /// The backend it runs on.
    #[must_use]
    pub fn backend(&self) -> &CpuBackend {
        self.slice.backend()
    }

    /// Runs `tokens` (as many for each sequence) from position `start` on; the most likely next token of each sequence.
    ///
    /// # Errors
    /// When the step fails.
    pub fn step(
        &mut self,
        sequences: usize,
        start: usize,
        tokens: &[u32],
    ) -> anyhow::Result<Vec<u32>> {
        self.step_id += 1;
        let rows = tokens.len() / sequences;
        let pages = self.context.div_ceil(BLOCK);
        let segments = (0..sequences).map(|s| Segment {
            first_row: s * rows,
            rows,
            start,
            blocks: (0..pages).map(|b| (s * pages + b) as u32).collect(),
        });
        let samples = (0..sequences).map(|s| SampleRequest {
            row: (s + 1) * rows - 1,
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            draw: 0,
            logprobs: None,
            banned: Vec::new(),
            adjustments: Default::default(),
        });
        let request = StepRequest {
            epoch: 1,
            step_id: self.step_id,
            batch: Batch { segments: segments.collect(), padding: 0, block_size: BLOCK },
            samples: samples.collect(),
            scores: Vec::new(),
        };
        match self.slice.forward(&request, StepInput::Tokens(tokens))? {
            StepOutput::Tokens { sampled, .. } => Ok(sampled.iter().map(|s| s.token).collect()),
            StepOutput::HandOff(_) => anyhow::bail!("a whole model answers with tokens"),
        }
    }

    /// Seconds of one pass over `context` tokens of one sequence.
    ///
    /// # Errors
    /// When a step fails.
    pub fn prefill(&mut self) -> anyhow::Result<f64> {
        let prompt = self.prompt(1, self.context);
        let start = Instant::now();
        self.step(1, 0, &prompt)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Seconds of `steps` greedy decode steps that end at `context`.
    ///
    /// # Errors
    /// When a step fails.
    pub fn decode(&mut self, sequences: usize, steps: usize) -> anyhow::Result<f64> {
        let before = self.context - steps;
        let prompt = self.prompt(sequences, before);
        let mut tokens = self.step(sequences, 0, &prompt)?;
        let start = Instant::now();
        for step in 0..steps {
            tokens = self.step(sequences, before + step, &tokens)?;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    fn prompt(&self, sequences: usize, length: usize) -> Vec<u32> {
        let vocabulary = self.vocabulary as u32;
        (0..(sequences * length) as u32)
            .map(|i| i.wrapping_mul(2_654_435_761) % vocabulary)
            .collect()
    }
}
