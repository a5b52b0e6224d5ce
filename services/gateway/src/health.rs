//! Whether this process and the pipeline behind it work.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use baton_coordinator::Readiness;
use baton_telemetry::metrics::CONTENT_TYPE;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::AppState;
use crate::error::ApiError;

/// Steps that are shown when nothing is said.
const STEPS: usize = 64;

/// This process answers.
pub(crate) async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// All stages make progress; otherwise 503 and what is missing.
pub(crate) async fn ready(State(app): State<AppState>) -> Response {
    match app.handle.readiness() {
        Readiness::Ready => Json(json!({"ready": true})).into_response(),
        Readiness::NotReady(reason) => (
            StatusCode::SERVICE_UNAVAILABLE,
            [(header::RETRY_AFTER, "5")],
            Json(json!({"ready": false, "reason": reason})),
        )
            .into_response(),
    }
}

/// The state of every stage, as the coordinator tells it.
pub(crate) async fn pipeline(State(app): State<AppState>) -> Json<Value> {
    Json(app.handle.pipeline().await)
}

/// How many steps are wanted.
#[derive(Debug, Deserialize)]
pub(crate) struct Last {
    last: Option<usize>,
}

/// The last steps and how every stage spent its time on them; `?last=N` for more or fewer.
pub(crate) async fn steps(
    State(app): State<AppState>,
    query: Result<Query<Last>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    let Query(Last { last }) = query.map_err(|rejection| {
        ApiError::invalid(format!(
            "\"last\": expected a number of steps: {}",
            rejection.body_text()
        ))
    })?;
    Ok(Json(app.handle.timeline().last(last.unwrap_or(STEPS))))
}

/// This process's metrics, in Prometheus' text format.
pub(crate) async fn metrics(State(app): State<AppState>) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], app.render_metrics()).into_response()
}

/// Where the stages answer `/metrics`, in the format of Prometheus' HTTP service discovery.
pub(crate) async fn targets(State(app): State<AppState>) -> Json<Value> {
    let state = app.handle.pipeline().await;
    let stages = state["stages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let target = |stage: &Value| {
        let address = stage["metrics"].as_str()?;
        let index = stage["index"].to_string();
        Some(json!({"targets": [address], "labels": {"__meta_baton_stage": index}}))
    };
    Json(stages.iter().filter_map(target).collect())
}
