//! What is read and what is copied.

use std::path::{Path, PathBuf};

use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;
use tokenizers::Tokenizer;

use crate::error::VerifyError;

/// Text to read when none is given: written for this project.
pub const PASSAGE: &str = include_str!("passage.txt");
/// The copy task of a checkpoint directory.
const COPY_FILE: &str = "copy_task.json";
/// The one of the demo model serves every model that brings none.
const COPY_TASK: &str = include_str!("../../../tests/models/demo/copy_task.json");

/// How a list of words is to be repeated.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct CopyTask {
    /// The prompt around `{words}`.
    prompt: String,
    /// The answer around `{words}`; it ends with what ends the copy.
    answer: String,
    words: Vec<String>,
}

/// A prompt and the text that must follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopyTrial {
    pub(crate) prompt: String,
    pub(crate) answer: String,
}

impl CopyTask {
    /// The directory's own task, or the built-in one.
    pub(crate) fn load(directory: Option<&Path>) -> Result<Self, VerifyError> {
        let own = directory.map(|d| d.join(COPY_FILE)).filter(|path| path.exists());
        let (path, text) = match own {
            Some(path) => {
                let text = read(&path)?;
                (path, text)
            }
            None => (PathBuf::from(COPY_FILE), COPY_TASK.to_owned()),
        };
        let task: Self = serde_json::from_str(&text)
            .map_err(|e| VerifyError::File { path: path.clone(), reason: e.to_string() })?;
        if task.words.is_empty() || !task.prompt.contains("{words}") {
            let reason = "expected a list of words and a prompt around {words}".to_owned();
            return Err(VerifyError::File { path, reason });
        }
        Ok(task)
    }

    /// Lists of `count` words; no word comes twice while there are others.
    pub(crate) fn trials(&self, count: usize, trials: usize) -> Vec<CopyTrial> {
        let mut random = ChaCha8Rng::seed_from_u64(count as u64);
        (0..trials)
            .map(|_| {
                let mut words = self.words.clone();
                words.shuffle(&mut random);
                while words.len() < count {
                    words.push(self.words[random.random_range(0..self.words.len())].clone());
                }
                let list = words[..count].join(" ");
                CopyTrial {
                    prompt: self.prompt.replace("{words}", &list),
                    answer: self.answer.replace("{words}", &list),
                }
            })
            .collect()
    }
}

/// A text file, or the built-in passage.
pub(crate) fn passage(file: Option<&Path>) -> Result<String, VerifyError> {
    file.map_or_else(|| Ok(PASSAGE.to_owned()), read)
}

/// The tokenizer of a checkpoint directory.
pub(crate) fn tokenizer(directory: &Path) -> Result<Tokenizer, VerifyError> {
    let path = directory.join("tokenizer.json");
    Tokenizer::from_file(&path).map_err(|e| VerifyError::File { path, reason: e.to_string() })
}

/// Token ids of a text, without special tokens around it.
pub(crate) fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, VerifyError> {
    let encoded = tokenizer.encode(text, false).map_err(|e| VerifyError::File {
        path: PathBuf::from("tokenizer.json"),
        reason: e.to_string(),
    })?;
    Ok(encoded.get_ids().to_vec())
}

/// The text of token ids.
pub(crate) fn decode(tokenizer: &Tokenizer, ids: &[u32]) -> Result<String, VerifyError> {
    tokenizer.decode(ids, false).map_err(|e| VerifyError::File {
        path: PathBuf::from("tokenizer.json"),
        reason: e.to_string(),
    })
}

/// Characters that two texts have in common at their beginning.
pub(crate) fn common_prefix(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).count()
}

fn read(path: &Path) -> Result<String, VerifyError> {
    std::fs::read_to_string(path)
        .map_err(|e| VerifyError::File { path: path.to_owned(), reason: e.to_string() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use super::*;

    #[test]
    fn lists_are_the_same_every_time_and_no_word_comes_twice() {
        let task = CopyTask::load(None).unwrap();
        let trials = task.trials(50, 3);
        assert_eq!(trials, task.trials(50, 3));
        assert_ne!(trials[0], trials[1]);
        let mut words: Vec<&str> = trials[0].answer.split_whitespace().collect();
        assert!(trials[0].prompt.contains(&words.join(" ")));
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 50);
    }

    #[test]
    fn a_list_longer_than_the_words_repeats_some() {
        let words = vec!["a".to_owned(), "b".to_owned()];
        let task = CopyTask { prompt: "{words}:".into(), answer: "{words}".into(), words };
        assert_eq!(task.trials(5, 1)[0].answer.split(' ').count(), 5);
    }

    #[test]
    fn a_task_without_words_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let text = r#"{"prompt": "no place", "answer": "", "words": ["a"]}"#;
        std::fs::write(dir.path().join(COPY_FILE), text).unwrap();
        let error = CopyTask::load(Some(dir.path())).unwrap_err().to_string();
        assert!(error.contains(COPY_FILE) && error.contains("{words}"), "{error}");
    }

    #[test]
    fn prefixes_are_counted_in_characters() {
        assert_eq!(common_prefix("äbc", "äbd"), 2);
        assert_eq!(common_prefix("", "x"), 0);
    }
}
