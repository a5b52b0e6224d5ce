//! Texts that follow a grammar: a JSON schema, a regular expression, a Lark grammar, or the form of tool calls.
//!
//! llguidance computes which tokens may come next. The model may reason first: while its reasoning is open everything is
//! allowed.

mod calls;
mod request;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use baton_coordinator::{Grammar, Matcher};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher as Engine, ParserFactory};

pub(crate) use calls::grammar as call_grammar;
pub(crate) use request::read;

use crate::tokenizer::TextTokenizer;

/// Longer ones are refused before anything is made of them.
const MOST_GRAMMAR_BYTES: usize = 1 << 20;

/// Makes grammars for one vocabulary.
pub(crate) struct Compiler {
    parsers: ParserFactory,
    tokenizer: Arc<TextTokenizer>,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").finish_non_exhaustive()
    }
}

impl Compiler {
    /// `vocab_size` are the rows of logits; ids without a text are never allowed.
    pub(crate) fn new(
        tokenizer: Arc<TextTokenizer>,
        vocab_size: usize,
        eos: &[u32],
    ) -> Result<Self, String> {
        let end = *eos.first().ok_or("the model has no eos id, so no text could end")?;
        let words: Vec<Vec<u8>> = (0..vocab_size as u32)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id);
                // Tags and role tokens are no text: they only come where the grammar names them.
                let marked = tokenizer.is_added(id) && !bytes.is_empty();
                let mark = marked.then_some(TokTrie::SPECIAL_TOKEN_MARKER);
                mark.into_iter().chain(bytes).collect()
            })
            .collect();
        let info = TokRxInfo::new(vocab_size as u32, end);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(eos);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut parsers = ParserFactory::new_simple(&environment).map_err(|e| e.to_string())?;
        parsers.quiet();
        Ok(Self { parsers, tokenizer })
    }

    /// Checks a grammar and makes it ready. `thinking` when the text begins inside the model's reasoning.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn compile(
        &self,
        grammar: TopLevelGrammar,
        thinking: bool,
        calls: bool,
    ) -> Result<Arc<dyn Grammar>, String> {
        let engine = Engine::new(self.parsers.create_parser(grammar));
        if let Some(error) = engine.get_error() {
            return Err(error.lines().next().unwrap_or_default().to_owned());
        }
        let reasoning = thinking.then(|| Reasoning {
            end: self.tokenizer.id_of_added("</think>"),
            call: self.tokenizer.id_of_added("<tool_call>").filter(|_| calls),
        });
        Ok(Arc::new(Compiled { engine, reasoning }))
    }
}

/// The tokens that end the free text before the grammar.
#[derive(Clone, Copy, Debug)]
struct Reasoning {
    end: Option<u32>,
    /// Ends it and begins the grammar's text at once.
    call: Option<u32>,
}

struct Compiled {
    engine: Engine,
    reasoning: Option<Reasoning>,
}

impl fmt::Debug for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiled").field("reasoning", &self.reasoning).finish_non_exhaustive()
    }
}

impl Grammar for Compiled {
    fn start(&self) -> Box<dyn Matcher> {
        Box::new(Compiled { engine: self.engine.deep_clone(), reasoning: self.reasoning })
    }
}

impl Matcher for Compiled {
    fn allowed(&mut self) -> Result<Option<Vec<u8>>, String> {
        if self.reasoning.is_some() {
            return Ok(None);
        }
        let mask = self.engine.compute_mask_or_eos().map_err(|e| e.to_string())?;
        if mask.is_zero() {
            return Err("the grammar allows no token here".into());
        }
        Ok(Some(mask.as_slice().iter().flat_map(|word| word.to_le_bytes()).collect()))
    }

    fn accept(&mut self, token: u32) -> Result<bool, String> {
        if let Some(reasoning) = self.reasoning {
            if Some(token) == reasoning.end {
                self.reasoning = None;
            }
            if Some(token) != reasoning.call {
                return Ok(false);
            }
            self.reasoning = None;
        }
        self.engine.consume_token(token).map_err(|e| e.to_string())?;
        Ok(self.engine.is_stopped())
    }
}
