//! Handing one request per choice to the coordinator and merging what comes back.

use std::pin::Pin;
use std::time::Duration;

use async_stream::try_stream;
use baton_coordinator::{CoordinatorHandle, Event, FinishReason, GenerateRequest, SubmitError};
use futures::stream::{Stream, StreamExt, select_all};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::app::App;
use crate::choice::{Choice, Piece};
use crate::error::ApiError;
use crate::metrics::Measured;
use crate::trace::RequestTrace;

/// How often a choice that found the queue full asks again, while earlier choices of its request are served.
const RETRY: Duration = Duration::from_millis(20);

/// A choice that is to be generated.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) request: GenerateRequest,
    pub(crate) choice: Choice,
}

/// Pieces of all choices of a request, each with its choice's index. An error ends the stream; dropping it cancels
/// what still runs.
pub(crate) type Pieces = Pin<Box<dyn Stream<Item = Result<(usize, Piece), ApiError>> + Send>>;

enum Source {
    Accepted(UnboundedReceiver<Event>),
    Waiting(Box<GenerateRequest>),
}

/// Submits all choices, in order. When the first is not taken the request is refused; when the queue fills up later,
/// the remaining choices wait for room, so that a batch larger than the queue is served too.
pub(crate) fn start(app: &App, plans: Vec<Plan>, trace: &RequestTrace) -> Result<Pieces, ApiError> {
    let handle = &app.handle;
    let mut streams: Vec<Pieces> = Vec::with_capacity(plans.len());
    let mut full = false;
    for (index, Plan { request, choice }) in plans.into_iter().enumerate() {
        let measured = app.metrics.submitted(request.prompt.len(), trace.clone());
        let source = if full {
            Source::Waiting(Box::new(request))
        } else {
            let spare = (index > 0).then(|| request.clone());
            match (handle.submit(request), spare) {
                (Ok(events), _) => Source::Accepted(events),
                (Err(SubmitError::Busy { .. }), Some(request)) => {
                    full = true;
                    Source::Waiting(Box::new(request))
                }
                (Err(error), _) => {
                    measured.rejected();
                    return Err(error.into());
                }
            }
        };
        streams.push(Box::pin(run(handle.clone(), index, source, choice, measured)));
    }
    Ok(Box::pin(select_all(streams)))
}

fn run(
    handle: CoordinatorHandle,
    index: usize,
    source: Source,
    mut choice: Choice,
    mut measured: Measured,
) -> impl Stream<Item = Result<(usize, Piece), ApiError>> + Send {
    try_stream! {
        let mut events = match source {
            Source::Accepted(events) => events,
            Source::Waiting(request) => submit_patiently(&handle, *request).await?,
        };
        loop {
            let event = events.recv().await.ok_or_else(|| {
                ApiError::unavailable("the pipeline gave the request up without a reason")
            })?;
            measured.hears(&event);
            if let Some(piece) = choice.push(event)? {
                let last = piece.finish.is_some();
                if let Some(reason) = piece.finish {
                    measured.finished(reason);
                    // A stop string ends the choice before the coordinator knows; this tells it.
                    events.close();
                }
                yield (index, piece);
                if last {
                    break;
                }
            }
        }
    }
}

async fn submit_patiently(
    handle: &CoordinatorHandle,
    request: GenerateRequest,
) -> Result<UnboundedReceiver<Event>, ApiError> {
    loop {
        match handle.submit(request.clone()) {
            Err(SubmitError::Busy { .. }) => tokio::time::sleep(RETRY).await,
            other => return other.map_err(ApiError::from),
        }
    }
}

/// Waits for all choices; each is one piece then.
pub(crate) async fn collect(mut pieces: Pieces, choices: usize) -> Result<Vec<Piece>, ApiError> {
    let mut finished: Vec<Piece> = (0..choices).map(|_| Piece::default()).collect();
    while let Some(item) = pieces.next().await {
        let (index, piece) = item?;
        let choice = &mut finished[index];
        choice.text.push_str(&piece.text);
        choice.tokens.extend(piece.tokens);
        choice.token_ids.extend(piece.token_ids);
        choice.finish = piece.finish;
        choice.cached_tokens = piece.cached_tokens;
    }
    Ok(finished)
}

/// OpenAI's word for why a choice ended.
pub(crate) fn reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}
