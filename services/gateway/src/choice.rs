//! One choice: the coordinator's events become pieces of text with their tokens.

use std::collections::VecDeque;
use std::sync::Arc;

use baton_coordinator::{Event, FinishReason, TokenLogprob};

use crate::detokenizer::Detokenizer;
use crate::error::ApiError;
use crate::stop::StopMatcher;
use crate::tokenizer::TextTokenizer;

/// A token with its scores and its place in the choice's text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ScoredToken {
    pub(crate) id: u32,
    /// Nothing for the first token of an echoed prompt, and where no scores were asked for.
    pub(crate) logprob: Option<f32>,
    /// The most likely tokens, best first.
    pub(crate) top: Vec<TokenLogprob>,
    /// Characters of the text before it.
    pub(crate) offset: usize,
}

/// What a choice grew by.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Piece {
    pub(crate) text: String,
    /// Tokens whose text is out, the echoed prompt's among them, and the id that ended the text. Tokens of a stop
    /// string are not.
    pub(crate) tokens: Vec<ScoredToken>,
    /// Every id generated since the last piece.
    pub(crate) token_ids: Vec<u32>,
    /// Set on the last piece.
    pub(crate) finish: Option<FinishReason>,
    /// Tokens of the prompt that needed no computing; known from the first piece on.
    pub(crate) cached_tokens: usize,
}

/// How a choice's tokens become text.
#[derive(Clone, Debug)]
pub(crate) struct TextOptions {
    pub(crate) stop: Vec<String>,
    /// Ids that may end the generation; as its last token they are not part of the text.
    pub(crate) terminators: Vec<u32>,
    pub(crate) skip_special_tokens: bool,
    /// Scores were asked for, so pieces go out for tokens without text too.
    pub(crate) scores: bool,
}

/// The echoed prompt, until its scores are complete.
#[derive(Debug)]
struct Echo {
    prompt: Vec<u32>,
    scores: Vec<(TokenLogprob, Vec<TokenLogprob>)>,
}

/// The state of one choice.
#[derive(Debug)]
pub(crate) struct Choice {
    options: TextOptions,
    detokenizer: Detokenizer,
    stop: StopMatcher,
    echo: Option<Echo>,
    /// A terminator that is not known yet to be the last token.
    terminator: Option<(TokenLogprob, Vec<TokenLogprob>)>,
    /// Tokens whose text is not out yet.
    waiting: VecDeque<ScoredToken>,
    token_ids: Vec<u32>,
    cached_tokens: usize,
    /// Characters that the tokens gave, and those of them that are out.
    decoded: usize,
    released: usize,
}

impl Choice {
    /// `echo` is the prompt when it shall precede the answer.
    pub(crate) fn new(
        tokenizer: Arc<TextTokenizer>,
        options: TextOptions,
        echo: Option<Vec<u32>>,
    ) -> Self {
        Self {
            detokenizer: Detokenizer::new(tokenizer),
            stop: StopMatcher::new(options.stop.clone()),
            echo: echo.map(|prompt| Echo { prompt, scores: Vec::new() }),
            options,
            terminator: None,
            waiting: VecDeque::new(),
            token_ids: Vec::new(),
            cached_tokens: 0,
            decoded: 0,
            released: 0,
        }
    }

    /// Takes the next event. `None` when there is nothing to show yet; after a piece with `finish` the choice is over.
    pub(crate) fn push(&mut self, event: Event) -> Result<Option<Piece>, ApiError> {
        let mut piece = Piece::default();
        match event {
            Event::Admitted { cached_tokens } => {
                self.cached_tokens = cached_tokens;
                return Ok(None);
            }
            Event::Expired => return Err(ApiError::expired()),
            Event::Prompt(scores) => {
                if let Some(echo) = &mut self.echo {
                    echo.scores.extend(scores);
                }
                return Ok(None);
            }
            Event::Failed { message, retryable: true } => {
                return Err(ApiError::unavailable(message));
            }
            Event::Failed { message, .. } => return Err(ApiError::internal(message)),
            Event::Token { token, top } => {
                self.show_prompt(&mut piece)?;
                self.token_ids.push(token.token);
                if let Some((token, top)) = self.terminator.take() {
                    self.show_token(token, top, &mut piece);
                }
                if self.options.terminators.contains(&token.token) {
                    self.terminator = Some((token, top));
                } else if piece.finish.is_none() {
                    self.show_token(token, top, &mut piece);
                }
            }
            Event::Finished(reason) => {
                self.show_prompt(&mut piece)?;
                let terminator = self.terminator.take();
                match terminator {
                    Some((token, top)) if reason != FinishReason::Stop => {
                        self.show_token(token, top, &mut piece);
                        self.finish(reason, &mut piece);
                    }
                    terminator => {
                        self.finish(reason, &mut piece);
                        self.score_terminator(terminator, &mut piece);
                    }
                }
            }
        }
        let shown = !piece.text.is_empty()
            || piece.finish.is_some()
            || (self.options.scores && !piece.tokens.is_empty());
        if !shown {
            // Tokens without text wait for the next piece that has some.
            for token in piece.tokens.into_iter().rev() {
                self.waiting.push_front(token);
            }
            return Ok(None);
        }
        piece.token_ids = std::mem::take(&mut self.token_ids);
        piece.cached_tokens = self.cached_tokens;
        Ok(Some(piece))
    }

