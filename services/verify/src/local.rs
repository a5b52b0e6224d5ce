//! The uncut model beside a cut pipeline, both in this process.

use std::path::{Path, PathBuf};
use std::time::Instant;

use baton_plan::{ModelConfig, Partition};
use tokenizers::Tokenizer;

use crate::Progress;
use crate::error::VerifyError;
pub use crate::pipeline::Device;
use crate::pipeline::{Answer, CHUNK, Pipeline};
use crate::report::{Carries, Copies, Loss, Prefix, Report, Speed, Verdict};
use crate::text::{CopyTask, common_prefix, decode, encode, passage, tokenizer};

/// Words in the lists to copy.
pub(crate) const LISTS: [usize; 3] = [10, 25, 50];
/// Tokens of a segment, unless the model takes fewer or chooses more.
const SEGMENT: usize = 512;
/// Tokens at the end of a segment that come one by one, as in decoding.
const SINGLE: usize = 16;
/// Segments whose beginning is continued, how much of it is given and how much is written.
const CONTINUATIONS: usize = 4;
const GIVEN: usize = 128;
const WRITTEN: usize = 64;
/// Largest difference of the mean loss that counts as none.
const TOLERANCE: f64 = 0.0005;
/// As above, between two devices.
const DEVICE_TOLERANCE: f64 = 0.005;

/// A fault to reproduce on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reproduce {
    /// What stock engines do: index rows are not carried over a cut, and a stage reads what its own last full layer left
    /// in an earlier step.
    Stale,
}

/// What to verify.
#[derive(Clone, Debug)]
pub struct LocalOptions {
    /// Checkpoint directory.
    pub directory: PathBuf,
    /// How it is cut.
    pub partition: Partition,
    /// A fault to reproduce.
    pub reproduce: Option<Reproduce>,
    /// Text to read; a built-in passage when absent.
    pub text: Option<PathBuf>,
    /// Lists to copy, per length.
    pub trials: usize,
    /// Where the cut pipeline runs.
    pub device: Device,
    /// Where the uncut model runs. On another device than the cut one, answers are compared as those of two servers:
    /// likelihoods and copies within a tolerance, and not every bit.
    pub reference_device: Device,
}

/// Runs both and compares.
///
/// # Errors
/// When the model cannot be loaded or run, or the text is too short.
pub fn verify(options: &LocalOptions, progress: Progress<'_>) -> Result<Report, VerifyError> {
    let directory = &options.directory;
    let config = ModelConfig::load(directory)?;
    let tokenizer = tokenizer(directory)?;
    let segment = SEGMENT.max(4 * config.index_topk).min(config.max_positions);
    let tokens = encode(&tokenizer, &passage(options.text.as_deref())?)?;
    let least = (config.index_topk + 2 * SINGLE).min(segment);
    if tokens.len() < least {
        return Err(VerifyError::ShortText { found: tokens.len(), expected: least });
    }
    let whole = Partition::from_counts(&[config.num_layers], config.num_layers)?;
    let stale = options.reproduce == Some(Reproduce::Stale);
    let longest = config.max_positions.min(2 * segment);
    let load = |partition, device, stale| {
        Pipeline::load(directory, &config, partition, longest, device, stale)
    };
    let exact = options.device == options.reference_device;
    let mut sides = Sides {
        reference: load(&whole, options.reference_device, false)?,
        candidate: load(&options.partition, options.device, stale)?,
        times: [Times::default(); 2],
    };
    let mut carries = cuts(&config, &options.partition);
    let (mut loss, first_diverging_layer) =
        read(&mut sides, &tokens, segment, least, &mut carries, progress)?;
    if !exact {
        loss.tolerance = DEVICE_TOLERANCE;
    }
    let copies = copy(&mut sides, directory, &tokenizer, options.trials, longest, progress)?;
    let prefixes = continuations(&mut sides, &tokenizer, &tokens, segment, progress)?;
    let split: Vec<String> =
        options.partition.slices().iter().map(|s| s.len().to_string()).collect();
    let [reference, candidate] = sides.times;
    let report = Report {
        reference: format!("{}, uncut, on {}", directory.display(), options.reference_device),
        candidate: format!(
            "{}, split {}, on {}",
            directory.display(),
            split.join(","),
            options.device
        ),
        reproduced: stale
            .then(|| "stale index rows at every cut inside a run of shared layers".into()),
        carries,
        first_diverging_layer,
        loss,
        copies,
        prefixes,
        reference_speed: reference.speed(),
        candidate_speed: candidate.speed(),
        differences: Vec::new(),
        verdict: Verdict::Same,
    };
    Ok(report.decide(exact))
}

