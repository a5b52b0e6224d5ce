//! Any two OpenAI-compatible servers, through `/v1/completions`.

use std::path::PathBuf;
use std::time::Instant;

use serde_json::{Value, json};

use crate::Progress;
use crate::error::VerifyError;
use crate::local::LISTS;
use crate::report::{Copies, Loss, Prefix, Report, Speed, Verdict};
use crate::server::Server;
use crate::text::{CopyTask, common_prefix, passage};

/// Segments whose beginning is continued, and tokens to write.
const CONTINUATIONS: usize = 4;
const WRITTEN: usize = 64;
/// Tokens that a word may take.
const PER_WORD: usize = 8;

/// What to compare.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// Base URL of the server in question.
    pub endpoint: String,
    /// Base URL of the one that is taken to be right.
    pub reference: String,
    /// Model names, where the servers have several.
    pub model: Option<String>,
    /// The reference's, when it goes by another name there.
    pub reference_model: Option<String>,
    /// Key for both.
    pub api_key: Option<String>,
    /// Text to read; a built-in passage when absent.
    pub text: Option<PathBuf>,
    /// Characters of a segment: past `index_topk` tokens, within the context.
    pub segment: usize,
    /// Lists to copy, per length.
    pub trials: usize,
    /// Largest difference of the mean loss that counts as rounding.
    pub tolerance: f64,
}

/// Compares both.
///
/// # Errors
/// When a server cannot be reached, does not speak the API, or tokenizes otherwise than the other.
pub async fn verify(
    options: &RemoteOptions,
    progress: Progress<'_>,
) -> Result<Report, VerifyError> {
    let text = passage(options.text.as_deref())?;
    let segments = cut(&text, options.segment);
    if segments.is_empty() {
        return Err(VerifyError::ShortText { found: 0, expected: 1 });
    }
    let key = options.api_key.as_deref();
    let reference_model = options.reference_model.as_ref().or(options.model.as_ref());
    let mut reference = Side::connect(&options.reference, reference_model, key).await?;
    let mut candidate = Side::connect(&options.endpoint, options.model.as_ref(), key).await?;
    let loss = read(&mut reference, &mut candidate, &segments, options.tolerance, progress).await?;
    let mut copies = Vec::new();
    let task = CopyTask::load(None)?;
    for (at, words) in LISTS.into_iter().enumerate() {
        let trials = options.trials;
        let mut found = Copies { words, trials, reference: 0, candidate: 0, identical: 0 };
        for (trial, list) in task.trials(words, trials).iter().enumerate() {
            progress("copying", at * trials + trial, LISTS.len() * trials);
            let limit = PER_WORD * words;
            let ours = candidate.generate(&list.prompt, limit, &["\n"]).await?;
            let theirs = reference.generate(&list.prompt, limit, &["\n"]).await?;
            found.reference += usize::from(theirs.trim() == list.answer.trim());
            found.candidate += usize::from(ours.trim() == list.answer.trim());
            found.identical += usize::from(ours == theirs);
        }
        copies.push(found);
    }
    let mut prefixes = Vec::new();
    for (at, segment) in segments.iter().take(CONTINUATIONS).enumerate() {
        progress("continuing", at, segments.len().min(CONTINUATIONS));
        let ours = candidate.generate(segment, WRITTEN, &[]).await?;
        let theirs = reference.generate(segment, WRITTEN, &[]).await?;
        prefixes.push(Prefix { common: common_prefix(&theirs, &ours), of: theirs.chars().count() });
    }
    let report = Report {
        reference: reference.name(),
        candidate: candidate.name(),
        reproduced: None,
        carries: Vec::new(),
        first_diverging_layer: None,
        loss,
        copies,
        prefixes,
        reference_speed: reference.speed(),
        candidate_speed: candidate.speed(),
        differences: Vec::new(),
        verdict: Verdict::Same,
    };
    Ok(report.decide(false))
}

/// Pieces of about `length` characters that end with a sentence; the last one is dropped when it is short.
fn cut(text: &str, length: usize) -> Vec<String> {
    let mut pieces = Vec::new();
    let mut piece = String::new();
    for sentence in text.split_inclusive(". ") {
        piece.push_str(sentence);
        if piece.chars().count() >= length {
            pieces.push(std::mem::take(&mut piece));
        }
    }
    if pieces.is_empty() && !piece.trim().is_empty() {
        pieces.push(piece);
    }
    pieces
}

