//! A live request: its token log, its KV and its progress.

use tokio::sync::mpsc;

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
    /// Steps under way that have rows of it.
    pub(crate) in_flight: usize,
    /// Whether one of them samples.
    pub(crate) awaiting_token: bool,
}

/// Where its KV is.
#[derive(Debug, Default)]
pub(crate) struct KvState {
    pub(crate) blocks: Vec<u32>,
    /// Blocks that stages were told of.
    pub(crate) known: usize,
    /// Positions computed or under way.
    pub(crate) computed: usize,
}

impl Sequence {
    pub(crate) fn new(id: u64, submission: Submission) -> Self {
        let Submission { request, events, place } = submission;
        let tokens = request.prompt.clone();
        Self {
            id,
            request,
            events,
            place: Some(place),
            tokens,
            kv: KvState::default(),
            scored: 0,
            in_flight: 0,
            awaiting_token: false,
        }
    }

    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
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

    /// Tells the client; one that has gone is noticed at the next step.
    pub(crate) fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }
}
