//! A listener that answers `/metrics` alone, for processes without an HTTP API.

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::Metrics;

/// Answers `GET /metrics` until `stop`.
///
/// # Errors
/// When accepting connections fails for good.
pub async fn serve(
    listener: TcpListener,
    metrics: Metrics,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let answer = move || {
        let text = metrics.render();
        async move { ([(CONTENT_TYPE, super::CONTENT_TYPE)], text) }
    };
    let router = Router::new().route("/metrics", get(answer));
    // A scraper that holds its connection open is not waited for.
    tokio::select! {
        ended = axum::serve(listener, router).into_future() => ended,
        () = stop.cancelled() => Ok(()),
    }
}
