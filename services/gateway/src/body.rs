//! Taking a JSON object from a request body.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};

use crate::app::AppState;
use crate::error::ApiError;
use crate::fields::Fields;

/// The body's JSON object; every way it can be wrong is a client error in OpenAI's shape.
pub(crate) struct JsonFields(pub(crate) Fields);

impl FromRequest<AppState> for JsonFields {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &AppState) -> Result<Self, ApiError> {
        check_content_type(request.headers())?;
        let limits = &app.config.limits;
        let bytes = tokio::time::timeout(limits.body_timeout, Bytes::from_request(request, app))
            .await
            .map_err(|_| {
                ApiError::client(
                    StatusCode::REQUEST_TIMEOUT,
                    format!("the request body did not arrive within {:?}", limits.body_timeout),
                )
            })?
            .map_err(|rejection| match rejection.status() {
                StatusCode::PAYLOAD_TOO_LARGE => ApiError::client(
                    StatusCode::PAYLOAD_TOO_LARGE,
                    format!("the request body is larger than {} bytes", limits.body_bytes),
                ),
                _ => ApiError::invalid(format!("cannot read the request body: {rejection}")),
            })?;
        let value = serde_json::from_slice(&bytes)
            .map_err(|e| ApiError::invalid(format!("the request body is not valid JSON: {e}")))?;
        Fields::new(value).map(Self)
    }
}

fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let content_type =
        headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence == "application/json"
        || (essence.starts_with("application/") && essence.ends_with("+json"))
    {
        return Ok(());
    }
    Err(ApiError::client(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        format!("the content type is {content_type:?}, expected \"application/json\""),
    ))
}
