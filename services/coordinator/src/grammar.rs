//! What a grammar is to the scheduler: a mask of tokens before every draw.
//!
//! A sequence has one draw under way at most, so the mask for its next token is known before the step that draws it is made,
//! and travels in that step. Stages need no state of grammars, and recomputing after a preemption changes nothing.

use std::fmt::Debug;

/// A grammar that texts can follow; shared by the choices of a request.
pub trait Grammar: Debug + Send + Sync {
    /// A matcher at the beginning of a text.
    fn start(&self) -> Box<dyn Matcher>;
}

/// A place in one text.
pub trait Matcher: Debug + Send {
    /// The tokens that may come next: bit `id % 8` of byte `id / 8`. `None` when all may.
    ///
    /// # Errors
    /// When no token can continue the text, or the grammar is too hard to follow: one sentence.
    fn allowed(&mut self) -> Result<Option<Vec<u8>>, String>;

    /// Goes on behind a token that was drawn; true when the text is complete and nothing may follow.
    ///
    /// # Errors
    /// When the token does not continue the text: one sentence.
    fn accept(&mut self, token: u32) -> Result<bool, String>;
}
