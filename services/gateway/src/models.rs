//! `/v1/models`: the one model there is.

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::app::{App, AppState};
use crate::error::ApiError;

fn describe(app: &App) -> Value {
    json!({
        "id": app.config.model_name,
        "object": "model",
        "created": app.started,
        "owned_by": "baton",
        "root": app.config.model_dir,
        "parent": null,
        "max_model_len": app.config.max_positions,
    })
}

pub(crate) async fn list(State(app): State<AppState>) -> Json<Value> {
    Json(json!({"object": "list", "data": [describe(&app)]}))
}

pub(crate) async fn one(
    State(app): State<AppState>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if id != app.config.model_name {
        return Err(ApiError::unknown_model(&id, &app.config.model_name));
    }
    Ok(Json(describe(&app)))
}
