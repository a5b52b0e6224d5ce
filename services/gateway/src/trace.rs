//! The root span of a request, its id, and both in its log lines.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use axum::extract::{FromRequestParts, MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use baton_telemetry::Traces;
use baton_telemetry::metrics::KeyValue;
use baton_telemetry::names::{attribute, semantic, span};
use baton_telemetry::traces::{
    self, Array, Span, SpanContext, SpanExt as _, SpanKind, Status, Value,
};
use tracing::Instrument as _;

use crate::app::AppState;
use crate::error::ApiError;
use crate::params::Params;

/// Header with a request's id, of the request and of its answer.
const REQUEST_ID: &str = "x-request-id";
/// Longest id that is taken over from a client.
const LONGEST_ID: usize = 128;

/// One request's trace. The span ends when the last clone is dropped: with the last piece of a streamed answer.
#[derive(Clone, Debug)]
pub(crate) struct RequestTrace(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    traces: Traces,
    context: Option<SpanContext>,
    /// What goes on with the request; empty when nobody traces it.
    traceparent: String,
    /// Names the request in log lines.
    line: tracing::Span,
    root: Option<Mutex<Root>>,
}

#[derive(Debug)]
struct Root {
    span: Span,
    output_tokens: u64,
    /// How each choice ended.
    outcomes: Vec<&'static str>,
}

impl RequestTrace {
    fn begin(traces: &Traces, method: &str, path: &str, headers: &HeaderMap) -> (Self, String) {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let id = text(REQUEST_ID).filter(|id| !id.is_empty() && id.len() <= LONGEST_ID);
        let id = id.map_or_else(|| format!("{:032x}", rand::random::<u128>()), str::to_owned);
        let remote = text("traceparent").and_then(|t| traces::parse(t, text("tracestate")));
        let name = format!("{method} {path}");
        let mut root = traces.start(name, SpanKind::Server, remote.as_ref(), SystemTime::now());
        if let Some(span) = &mut root {
            span.set_attributes([
                KeyValue::new(semantic::HTTP_REQUEST_METHOD, method.to_owned()),
                KeyValue::new(semantic::HTTP_ROUTE, path.to_owned()),
                KeyValue::new(attribute::REQUEST_ID, id.clone()),
            ]);
        }
        let context = root.as_ref().map(|span| span.span_context().clone()).or(remote);
        let traceparent = context.as_ref().map(traces::format).unwrap_or_default();
        let line = match traces::trace_id(&traceparent) {
            "" => tracing::info_span!("request", request_id = id),
            trace_id => tracing::info_span!("request", request_id = id, trace_id),
        };
        let root = root.map(|span| Mutex::new(Root { span, output_tokens: 0, outcomes: vec![] }));
        (Self(Arc::new(Inner { traces: traces.clone(), context, traceparent, line, root })), id)
    }

    fn root(&self) -> Option<MutexGuard<'_, Root>> {
        // Every change under the lock is whole by itself.
        self.0.root.as_ref().map(|root| root.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The context of the root span, for the coordinator; empty when nobody traces the request.
    pub(crate) fn traceparent(&self) -> &str {
        &self.0.traceparent
    }

    /// The span of its log lines.
    pub(crate) fn line(&self) -> &tracing::Span {
        &self.0.line
    }

    /// What is asked for, in the words of the GenAI conventions.
    pub(crate) fn asks(&self, operation: &str, model: &str, params: &Params, prompt_tokens: usize) {
        let Some(mut root) = self.root() else { return };
        let int = |key, value: usize| KeyValue::new(key, i64::try_from(value).unwrap_or(i64::MAX));
        let span = &mut root.span;
        span.update_name(format!("{operation} {model}"));
        span.set_attributes([
            KeyValue::new(semantic::GEN_AI_OPERATION_NAME, operation.to_owned()),
            KeyValue::new(semantic::GEN_AI_PROVIDER_NAME, "baton"),
            KeyValue::new(semantic::GEN_AI_REQUEST_MODEL, model.to_owned()),
            KeyValue::new(semantic::GEN_AI_RESPONSE_MODEL, model.to_owned()),
            KeyValue::new(
                semantic::GEN_AI_REQUEST_TEMPERATURE,
                f64::from(params.sampling.temperature),
            ),
            KeyValue::new(semantic::GEN_AI_REQUEST_TOP_P, f64::from(params.sampling.top_p)),
            int(semantic::GEN_AI_REQUEST_CHOICE_COUNT, params.n),
            int(semantic::GEN_AI_USAGE_INPUT_TOKENS, prompt_tokens),
        ]);
        if let Some(tokens) = params.max_tokens {
            span.set_attribute(int(semantic::GEN_AI_REQUEST_MAX_TOKENS, tokens));
        }
        if let Some(seed) = params.seed {
            span.set_attribute(KeyValue::new(semantic::GEN_AI_REQUEST_SEED, seed.cast_signed()));
        }
    }

    /// The prompt became ids since `start`.
    pub(crate) fn tokenized(&self, start: SystemTime) {
        let context = self.0.context.as_ref().filter(|context| context.is_sampled());
        let Some(context) = context else { return };
        let kind = SpanKind::Internal;
        if let Some(mut span) = self.0.traces.start(span::TOKENIZE, kind, Some(context), start) {
            span.end();
        }
    }

    /// One choice is over.
    pub(crate) fn choice_ended(&self, outcome: &'static str, tokens: u64) {
        self.0.line.in_scope(|| match outcome {
            "failed" => tracing::warn!(tokens, "a choice failed"),
            _ => tracing::debug!(outcome, tokens, "a choice ended"),
        });
        if let Some(mut root) = self.root() {
            root.outcomes.push(outcome);
            root.output_tokens += tokens;
        }
    }

    fn answered(&self, status: u16) {
        let Some(mut root) = self.root() else { return };
        let code = KeyValue::new(semantic::HTTP_RESPONSE_STATUS_CODE, i64::from(status));
        root.span.set_attribute(code);
        if status >= 500 {
            root.span.set_attribute(KeyValue::new(semantic::ERROR_TYPE, status.to_string()));
            root.span.set_status(Status::error(""));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Some(root) = self.root.take() else { return };
        let mut root = root.into_inner().unwrap_or_else(PoisonError::into_inner);
        if root.outcomes.is_empty() {
            return;
        }
        let tokens = i64::try_from(root.output_tokens).unwrap_or(i64::MAX);
        let reasons = std::mem::take(&mut root.outcomes);
        let reasons = reasons.into_iter().map(Into::into).collect();
        root.span.set_attributes([
            KeyValue::new(semantic::GEN_AI_USAGE_OUTPUT_TOKENS, tokens),
            KeyValue::new(
                semantic::GEN_AI_RESPONSE_FINISH_REASONS,
                Value::Array(Array::String(reasons)),
            ),
        ]);
        root.span.end();
    }
}

/// Begins a request's trace and hands it on with the request.
pub(crate) async fn begin(
    State(app): State<AppState>,
    mut request: Request,
    next: Next,
) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let path = path.unwrap_or_else(|| request.uri().path().to_owned());
    let method = request.method().as_str();
    let (trace, id) = RequestTrace::begin(&app.config.traces, method, &path, request.headers());
    request.extensions_mut().insert(trace.clone());
    let mut response = next.run(request).instrument(trace.line().clone()).await;
    trace.answered(response.status().as_u16());
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

impl<S: Sync> FromRequestParts<S> for RequestTrace {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let trace = parts.extensions.get::<Self>().cloned();
        trace.ok_or_else(|| ApiError::internal("the request has no trace"))
    }
}