struct Sides {
    reference: Pipeline,
    candidate: Pipeline,
    times: [Times; 2],
}

#[derive(Clone, Copy, Debug, Default)]
struct Times {
    read: (usize, f64),
    written: (usize, f64),
}

impl Times {
    fn speed(self) -> Speed {
        let per_second = |(tokens, seconds): (usize, f64)| tokens as f64 / f64::max(seconds, 1e-9);
        Speed { prefill: per_second(self.read), decode: per_second(self.written) }
    }
}

impl Sides {
    /// The same step on both.
    fn step(
        &mut self,
        tokens: &[u32],
        start: usize,
        targets: &[u32],
    ) -> Result<[Answer; 2], VerifyError> {
        let mut answers = [Answer::default(), Answer::default()];
        let pipelines = [&mut self.reference, &mut self.candidate];
        for ((pipeline, answer), times) in
            pipelines.into_iter().zip(&mut answers).zip(&mut self.times)
        {
            let begun = Instant::now();
            *answer = pipeline.step(tokens, start, targets)?;
            if tokens.len() > 1 {
                times.read.0 += tokens.len();
                times.read.1 += begun.elapsed().as_secs_f64();
            }
        }
        Ok(answers)
    }

    /// A greedy continuation on each.
    fn generate(
        &mut self,
        prompt: &[u32],
        limit: usize,
        stop: impl Fn(&[u32]) -> bool,
    ) -> Result<[Vec<u32>; 2], VerifyError> {
        let mut texts = [Vec::new(), Vec::new()];
        let pipelines = [&mut self.reference, &mut self.candidate];
        for ((pipeline, text), times) in pipelines.into_iter().zip(&mut texts).zip(&mut self.times)
        {
            let begun = Instant::now();
            *text = pipeline.generate(prompt, limit, &stop)?;
            // The prompt costs what reading costs.
            let per_token = times.read.1 / times.read.0.max(1) as f64;
            let prompt = per_token * prompt.len() as f64;
            times.written.0 += text.len();
            times.written.1 += f64::max(begun.elapsed().as_secs_f64() - prompt, 0.0);
        }
        Ok(texts)
    }
}

/// The stages, with no row compared yet.
fn cuts(config: &ModelConfig, partition: &Partition) -> Vec<Carries> {
    partition
        .slices()
        .iter()
        .enumerate()
        .map(|(stage, layers)| Carries {
            stage,
            layers: [layers.start, layers.end],
            from_layer: (!config.schedule.is_full(layers.start))
                .then(|| config.schedule.source(layers.start)),
            ..Carries::default()
        })
        .collect()
}

