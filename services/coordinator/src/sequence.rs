//! A live request: its token log, its KV and its progress.

use std::collections::HashMap;
use std::time::{Instant, SystemTime};

use tokio::sync::mpsc;

use crate::grammar::Matcher;
use crate::prefix::BlockHashes;
use crate::request::{Event, GenerateRequest, Place, Submission};

/// One sequence. The token log is all that is needed to compute it anew.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// Id in steps; a new one after preemption, so that stages never confuse the two lives.
    pub(crate) id: u64,
    pub(crate) request: GenerateRequest,
    pub(crate) events: mpsc::UnboundedSender<Event>,
    /// Its place in the queue until it runs.
    pub(crate) place: Option<Place>,
    /// Prompt, then generated tokens.
    pub(crate) tokens: Vec<u32>,
    pub(crate) kv: KvState,
    /// Prompt rows whose targets were asked for.
    pub(crate) scored: usize,
    /// Prompt rows whose scores the client has heard.
    pub(crate) scores_told: usize,
    /// Steps under way that have rows of it.
    pub(crate) in_flight: usize,
    /// Whether one of them samples.
    pub(crate) awaiting_token: bool,
    /// The step that last had rows of it.
    pub(crate) served: u64,
    /// Failures of the pipeline since it last made progress.
    pub(crate) setbacks: u32,
    /// Whether it has run before.
    pub(crate) admitted: bool,
    /// Since when it waits for rows in a step; only of a request with a trace context.
    pub(crate) queued: Option<SystemTime>,
    /// Hashes of its full blocks; none when it has no part in the prefix cache.
    pub(crate) hashes: Option<BlockHashes>,
    pub(crate) matcher: Option<Box<dyn Matcher>>,
    /// What the grammar allows next.
    pub(crate) mask: Option<Vec<u8>>,
    /// Distinct tokens and how often each was generated, kept when penalties want it.
    pub(crate) seen: Option<HashMap<u32, u32>>,
}

/// Where its KV is.
#[derive(Debug, Default)]
pub(crate) struct KvState {
    pub(crate) blocks: Vec<u32>,
    /// Blocks that stages were told of.
    pub(crate) known: usize,
    /// Positions computed or under way.
    pub(crate) computed: usize,
    /// Positions that all stages have computed.
    pub(crate) committed: usize,
    /// Blocks that the cache was told of.
    pub(crate) published: usize,
}

impl Sequence {
    pub(crate) fn new(id: u64, submission: Submission) -> Self {
        let Submission { request, events, place } = submission;
        let tokens = request.prompt.clone();
        let sampling = &request.sampling;
        let penalised = sampling.presence_penalty != 0.0
            || sampling.frequency_penalty != 0.0
            || sampling.repetition_penalty != 1.0;
        // Only repetition counts the prompt.
        let prompt = if sampling.repetition_penalty == 1.0 { &[][..] } else { &tokens[..] };
        let seen = penalised.then(|| prompt.iter().map(|&token| (token, 0)).collect());
        let matcher = request.grammar.as_ref().map(|grammar| grammar.start());
        let queued = (!request.traceparent.is_empty()).then(SystemTime::now);
        Self {
            id,
            request,
            events,
            place: Some(place),
            tokens,
            kv: KvState::default(),
            scored: 0,
            scores_told: 0,
            in_flight: 0,
            awaiting_token: false,
            served: 0,
            setbacks: 0,
            admitted: false,
            queued,
            hashes: None,
            matcher,
            mask: None,
            seen,
        }
    }

    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Lower goes first.
    pub(crate) fn priority(&self) -> i32 {
        self.request.priority
    }

    /// Rows that can be computed now.
    pub(crate) fn ready_rows(&self) -> usize {
        if self.awaiting_token { 0 } else { self.tokens.len() - self.kv.computed }
    }

    /// Whether it has its prompt behind it: one row per step.
    pub(crate) fn is_decoding(&self) -> bool {
        self.awaiting_token || self.kv.computed + 1 == self.tokens.len() && self.generated() > 0
    }

    pub(crate) fn cancelled(&self) -> bool {
        self.events.is_closed()
    }

    pub(crate) fn expired(&self, now: Instant) -> bool {
        self.request.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Asks the grammar for the next token's mask.
    pub(crate) fn prepare_mask(&mut self) -> Result<(), String> {
        if let Some(matcher) = &mut self.matcher {
            self.mask = matcher.allowed()?;
        }
        Ok(())
    }

    /// Steps under way will not be answered: goes back to what the client has heard.
    pub(crate) fn rewind(&mut self) -> Result<(), String> {
        self.setbacks += 1;
        self.in_flight = 0;
        self.served = 0;
        self.scored = self.scores_told;
        if std::mem::take(&mut self.awaiting_token) {
            // The step took the mask with it.
            self.prepare_mask()?;
        }
        Ok(())
    }

    /// Tells the client; one that has gone is noticed at the next step.
    pub(crate) fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }
}
