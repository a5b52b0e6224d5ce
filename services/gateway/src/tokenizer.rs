//! The checkpoint's tokenizer: text to ids, ids to bytes.

use std::path::{Path, PathBuf};

use thiserror::Error;
use tokenizers::{DecoderWrapper, Tokenizer};

/// Why a checkpoint's tokenizer cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// `tokenizer.json` is missing, unreadable or not a tokenizer.
    #[error("cannot load {}: {reason}", path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// What the tokenizer library said.
        reason: String,
    },
    /// A text or ids that the tokenizer does not take.
    #[error("cannot tokenize: {0}")]
    Text(String),
}

/// A loaded `tokenizer.json`.
#[derive(Debug)]
pub(crate) struct TextTokenizer {
    inner: Tokenizer,
    /// What each id stands for; `None` when ids do not stand for bytes one by one.
    pieces: Option<ByteTable>,
    special: Vec<bool>,
    /// Ids that are no pieces of text, but tokens of their own: role tokens, tags.
    added: Vec<bool>,
}

/// The bytes of every id, one after the other.
#[derive(Debug)]
struct ByteTable {
    bytes: Vec<u8>,
    starts: Vec<usize>,
}

impl ByteTable {
    fn get(&self, id: u32) -> &[u8] {
        match self.starts.get(id as usize..id as usize + 2) {
            Some(&[start, end]) => &self.bytes[start..end],
            _ => &[],
        }
    }
}

impl TextTokenizer {
    /// Loads `tokenizer.json` of a checkpoint directory.
    pub(crate) fn load(model_dir: &Path) -> Result<Self, TokenizerError> {
        let path = model_dir.join("tokenizer.json");
        let mut inner = Tokenizer::from_file(&path)
            .map_err(|e| TokenizerError::Load { path: path.clone(), reason: e.to_string() })?;
        // A prompt is taken whole: neither cut nor filled up, whatever the file was saved with.
        inner
            .with_truncation(None)
            .map_err(|e| TokenizerError::Load { path, reason: e.to_string() })?;
        inner.with_padding(None);
        let highest = inner.get_vocab(true).into_values().max().unwrap_or(0);
        let mut special = vec![false; highest as usize + 1];
        let mut added = special.clone();
        for (id, token) in inner.get_added_tokens_decoder() {
            if let Some(flag) = special.get_mut(id as usize) {
                *flag = token.special;
                added[id as usize] = true;
            }
        }
        let pieces = matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_)))
            .then(|| byte_table(&inner, highest));
        Ok(Self { inner, pieces, special, added })
    }

    /// Ids of a text; `add_special` runs the file's post-processor, which may add tokens around it.
    pub(crate) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|e| TokenizerError::Text(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of ids; incomplete characters become U+FFFD.
    pub(crate) fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        self.inner.decode(ids, skip_special).map_err(|e| TokenizerError::Text(e.to_string()))
    }

    /// The bytes an id adds to the text, when the tokenizer works on bytes.
    pub(crate) fn bytes(&self, id: u32) -> Option<&[u8]> {
        self.pieces.as_ref().map(|table| table.get(id))
    }

    /// Whether the id is flagged special, so that answers leave it out.
    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Whether the id is a token of its own rather than a piece of text.
    pub(crate) fn is_added(&self, id: u32) -> bool {
        self.added.get(id as usize).copied().unwrap_or(false)
    }

    /// The id of a token of its own.
    pub(crate) fn id_of_added(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text).filter(|id| self.is_added(*id))
    }

    /// The vocabulary's own spelling of an id; empty for ids that have none.
    pub(crate) fn raw_token(&self, id: u32) -> String {
        self.inner.id_to_token(id).unwrap_or_default()
    }

    /// What one id stands for on its own: its bytes, whole or not.
    pub(crate) fn token_bytes(&self, id: u32) -> Vec<u8> {
        match self.bytes(id) {
            Some(bytes) => bytes.to_vec(),
            None => self.decode(&[id], false).unwrap_or_default().into_bytes(),
        }
    }
}

fn byte_table(inner: &Tokenizer, highest: u32) -> ByteTable {
    let alphabet = byte_alphabet();
    let mut table = ByteTable { bytes: Vec::new(), starts: vec![0] };
    for id in 0..=highest {
        if let Some(token) = inner.id_to_token(id) {
            // Added tokens may hold characters outside the alphabet; then the token is its own text, as in the decoder.
            let bytes: Option<Vec<u8>> = token
                .chars()
                .map(|c| alphabet.binary_search_by_key(&c, |&(c, _)| c).ok().map(|i| alphabet[i].1))
                .collect();
            table.bytes.extend(bytes.unwrap_or_else(|| token.into_bytes()));
        }
        table.starts.push(table.bytes.len());
    }
    table
}

/// The printable character that stands for each byte in a byte-level vocabulary, sorted by character.
///
/// Bytes that are printable in Latin-1 stand for themselves; the others take the code points from 256 on, in order.
fn byte_alphabet() -> Vec<(char, u8)> {
    let mut next = 256;
    let mut alphabet: Vec<(char, u8)> = (0..=255u8)
        .map(|byte| {
            let code = match byte {
                b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => u32::from(byte),
                _ => {
                    next += 1;
                    next - 1
                }
            };
            (char::from_u32(code).expect("code points below 512 are characters"), byte)
        })
        .collect();
    alphabet.sort_unstable();
    alphabet
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use super::*;

    /// The fixture's directory.
    pub(crate) fn fixture() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
    }

    pub(crate) fn tokenizer() -> Arc<TextTokenizer> {
        Arc::new(TextTokenizer::load(&fixture()).unwrap())
    }

    #[test]
    fn the_table_agrees_with_the_decoder_for_every_id() {
        let tokenizer = tokenizer();
        for id in 0..tokenizer.special.len() as u32 + 3 {
            let table = String::from_utf8_lossy(tokenizer.bytes(id).unwrap()).into_owned();
            assert_eq!(table, tokenizer.decode(&[id], false).unwrap(), "id {id}");
        }
    }

    #[test]
    fn the_alphabet_covers_every_byte_once() {
        let alphabet = byte_alphabet();
        let mut bytes: Vec<u8> = alphabet.iter().map(|&(_, b)| b).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert!(alphabet.windows(2).all(|w| w[0].0 < w[1].0));
        assert_eq!(alphabet.iter().find(|(_, b)| *b == b' ').unwrap().0, 'Ġ');
    }

    #[test]
    fn thinking_tags_are_not_special_and_role_tokens_are() {
        let tokenizer = tokenizer();
        let id = |text: &str| match tokenizer.encode(text, false).unwrap()[..] {
            [id] => id,
            ref ids => panic!("{text} is {ids:?}"),
        };
        assert!(!tokenizer.is_special(id("<think>")));
        assert!(!tokenizer.is_special(id("<tool_call>")));
        assert!(tokenizer.is_special(id("<|user|>")));
    }

    #[test]
    fn a_missing_tokenizer_is_named() {
        let error = TextTokenizer::load(Path::new("/nonexistent")).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/tokenizer.json"), "{error}");
    }
}
