//! What a person sees who opens the address: a live page in a browser, a few lines of text elsewhere.

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use baton_coordinator::Readiness;

use crate::app::AppState;

/// The page asks `/pipeline` and `/pipeline/steps` for everything that it shows, and nobody else for anything.
const PAGE: &str = include_str!("page.html");
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page for whoever takes HTML, text for everybody else.
pub(crate) async fn page(State(app): State<AppState>, headers: HeaderMap) -> Response {
    let vary = (header::VARY, "accept");
    let accepted = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    if accepted.is_some_and(|accepted| accepted.contains("text/html")) {
        let headers = [
            vary,
            (header::CONTENT_TYPE, "text/html; charset=utf-8"),
            (header::CONTENT_SECURITY_POLICY, POLICY),
        ];
        return (headers, PAGE).into_response();
    }
    ([vary], text(&app)).into_response()
}

fn text(app: &AppState) -> String {
    let state = match app.handle.readiness() {
        Readiness::Ready => "ready".to_owned(),
        Readiness::NotReady(reason) => format!("not ready: {reason}"),
    };
    format!(
        "baton serves {} ({state})\n\n\
         POST /v1/completions        POST /v1/chat/completions\n\
         POST /tokenize              POST /detokenize\n\
         GET  /v1/models             GET  /pipeline\n\
         GET  /health                GET  /ready\n\
         GET  /metrics               GET  /pipeline/steps\n",
        app.config.model_name
    )
}