    fn show_prompt(&mut self, piece: &mut Piece) -> Result<(), ApiError> {
        let Some(echo) = self.echo.take() else { return Ok(()) };
        if self.options.scores && echo.scores.len() + 1 != echo.prompt.len() {
            return Err(ApiError::internal(format!(
                "the pipeline scored {} of the prompt's {} tokens, expected all but the first",
                echo.scores.len(),
                echo.prompt.len()
            )));
        }
        let mut scores = echo.scores.into_iter();
        for (i, &id) in echo.prompt.iter().enumerate() {
            let (logprob, top) = match if i == 0 { None } else { scores.next() } {
                Some((own, top)) => (Some(own.logprob), top),
                None => (None, Vec::new()),
            };
            piece.tokens.push(ScoredToken { id, logprob, top, offset: self.decoded });
            let text = self.detokenizer.push(id, false);
            self.decoded += text.chars().count();
            piece.text.push_str(&text);
        }
        self.released = self.decoded;
        Ok(())
    }

    fn show_token(&mut self, token: TokenLogprob, top: Vec<TokenLogprob>, piece: &mut Piece) {
        self.waiting.push_back(ScoredToken {
            id: token.token,
            logprob: Some(token.logprob),
            top,
            offset: self.decoded,
        });
        let text = self.detokenizer.push(token.token, self.options.skip_special_tokens);
        if self.release(&text, piece) {
            piece.finish = Some(FinishReason::Stop);
        }
    }

    /// The id that ended the text has a score, but no text.
    fn score_terminator(
        &self,
        terminator: Option<(TokenLogprob, Vec<TokenLogprob>)>,
        piece: &mut Piece,
    ) {
        let Some((token, top)) = terminator else { return };
        piece.tokens.push(ScoredToken {
            id: token.token,
            logprob: Some(token.logprob),
            top,
            offset: self.decoded,
        });
    }

    fn finish(&mut self, reason: FinishReason, piece: &mut Piece) {
        if piece.finish.is_some() {
            return;
        }
        piece.finish = Some(reason);
        let rest = self.detokenizer.finish();
        if self.release(&rest, piece) {
            piece.finish = Some(FinishReason::Stop);
            return;
        }
        piece.text.push_str(&self.stop.finish());
        piece.tokens.extend(self.waiting.drain(..));
    }