/// Reads the text in segments, compares the index rows and layers of every step, and the log-probabilities.
fn read(
    sides: &mut Sides,
    tokens: &[u32],
    segment: usize,
    least: usize,
    carries: &mut [Carries],
    progress: Progress<'_>,
) -> Result<(Loss, Option<usize>), VerifyError> {
    let segments: Vec<&[u32]> = tokens.chunks(segment).filter(|s| s.len() >= least).collect();
    let mut sums: Vec<([f64; 2], usize)> = vec![([0.0; 2], 0); segment];
    let mut first_diverging: Option<usize> = None;
    for (at, tokens) in segments.iter().enumerate() {
        progress("reading", at, segments.len());
        let mut start = 0;
        while start < tokens.len() {
            // The last ones come one by one.
            let left = tokens.len() - start;
            let rows = if left > SINGLE { CHUNK.min(left - SINGLE) } else { 1 };
            let end = start + rows;
            let targets = &tokens[start + 1..(end + 1).min(tokens.len())];
            let [reference, candidate] = sides.step(&tokens[start..end], start, targets)?;
            for (row, scores) in reference.scores.iter().zip(&candidate.scores).enumerate() {
                let (sum, count) = &mut sums[start + row];
                sum[0] -= f64::from(*scores.0);
                sum[1] -= f64::from(*scores.1);
                *count += 1;
            }
            compare_rows(&reference, &candidate, rows > 1, carries);
            let diverging = reference
                .seen
                .hidden
                .iter()
                .find(|(layer, digest)| candidate.seen.hidden.get(layer) != Some(digest));
            if let Some((&layer, _)) = diverging {
                first_diverging = Some(first_diverging.map_or(layer, |first| first.min(layer)));
            }
            start = end;
        }
    }
    let tokens: usize = sums.iter().map(|(_, count)| count).sum();
    let total =
        |side: usize| sums.iter().map(|(sum, _)| sum[side]).sum::<f64>() / tokens.max(1) as f64;
    let loss = Loss {
        segments: segments.len(),
        tokens,
        reference: total(0),
        candidate: total(1),
        difference: total(1) - total(0),
        tolerance: TOLERANCE,
        by_position: sums
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(sum, count)| sum.map(|side| side / *count as f64))
            .collect(),
    };
    Ok((loss, first_diverging))
}

/// Counts the index rows that a stage began with and that the uncut model computed as well.
fn compare_rows(reference: &Answer, candidate: &Answer, prefill: bool, carries: &mut [Carries]) {
    for carries in carries {
        let Some(layer) = carries.from_layer else { continue };
        let (Some(computed), Some(found)) =
            (reference.seen.chosen.get(&layer), candidate.seen.entered.get(&carries.stage))
        else {
            continue;
        };
        let due = candidate.seen.long;
        if due == 0 {
            continue;
        }
        let width = computed.len() / due;
        let pairs = computed.chunks_exact(width).zip(found.chunks_exact(width));
        let rows = if prefill { &mut carries.prefill } else { &mut carries.decode };
        rows.all += due;
        rows.equal += pairs.filter(|(computed, found)| computed == found).count();
    }
}

fn copy(
    sides: &mut Sides,
    directory: &Path,
    tokenizer: &Tokenizer,
    trials: usize,
    longest: usize,
    progress: Progress<'_>,
) -> Result<Vec<Copies>, VerifyError> {
    let task = CopyTask::load(Some(directory))?;
    let mut found = Vec::new();
    for (at, words) in LISTS.into_iter().enumerate() {
        let mut copies = Copies { words, trials: 0, reference: 0, candidate: 0, identical: 0 };
        for (trial, list) in task.trials(words, trials).iter().enumerate() {
            progress("copying", at * trials + trial, LISTS.len() * trials);
            let prompt = encode(tokenizer, &list.prompt)?;
            let answer = encode(tokenizer, &list.answer)?;
            // A model with a short context or long tokens cannot hold the list.
            if prompt.len() + answer.len() > longest {
                continue;
            }
            let texts = sides.generate(&prompt, answer.len(), |text| !answer.starts_with(text))?;
            copies.trials += 1;
            copies.reference += usize::from(texts[0] == answer);
            copies.candidate += usize::from(texts[1] == answer);
            copies.identical += usize::from(texts[0] == texts[1]);
        }
        if copies.trials > 0 {
            found.push(copies);
        }
    }
    Ok(found)
}

fn continuations(
    sides: &mut Sides,
    tokenizer: &Tokenizer,
    tokens: &[u32],
    segment: usize,
    progress: Progress<'_>,
) -> Result<Vec<Prefix>, VerifyError> {
    let beginnings: Vec<&[u32]> =
        tokens.chunks(segment).filter(|s| s.len() > GIVEN).take(CONTINUATIONS).collect();
    let mut found = Vec::new();
    for (at, tokens) in beginnings.iter().enumerate() {
        progress("continuing", at, beginnings.len());
        let [reference, candidate] = sides
            .generate(&tokens[..GIVEN], WRITTEN, |_| false)?
            .map(|ids| decode(tokenizer, &ids));
        let (reference, candidate) = (reference?, candidate?);
        found.push(Prefix {
            common: common_prefix(&reference, &candidate),
            of: reference.chars().count(),
        });
    }
    Ok(found)
}
