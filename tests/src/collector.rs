//! A collector that keeps what it is sent, over OTLP in gRPC and HTTP.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::bail;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// Spans and metrics that have come. Its servers live as long as the runtime.
#[derive(Clone, Debug, Default)]
pub struct Collector(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    spans: Vec<(String, Span)>,
    metrics: Vec<(String, String)>,
}

impl Collector {
    /// Listens for gRPC; returns the URL too.
    ///
    /// # Errors
    /// When no port is free.
    pub async fn grpc() -> anyhow::Result<(Self, String)> {
        let collector = Self::default();
        let incoming = TcpIncoming::bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        let url = format!("http://{}", incoming.local_addr()?);
        let server = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(collector.clone()))
            .add_service(MetricsServiceServer::new(collector.clone()));
        tokio::spawn(server.serve_with_incoming(incoming));
        Ok((collector, url))
    }

    /// Listens for HTTP; returns the URL too.
    ///
    /// # Errors
    /// When no port is free.
    pub async fn http() -> anyhow::Result<(Self, String)> {
        let collector = Self::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let router = Router::new()
            .route("/v1/traces", post(take_traces))
            .route("/v1/metrics", post(take_metrics))
            .with_state(collector.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok((collector, url))
    }

    fn traces(&self, request: ExportTraceServiceRequest) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for resource in request.resource_spans {
            let attributes = resource.resource.map(|r| r.attributes).unwrap_or_default();
            let service = attributes.into_iter().find(|a| a.key == "service.name");
            let service = text(service.and_then(|a| a.value?.value));
            let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            kept.spans.extend(spans.map(|span| (service.clone(), span)));
        }
    }

    fn metrics(&self, request: ExportMetricsServiceRequest) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for resource in request.resource_metrics {
            let attributes = resource.resource.map(|r| r.attributes).unwrap_or_default();
            let service = attributes.into_iter().find(|a| a.key == "service.name");
            let service = text(service.and_then(|a| a.value?.value));
            let metrics = resource.scope_metrics.into_iter().flat_map(|scope| scope.metrics);
            kept.metrics.extend(metrics.map(|metric| (service.clone(), metric.name)));
        }
    }

    /// All spans so far, each with the name of the service it came from.
    #[must_use]
    pub fn spans(&self) -> Vec<(String, Span)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).spans.clone()
    }

    /// Names of all metrics so far, each with the name of the service it came from.
    #[must_use]
    pub fn metric_names(&self) -> Vec<(String, String)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).metrics.clone()
    }

    /// Waits until the spans are as wanted.
    ///
    /// # Errors
    /// When they are not in time.
    pub async fn wait(
        &self,
        wanted: impl Fn(&[(String, Span)]) -> bool,
    ) -> anyhow::Result<Vec<(String, Span)>> {
        let start = Instant::now();
        loop {
            let spans = self.spans();
            if wanted(&spans) {
                return Ok(spans);
            }
            if start.elapsed() > Duration::from_secs(30) {
                let names: Vec<_> = spans.iter().map(|(from, span)| (from, &span.name)).collect();
                bail!("the spans that were wanted did not come; these did: {names:?}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn text(value: Option<Value>) -> String {
    match value {
        Some(Value::StringValue(text)) => text,
        _ => String::new(),
    }
}

/// A span's attribute, when it is a whole number.
#[must_use]
pub fn int(span: &Span, key: &str) -> Option<i64> {
    match span.attributes.iter().find(|a| a.key == key)?.value.as_ref()?.value.as_ref()? {
        Value::IntValue(value) => Some(*value),
        _ => None,
    }
}

/// A span's attribute, when it is a text.
#[must_use]
pub fn string(span: &Span, key: &str) -> Option<String> {
    match span.attributes.iter().find(|a| a.key == key)?.value.as_ref()?.value.as_ref()? {
        Value::StringValue(value) => Some(value.clone()),
        _ => None,
    }
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.traces(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Collector {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        self.metrics(request.into_inner());
        Ok(Response::new(ExportMetricsServiceResponse::default()))
    }
}

async fn take_traces(State(collector): State<Collector>, body: Bytes) -> StatusCode {
    match ExportTraceServiceRequest::decode(body) {
        Ok(request) => collector.traces(request),
        Err(_) => return StatusCode::BAD_REQUEST,
    }
    StatusCode::OK
}

async fn take_metrics(State(collector): State<Collector>, body: Bytes) -> StatusCode {
    match ExportMetricsServiceRequest::decode(body) {
        Ok(request) => collector.metrics(request),
        Err(_) => return StatusCode::BAD_REQUEST,
    }
    StatusCode::OK
}