    /// Passes new text through the stop strings; true when one of them ended the text.
    fn release(&mut self, text: &str, piece: &mut Piece) -> bool {
        self.decoded += text.chars().count();
        let released = self.stop.push(text);
        self.released += released.text.chars().count();
        piece.text.push_str(&released.text);
        while self.waiting.front().is_some_and(|token| token.offset < self.released) {
            piece.tokens.extend(self.waiting.pop_front());
        }
        if released.stopped {
            self.waiting.clear();
        }
        released.stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::tests::tokenizer;

    const EOS: u32 = 476;

    fn options() -> TextOptions {
        TextOptions {
            stop: vec![],
            terminators: vec![EOS],
            skip_special_tokens: true,
            scores: true,
        }
    }

    fn token(id: u32) -> Event {
        let token = TokenLogprob { token: id, logprob: -0.5 };
        Event::Token { token, top: vec![token] }
    }

    fn ids(text: &str) -> Vec<u32> {
        tokenizer().encode(text, false).unwrap()
    }

    /// Feeds the events and joins the pieces, up to and with the one that finishes.
    fn run(mut choice: Choice, events: impl IntoIterator<Item = Event>) -> Piece {
        let mut all = Piece::default();
        for event in events {
            let Some(piece) = choice.push(event).unwrap() else { continue };
            all.text.push_str(&piece.text);
            all.tokens.extend(piece.tokens);
            all.token_ids.extend(piece.token_ids);
            if piece.finish.is_some() {
                all.finish = piece.finish;
                break;
            }
        }
        all
    }

    fn generated(text: &str, reason: FinishReason) -> Vec<Event> {
        ids(text).into_iter().map(token).chain([Event::Finished(reason)]).collect()
    }

    #[test]
    fn offsets_count_characters_and_point_at_each_token_s_text() {
        let text = "één 🦀 the model";
        let all =
            run(Choice::new(tokenizer(), options(), None), generated(text, FinishReason::Length));
        assert_eq!((all.text.as_str(), all.finish), (text, Some(FinishReason::Length)));
        assert_eq!(all.tokens.iter().map(|t| t.id).collect::<Vec<_>>(), ids(text));
        for t in &all.tokens {
            let bytes = tokenizer().token_bytes(t.id);
            if let Ok(own) = std::str::from_utf8(&bytes) {
                let there: String = text.chars().skip(t.offset).take(own.chars().count()).collect();
                assert_eq!(own, there);
            }
        }
    }

    #[test]
    fn a_stop_string_drops_its_tokens_but_not_their_ids() {
        let options = TextOptions { stop: vec![" model".into()], ..options() };
        let all = run(
            Choice::new(tokenizer(), options, None),
            generated("the model answered", FinishReason::Length),
        );
        assert_eq!((all.text.as_str(), all.finish), ("the", Some(FinishReason::Stop)));
        assert!(all.tokens.iter().all(|t| t.offset < 3), "{:?}", all.tokens);
        assert!(all.token_ids.len() > all.tokens.len());
    }

    #[test]
    fn a_last_eos_is_counted_and_scored_but_not_shown() {
        let events = ids("Hi").into_iter().chain([EOS]).map(token);
        let events = events.chain([Event::Finished(FinishReason::Stop)]);
        let options = TextOptions { skip_special_tokens: false, ..options() };
        let all = run(Choice::new(tokenizer(), options, None), events);
        assert_eq!(all.text, "Hi");
        assert_eq!(all.token_ids.last(), Some(&EOS));
        let last = all.tokens.last().unwrap();
        assert_eq!((last.id, last.offset), (EOS, 2));
        assert_eq!(all.tokens.len(), all.token_ids.len());
    }

    #[test]
    fn a_terminator_that_ends_nothing_is_text() {
        let events = [EOS].into_iter().chain(ids("Hi")).map(token);
        let events = events.chain([Event::Finished(FinishReason::Length)]);
        let options = TextOptions { skip_special_tokens: false, ..options() };
        let all = run(Choice::new(tokenizer(), options, None), events);
        assert_eq!(all.text, "<|endoftext|>Hi");
    }

    #[test]
    fn echo_comes_first_with_its_scores_and_none_for_the_first_token() {
        let prompt = ids("[gMASK]<sop>the river");
        let scores = prompt[1..].iter().map(|&id| {
            let own = TokenLogprob { token: id, logprob: -1.0 };
            (own, vec![own])
        });
        let (head, tail): (Vec<_>, Vec<_>) = scores.enumerate().partition(|(i, _)| *i < 1);
        let strip = |v: Vec<(usize, _)>| v.into_iter().map(|(_, s)| s).collect::<Vec<_>>();
        let mut events = vec![Event::Prompt(strip(head)), Event::Prompt(strip(tail))];
        events.extend(generated(" runs", FinishReason::Length));
        let all = run(Choice::new(tokenizer(), options(), Some(prompt.clone())), events);
        assert_eq!(all.text, "[gMASK]<sop>the river runs");
        assert_eq!(all.tokens[0].logprob, None);
        assert!(all.tokens[1..].iter().all(|t| t.logprob.is_some()));
        assert_eq!(all.token_ids, ids(" runs"));
        assert_eq!(all.tokens[2].offset, "[gMASK]<sop>".len());
    }

    #[test]
    fn missing_prompt_scores_are_an_error_not_a_guess() {
        let mut choice = Choice::new(tokenizer(), options(), Some(ids("the river runs")));
        let error = choice.push(Event::Finished(FinishReason::Length)).unwrap_err();
        assert!(error.body()["error"]["message"].as_str().unwrap().contains("scored 0 of"));
    }

    #[test]
    fn echo_alone_with_nothing_generated() {
        let options = TextOptions { scores: false, ..options() };
        let choice = Choice::new(tokenizer(), options, Some(ids("the river")));
        let all = run(choice, [Event::Finished(FinishReason::Length)]);
        assert_eq!(all.text, "the river");
        assert!(all.token_ids.is_empty());
    }
}
