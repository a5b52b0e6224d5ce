//! What the gateway asks for and what it hears back.

use std::sync::Arc;
use std::time::Instant;

use thiserror::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

use crate::grammar::Grammar;
use crate::state::StateReader;
use crate::timeline::Timeline;

/// One sequence to generate. The default is a greedy one without prompt and length.
#[derive(Clone, Debug, Default)]
pub struct GenerateRequest {
    /// Prompt; not empty.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most; 0 only scores the prompt.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Log-probabilities of this many most likely tokens beside each generated token's own.
    pub logprobs: Option<usize>,
    /// The same for prompt tokens (echo); the first prompt token has none.
    pub prompt_logprobs: Option<usize>,
    /// Ids that end the generation; the id itself is not part of the text.
    pub stop_token_ids: Vec<u32>,
    /// Keep going at the model's eos ids: they may not be chosen.
    pub ignore_eos: bool,
    /// Neither eos nor stop ids may be chosen before this many tokens.
    pub min_tokens: usize,
    /// Which texts may be generated.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// Requests with lower numbers go first.
    pub priority: i32,
    /// When the client needs the answer no more.
    pub deadline: Option<Instant>,
    /// Only requests with the same salt share cached prefixes.
    pub cache_salt: String,
    /// W3C trace context of the request; empty when there is none.
    pub traceparent: String,
}

/// How the next token is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 0 is off.
    pub min_p: f32,
    /// Fixes the text; drawn at random by the gateway when the client gives none.
    pub seed: u64,
    /// Subtracted once from the logit of every generated token; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted for every time a token was generated; 0 is off.
    pub frequency_penalty: f32,
    /// Makes tokens of prompt and answer less likely when above 1; 1 is off.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    /// Greedy.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
        }
    }
}

/// A token and its log-probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// What happens to a request, in this order: `Admitted`, `Prompt` (when asked for), `Token`..., then one `Finished`, `Expired`
/// or `Failed`; the last two may come at any time.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It runs for the first time.
    Admitted {
        /// Tokens of its prompt whose KV was there already.
        cached_tokens: usize,
    },
    /// Scores of prompt tokens `1..`, in order; may come in several pieces.
    Prompt(Vec<(TokenLogprob, Vec<TokenLogprob>)>),
    /// One generated token; the id that ends the generation comes as one too, before `Finished`.
    Token {
        /// The token and its log-probability.
        token: TokenLogprob,
        /// The most likely tokens, best first.
        top: Vec<TokenLogprob>,
    },
    /// The end.
    Finished(FinishReason),
    /// The end: the deadline has passed.
    Expired,
    /// The end, too early: one sentence for the client. `retryable` when the same request may succeed later.
    Failed {
        /// What went wrong.
        message: String,
        /// Whether it is worth trying again.
        retryable: bool,
    },
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An eos or stop id.
    Stop,
    /// `max_tokens`, or the longest context.
    Length,
}

/// A request that was not taken.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SubmitError {
    /// It can never be served: a client error.
    #[error("{0}")]
    Invalid(String),
    /// Not now: the pipeline is not ready.
    #[error("the pipeline is not ready: {0}")]
    NotReady(String),
    /// Not now: too much waits already.
    #[error("{waiting} requests wait already, the limit is {limit}")]
    Busy {
        /// Requests in the queue.
        waiting: usize,
        /// Its limit.
        limit: usize,
    },
}

/// Whether the pipeline makes progress, and what is missing when it does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// All stages make progress.
    Ready,
    /// One sentence that names what is missing.
    NotReady(String),
}

/// A request on its way to the scheduler, with the channel for its events. Dropping the receiver cancels it.
#[derive(Debug)]
pub struct Submission {
    /// The request.
    pub request: GenerateRequest,
    /// Where its events go.
    pub events: mpsc::UnboundedSender<Event>,
    /// Its place in the queue.
    pub place: Place,
}

/// A place in the queue of waiting requests, free again when dropped: when the request runs for the first time, or ends.
#[derive(Debug, Default)]
pub struct Place {
    _permit: Option<OwnedSemaphorePermit>,
}

/// The gateway's way in. Cheap to clone.
#[derive(Clone, Debug)]
pub struct CoordinatorHandle {
    submissions: mpsc::Sender<Submission>,
    /// Places that are free, of as many as the channel holds.
    places: Arc<Semaphore>,
    readiness: watch::Receiver<Readiness>,
    pipeline: StateReader,
    timeline: Timeline,
}

impl CoordinatorHandle {
    /// A handle and its other ends. The coordinator makes one; tests of the gateway drive one themselves. As many requests may
    /// wait as the channel holds.
    #[must_use]
    pub fn new(
        submissions: mpsc::Sender<Submission>,
        readiness: watch::Receiver<Readiness>,
        pipeline: StateReader,
        timeline: Timeline,
    ) -> Self {
        let places = Arc::new(Semaphore::new(submissions.max_capacity()));
        Self { submissions, places, readiness, pipeline, timeline }
    }

    /// Whether the pipeline makes progress.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        self.readiness.borrow().clone()
    }

    /// The state of every stage, as `/pipeline` shows it.
    pub async fn pipeline(&self) -> serde_json::Value {
        self.pipeline.read().await
    }

    /// The last steps, and how every stage spent its time on them.
    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Hands a request to the scheduler.
    ///
    /// # Errors
    /// When the pipeline is not ready or the queue is full.
    pub fn submit(
        &self,
        request: GenerateRequest,
    ) -> Result<mpsc::UnboundedReceiver<Event>, SubmitError> {
        if let Readiness::NotReady(reason) = self.readiness() {
            return Err(SubmitError::NotReady(reason));
        }
        let limit = self.submissions.max_capacity();
        let busy = || SubmitError::Busy { waiting: limit, limit };
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| busy())?;
        let place = Place { _permit: Some(place) };
        let (events, receiver) = mpsc::unbounded_channel();
        let submission = Submission { request, events, place };
        self.submissions.try_send(submission).map_err(|e| match e {
            mpsc::error::TrySendError::Full(_) => busy(),
            mpsc::error::TrySendError::Closed(_) => {
                SubmitError::NotReady("the coordinator has stopped".into())
            }
        })?;
        Ok(receiver)
    }
}
