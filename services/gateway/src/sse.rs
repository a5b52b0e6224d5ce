//! Answers that arrive piece by piece, as server-sent events.

use std::convert::Infallible;

use async_stream::stream;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde_json::Value;

use crate::choice::Piece;
use crate::error::ApiError;
use crate::generate::Pieces;

/// How pieces become the chunks of one endpoint.
pub(crate) trait Chunks: Send + 'static {
    /// Chunks of a piece.
    fn piece(&mut self, index: usize, piece: Piece) -> Vec<Value>;
    /// What follows after the last piece, before the end mark.
    fn end(&mut self) -> Option<Value>;
    /// What follows a failure in the middle.
    fn failed(&mut self, error: &ApiError) -> Value {
        error.body()
    }
    /// Whether the stream ends with `[DONE]`.
    const END_MARK: bool = true;
}

/// Streams the pieces. Waits for the first one, so that a failure before it is an HTTP error; a later failure is an
/// error event, and the stream ends without its end mark.
pub(crate) async fn respond<C: Chunks>(
    mut pieces: Pieces,
    mut chunks: C,
) -> Result<Response, ApiError> {
    let mut next = pieces.next().await.transpose()?;
    let events = stream! {
        while let Some((index, piece)) = next.take() {
            for chunk in chunks.piece(index, piece) {
                yield Ok::<_, Infallible>(data(&chunk));
            }
            match pieces.next().await.transpose() {
                Ok(item) => next = item,
                Err(error) => {
                    yield Ok(data(&chunks.failed(&error)));
                    return;
                }
            }
        }
        if let Some(chunk) = chunks.end() {
            yield Ok(data(&chunk));
        }
        if C::END_MARK {
            yield Ok(Event::default().data("[DONE]"));
        }
    };
    Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response())
}

fn data(value: &Value) -> Event {
    // JSON text has no raw line breaks, so it is one data line.
    let event = Event::default().data(value.to_string());
    // Chunks of chats have no type; events of responses do, and clients may listen to it.
    match value.get("type").and_then(Value::as_str) {
        Some(name) => event.event(name),
        None => event,
    }
}
