//! Ids to text, one id at a time, without ever splitting a character.

use std::sync::Arc;

use crate::tokenizer::TextTokenizer;

/// Turns a growing list of ids into a growing text. All pieces together equal the decoding of all ids at once.
#[derive(Debug)]
pub(crate) struct Detokenizer {
    tokenizer: Arc<TextTokenizer>,
    /// Bytes of a character that is not complete yet.
    partial: Vec<u8>,
    window: Window,
}

impl Detokenizer {
    pub(crate) fn new(tokenizer: Arc<TextTokenizer>) -> Self {
        Self { tokenizer, partial: Vec::new(), window: Window::default() }
    }

    /// The characters that this id completes. An id flagged special adds nothing when `skip_special`.
    pub(crate) fn push(&mut self, id: u32, skip_special: bool) -> String {
        if skip_special && self.tokenizer.is_special(id) {
            return String::new();
        }
        match self.tokenizer.bytes(id) {
            Some(bytes) => {
                self.partial.extend_from_slice(bytes);
                take_complete(&mut self.partial)
            }
            None => self.window.push(&self.tokenizer, id),
        }
    }

    /// The end: what is left of an incomplete character becomes U+FFFD.
    pub(crate) fn finish(&mut self) -> String {
        let mut text = String::from_utf8_lossy(&std::mem::take(&mut self.partial)).into_owned();
        text.push_str(&self.window.finish(&self.tokenizer));
        text
    }
}

/// Takes every character out of `bytes` that later bytes cannot change; invalid bytes become U+FFFD.
fn take_complete(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut taken = 0;
    while let Err(error) = std::str::from_utf8(&bytes[taken..]) {
        let valid = taken + error.valid_up_to();
        text.push_str(&String::from_utf8_lossy(&bytes[taken..valid]));
        taken = valid;
        let Some(invalid) = error.error_len() else {
            bytes.drain(..taken);
            return text;
        };
        text.push(char::REPLACEMENT_CHARACTER);
        taken += invalid;
    }
    text.push_str(&String::from_utf8_lossy(&bytes[taken..]));
    bytes.clear();
    text
}

/// For tokenizers whose ids depend on their neighbours (a leading space that is dropped at the start): decodes a
/// window of ids twice, with and without the newest.
#[derive(Debug, Default)]
struct Window {
    ids: Vec<u32>,
    /// How many of `ids` are out already; they give the rest its context.
    out: usize,
}

impl Window {
    fn push(&mut self, tokenizer: &TextTokenizer, id: u32) -> String {
        self.ids.push(id);
        let (before, now) = self.decode(tokenizer);
        if now.len() <= before.len() || now.ends_with(char::REPLACEMENT_CHARACTER) {
            return String::new();
        }
        self.ids.drain(..self.out);
        self.out = self.ids.len();
        now.get(before.len()..).unwrap_or_default().to_owned()
    }

    fn finish(&mut self, tokenizer: &TextTokenizer) -> String {
        let (before, now) = self.decode(tokenizer);
        self.ids.clear();
        self.out = 0;
        now.get(before.len()..).unwrap_or_default().to_owned()
    }

    fn decode(&self, tokenizer: &TextTokenizer) -> (String, String) {
        // Specials were filtered before; an id the tokenizer cannot decode has no text.
        let decode = |ids: &[u32]| tokenizer.decode(ids, false).unwrap_or_default();
        (decode(&self.ids[..self.out]), decode(&self.ids))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tokenizer::tests::tokenizer;

    fn stream(ids: &[u32], skip_special: bool) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(tokenizer());
        let mut pieces: Vec<String> =
            ids.iter().map(|&id| detokenizer.push(id, skip_special)).collect();
        pieces.push(detokenizer.finish());
        pieces
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_ids_give_the_text_of_the_whole(
            ids in prop::collection::vec(0u32..510, 0..40),
            skip in any::<bool>(),
        ) {
            let whole = tokenizer().decode(&ids, skip).unwrap();
            prop_assert_eq!(stream(&ids, skip).concat(), whole);
        }

        #[test]
        fn text_survives_without_replacement_characters(text in "\\PC{0,24}") {
            let ids = tokenizer().encode(&text, false).unwrap();
            prop_assert_eq!(stream(&ids, false).concat(), text);
        }
    }

    #[test]
    fn a_character_of_several_ids_comes_whole() {
        let ids = tokenizer().encode("a🦀b", false).unwrap();
        assert!(ids.len() > 3, "the fixture must split the crab: {ids:?}");
        let pieces = stream(&ids, true);
        assert!(pieces.iter().all(|p| !p.contains(char::REPLACEMENT_CHARACTER)), "{pieces:?}");
        assert_eq!(pieces.iter().filter(|p| p.contains('🦀')).count(), 1);
    }

    #[test]
    fn an_unfinished_character_is_shown_at_the_end() {
        let ids = tokenizer().encode("🦀", false).unwrap();
        let pieces = stream(&ids[..ids.len() - 1], true);
        let (last, held) = pieces.split_last().unwrap();
        assert!(held.iter().all(String::is_empty), "{pieces:?}");
        assert_eq!(last, "\u{fffd}");
    }

    #[test]
    fn invalid_bytes_do_not_hold_up_what_follows() {
        let mut bytes = vec![0x80, b'a', 0xe2, 0x82, b'b', 0xf0, 0x9f];
        assert_eq!(take_complete(&mut bytes), "\u{fffd}a\u{fffd}b");
        assert_eq!(bytes, [0xf0, 0x9f]);
    }

    /// A vocabulary of words whose leading space is dropped at the start, with bytes for what it lacks.
    fn words() -> Arc<TextTokenizer> {
        let tokenizer = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ]},
            "model": {"type": "WordLevel", "unk_token": "?", "vocab": {
                "?": 0, "\u{2581}the": 1, "\u{2581}river": 2, "s": 3,
                "<0xC3>": 4, "<0xA9>": 5, "\u{2581}": 6,
            }},
        });
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        Arc::new(TextTokenizer::load(dir.path()).unwrap())
    }

    #[test]
    fn tokenizers_that_are_not_byte_level_keep_their_spaces() {
        let words = words();
        assert!(words.bytes(1).is_none());
        let ids = [1, 2, 3, 6, 4, 5, 1, 1];
        let mut detokenizer = Detokenizer::new(words.clone());
        let mut pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id, true)).collect();
        pieces.push(detokenizer.finish());
        assert_eq!(pieces.concat(), words.decode(&ids, true).unwrap());
        assert_eq!(pieces, ["the", " river", "s", " ", "", "\u{e9}", " the", " the", ""]);
    }
}
