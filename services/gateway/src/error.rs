//! Errors as the client sees them: OpenAI's shape, with a status that says whose fault it is.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use baton_coordinator::SubmitError;
use serde_json::{Value, json};

/// An answer that is an error.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    retry_after: Option<u16>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// 400: the request as a whole is wrong.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400: this field is wrong.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::invalid(message) }
    }

    /// 400: the field asks for something that is not built.
    pub(crate) fn unsupported(param: &str, accepted: &str) -> Self {
        let message = format!("{param:?} is not supported here; leave it out or send {accepted}");
        Self { code: Some("unsupported_parameter"), ..Self::field(param, message) }
    }

    /// 400: prompt and answer do not fit.
    pub(crate) fn too_long(param: &str, message: String) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::field(param, message) }
    }

    /// 404: another model.
    pub(crate) fn unknown_model(asked: &str, served: &str) -> Self {
        Self {
            param: Some("model".into()),
            code: Some("model_not_found"),
            ..Self::new(
                StatusCode::NOT_FOUND,
                "invalid_request_error",
                format!("the model {asked:?} does not exist; this server has {served:?}"),
            )
        }
    }

    /// A client error with a status of its own: 404, 405, 408, 413, 415.
    pub(crate) fn client(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    /// 503: the same request may succeed later.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self {
            code: Some("service_unavailable"),
            retry_after: Some(5),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
        }
    }

    /// 504: the time that the client or the server allows is over.
    pub(crate) fn expired() -> Self {
        Self {
            code: Some("deadline_exceeded"),
            ..Self::new(
                StatusCode::GATEWAY_TIMEOUT,
                "timeout_error",
                "the answer was not complete when its time was over",
            )
        }
    }

    /// 500: our fault.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self {
            code: Some("internal_error"),
            ..Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
        }
    }

    /// The body, as it is also sent inside a stream.
    pub(crate) fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::Invalid(_) => Self::invalid(message),
            SubmitError::Busy { .. } => Self {
                code: Some("rate_limit_exceeded"),
                retry_after: Some(1),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
            },
            _ => Self::unavailable(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if self.status.is_server_error() {
            tracing::warn!(status = self.status.as_u16(), reason = %self.message, "request failed");
        }
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
