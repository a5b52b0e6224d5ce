//! What transformers answered; `tests/oracle/README.md` describes the files.

use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use safetensors::SafeTensors;
use serde::Deserialize;

/// Recorded answers for one checkpoint.
#[derive(Clone, Debug, Deserialize)]
pub struct Oracle {
    /// `F` or `S` per layer.
    pub schedule: String,
    /// Prompts of several lengths.
    pub prompts: Vec<OraclePrompt>,
}

/// One prompt and what follows it.
#[derive(Clone, Debug, Deserialize)]
pub struct OraclePrompt {
    /// `short`, `equal`, `above`, `mid` or `long`, in relation to `index_topk`.
    pub name: String,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Log-probability of each prompt token after those before it; the first has none.
    pub logprobs: Vec<Option<f64>>,
    /// Greedy continuation.
    pub greedy: Vec<u32>,
    /// Log-probabilities of the continuation.
    pub greedy_logprobs: Vec<f64>,
}

impl Oracle {
    /// The answers recorded under this name.
    ///
    /// # Errors
    /// When there are none or the file is not as described.
    pub fn load(name: &str) -> anyhow::Result<Self> {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("oracle/answers/{name}.json"));
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        serde_json::from_str(&text).with_context(|| path.display().to_string())
    }

    /// Index rows that transformers used at a layer: positions ascending, then -1, `index_topk` per token.
    ///
    /// # Errors
    /// When they are not recorded.
    pub fn index_rows(name: &str, prompt: &str, layer: usize) -> anyhow::Result<Vec<Vec<i32>>> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(format!("oracle/answers/{name}.safetensors"));
        let file = std::fs::read(&path).with_context(|| path.display().to_string())?;
        let tensors = SafeTensors::deserialize(&file)?;
        let index = tensors.tensor(&format!("{prompt}.index"))?;
        let [layers, tokens, topk] = *index.shape() else {
            bail!("{prompt}.index has shape {:?}", index.shape());
        };
        ensure!(layer < layers, "layer {layer} of {layers}");
        let layer = index.data().chunks_exact(tokens * topk * 4).nth(layer).context("a layer")?;
        let value = |b: &[u8]| b.iter().rev().fold(0, |value, &byte| value << 8 | i32::from(byte));
        Ok(layer
            .chunks_exact(topk * 4)
            .map(|row| row.chunks_exact(4).map(value).collect())
            .collect())
    }

    /// The prompt of this name.
    ///
    /// # Errors
    /// When there is none.
    pub fn prompt(&self, name: &str) -> anyhow::Result<&OraclePrompt> {
        self.prompts.iter().find(|p| p.name == name).with_context(|| format!("prompt {name:?}"))
    }
}
