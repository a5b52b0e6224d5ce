//! What a gateway serves, and with which limits.

use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_plan::ModelConfig;
use baton_telemetry::Traces;
use serde::Deserialize;
use thiserror::Error;

use crate::chat_template::TemplateError;
use crate::tokenizer::TokenizerError;

/// Why a gateway could not be set up.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GatewayError {
    /// A file of the checkpoint exists but cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A JSON file of the checkpoint does not hold what it should.
    #[error("{}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// The tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template cannot be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// Sampling values for requests that leave them out.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationDefaults {
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 0 is off.
    pub min_p: f32,
    /// Ids that end a generation beside those of `config.json`.
    pub stop_token_ids: Vec<u32>,
}

impl Default for GenerationDefaults {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, stop_token_ids: Vec::new() }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

#[derive(Deserialize)]
struct GenerationConfigFile {
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    eos_token_id: Option<OneOrMany>,
}

impl GenerationDefaults {
    /// Reads `generation_config.json` of a checkpoint; OpenAI's defaults hold for what it leaves out, or without it.
    ///
    /// # Errors
    /// When the file exists and cannot be read or parsed.
    pub fn from_model_dir(dir: &Path) -> Result<Self, GatewayError> {
        let path = dir.join("generation_config.json");
        let Some(text) = read_optional(&path)? else { return Ok(Self::default()) };
        let file: GenerationConfigFile =
            serde_json::from_str(&text).map_err(|source| GatewayError::Json { path, source })?;
        let defaults = Self::default();
        Ok(Self {
            temperature: file.temperature.unwrap_or(defaults.temperature),
            top_p: file.top_p.unwrap_or(defaults.top_p),
            top_k: file.top_k.unwrap_or(defaults.top_k),
            min_p: file.min_p.unwrap_or(defaults.min_p),
            stop_token_ids: match file.eos_token_id {
                None => Vec::new(),
                Some(OneOrMany::One(id)) => vec![id],
                Some(OneOrMany::Many(ids)) => ids,
            },
        })
    }
}

/// The file's text, or nothing when there is no such file.
pub(crate) fn read_optional(path: &Path) -> Result<Option<String>, GatewayError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(GatewayError::Read { path: path.to_owned(), source }),
    }
}

/// What one request may ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a request body.
    pub body_bytes: usize,
    /// How long a client may take to send its body.
    pub body_timeout: Duration,
    /// How long an answer may take; none for as long as it takes.
    pub request_timeout: Option<Duration>,
    /// Choices per prompt (`n`).
    pub choices_per_prompt: usize,
    /// Choices of one request: prompts times `n`.
    pub choices: usize,
    /// Stop strings.
    pub stop_strings: usize,
    /// Log-probabilities per token.
    pub logprobs: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 32 << 20,
            body_timeout: Duration::from_secs(60),
            request_timeout: None,
            choices_per_prompt: 128,
            choices: 4096,
            stop_strings: 16,
            logprobs: 20,
        }
    }
}

/// What a gateway serves.
#[derive(Clone, Debug)]
pub struct GatewayConfig {
    /// Checkpoint directory with `tokenizer.json` and, for chat, a template.
    pub model_dir: PathBuf,
    /// Name of the model in requests and answers.
    pub model_name: String,
    /// Longest context, prompt and answer together, in tokens.
    pub max_positions: usize,
    /// Ids a prompt may hold are below this.
    pub vocab_size: usize,
    /// Ids that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Sampling values for requests that leave them out.
    pub defaults: GenerationDefaults,
    /// What one request may ask for.
    pub limits: Limits,
    /// Spans of requests.
    pub traces: Traces,
}

impl GatewayConfig {
    /// A gateway for this checkpoint, with the checkpoint's own sampling defaults and the standard limits.
    ///
    /// # Errors
    /// When `generation_config.json` exists and cannot be read or parsed.
    pub fn new(
        model_dir: impl Into<PathBuf>,
        model_name: impl Into<String>,
        model: &ModelConfig,
    ) -> Result<Self, GatewayError> {
        let model_dir = model_dir.into();
        Ok(Self {
            defaults: GenerationDefaults::from_model_dir(&model_dir)?,
            model_dir,
            model_name: model_name.into(),
            max_positions: model.max_positions,
            vocab_size: model.vocab_size,
            eos_token_ids: model.eos_token_ids.clone(),
            limits: Limits::default(),
            traces: Traces::off(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_means_openai_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let defaults = GenerationDefaults::from_model_dir(dir.path()).unwrap();
        assert_eq!(defaults, GenerationDefaults::default());
    }

    #[test]
    fn the_checkpoint_s_values_win() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(
            dir.path().join("generation_config.json"),
            r#"{"temperature": 0.6, "top_p": 0.95, "eos_token_id": [3, 4], "pad_token_id": 3}"#,
        )
        .unwrap();
        let defaults = GenerationDefaults::from_model_dir(dir.path()).unwrap();
        assert_eq!((defaults.temperature, defaults.top_p, defaults.top_k), (0.6, 0.95, 0));
        assert_eq!(defaults.stop_token_ids, [3, 4]);
    }

    #[test]
    fn a_broken_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("generation_config.json"), r#"{"top_p": "high"}"#).unwrap();
        let error = GenerationDefaults::from_model_dir(dir.path()).unwrap_err().to_string();
        assert!(error.contains("generation_config.json") && error.contains("high"), "{error}");
    }
}