async fn read(
    reference: &mut Side,
    candidate: &mut Side,
    segments: &[String],
    tolerance: f64,
    progress: Progress<'_>,
) -> Result<Loss, VerifyError> {
    let mut sums: Vec<([f64; 2], usize)> = Vec::new();
    for (at, segment) in segments.iter().enumerate() {
        progress("reading", at, segments.len());
        let theirs = reference.score(segment).await?;
        let ours = candidate.score(segment).await?;
        if theirs.tokens != ours.tokens {
            let at = theirs.tokens.iter().zip(&ours.tokens).take_while(|(a, b)| a == b).count();
            return Err(VerifyError::Incomparable(format!(
                "they tokenize the same text to {} and {} tokens, from token {at} on",
                theirs.tokens.len(),
                ours.tokens.len()
            )));
        }
        for (at, pair) in theirs.logprobs.iter().zip(&ours.logprobs).enumerate() {
            if sums.len() <= at {
                sums.push(([0.0; 2], 0));
            }
            let (sum, count) = &mut sums[at];
            sum[0] -= pair.0;
            sum[1] -= pair.1;
            *count += 1;
        }
    }
    let tokens: usize = sums.iter().map(|(_, count)| count).sum();
    let total =
        |side: usize| sums.iter().map(|(sum, _)| sum[side]).sum::<f64>() / tokens.max(1) as f64;
    Ok(Loss {
        segments: segments.len(),
        tokens,
        reference: total(0),
        candidate: total(1),
        difference: total(1) - total(0),
        tolerance,
        by_position: sums.iter().map(|(sum, n)| sum.map(|side| side / *n as f64)).collect(),
    })
}

/// One server and what it took.
struct Side {
    server: Server,
    read: (usize, f64),
    written: (usize, f64),
}

/// A prompt's tokens and their log-probabilities, the first token's left out.
struct Scores {
    tokens: Vec<String>,
    logprobs: Vec<f64>,
}

impl Side {
    async fn connect(
        base: &str,
        model: Option<&String>,
        key: Option<&str>,
    ) -> Result<Self, VerifyError> {
        let server = Server::connect(base, model.map(String::as_str), key).await?;
        Ok(Self { server, read: (0, 0.0), written: (0, 0.0) })
    }

    fn name(&self) -> String {
        format!("{} ({})", self.server.url(), self.server.model())
    }

    /// Log-probabilities of a text: it is sent as the prompt and asked back.
    async fn score(&mut self, text: &str) -> Result<Scores, VerifyError> {
        let body = json!({
            "model": self.server.model(),
            "prompt": text,
            // Not every server takes 0.
            "max_tokens": 1,
            "temperature": 0,
            "echo": true,
            "logprobs": 1,
        });
        let begun = Instant::now();
        let answer = self.server.post("/v1/completions", &body).await?;
        let count = answer["usage"]["prompt_tokens"].as_u64().unwrap_or(0) as usize;
        let logprobs = &answer["choices"][0]["logprobs"];
        let tokens: Vec<String> = logprobs["tokens"]
            .as_array()
            .into_iter()
            .flatten()
            .take(count)
            .map(|token| token.as_str().unwrap_or_default().to_owned())
            .collect();
        let scored: Vec<f64> = logprobs["token_logprobs"]
            .as_array()
            .into_iter()
            .flatten()
            .take(count)
            .skip(1)
            .filter_map(Value::as_f64)
            .collect();
        if count < 2 || tokens.len() != count || scored.len() + 1 != count {
            return Err(self.server.failed(format!(
                "it does not answer echo with log-probabilities: a prompt of {count} tokens came back with {} tokens \
                 and {} log-probabilities",
                tokens.len(),
                scored.len()
            )));
        }
        self.read.0 += count;
        self.read.1 += begun.elapsed().as_secs_f64();
        Ok(Scores { tokens, logprobs: scored })
    }

    /// A greedy continuation.
    async fn generate(
        &mut self,
        prompt: &str,
        limit: usize,
        stop: &[&str],
    ) -> Result<String, VerifyError> {
        let mut body = json!({
            "model": self.server.model(),
            "prompt": prompt,
            "max_tokens": limit,
            "temperature": 0,
        });
        if !stop.is_empty() {
            body["stop"] = json!(stop);
        }
        let begun = Instant::now();
        let answer = self.server.post("/v1/completions", &body).await?;
        let text = answer["choices"][0]["text"]
            .as_str()
            .ok_or_else(|| self.server.failed("/v1/completions answered without choices[0].text"))?
            .to_owned();
        let tokens = answer["usage"]["completion_tokens"].as_u64().unwrap_or(0);
        self.written.0 += tokens as usize;
        self.written.1 += begun.elapsed().as_secs_f64();
        Ok(text)
    }

    fn speed(&self) -> Speed {
        let per_second = |(tokens, seconds): (usize, f64)| tokens as f64 / f64::max(seconds, 1e-9);
        Speed { prefill: per_second(self.read), decode: per_second(self.written) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_end_with_sentences_and_a_short_rest_is_dropped() {
        let pieces = cut("One two. Three four. Five. Six", 12);
        assert_eq!(pieces, ["One two. Three four. "]);
        assert_eq!(cut("Short.", 100), ["Short."]);
        assert!(cut("  ", 10).is_empty());
    }
}
