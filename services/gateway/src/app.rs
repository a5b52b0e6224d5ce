//! The router, its shared state, and serving it.

use std::future::Future;
use std::io;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use baton_coordinator::{CoordinatorHandle, Grammar};
use baton_telemetry::Metrics;
use llguidance::api::TopLevelGrammar;
use tokio::net::TcpListener;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::trace::TraceLayer;

use crate::chat_template::ChatTemplate;
use crate::config::{GatewayConfig, GatewayError};
use crate::constraint::Compiler;
use crate::error::ApiError;
use crate::metrics::RequestMetrics;
use crate::tokenizer::TextTokenizer;
use crate::{chat, completions, health, models, page, responses, tokenize, trace};

/// What every handler shares.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) config: GatewayConfig,
    pub(crate) tokenizer: Arc<TextTokenizer>,
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) handle: CoordinatorHandle,
    pub(crate) metrics: RequestMetrics,
    shown: Metrics,
    /// Made for the first request that wants a grammar.
    compiler: OnceLock<Result<Compiler, String>>,
    /// When the gateway started, as `/v1/models` reports it.
    pub(crate) started: u64,
}

impl App {
    /// All metrics of this process, as text.
    pub(crate) fn render_metrics(&self) -> String {
        self.shown.render()
    }

    /// Makes a grammar ready, on a thread for such work. `field` asked for it.
    pub(crate) fn compile(
        &self,
        field: &str,
        grammar: TopLevelGrammar,
        thinking: bool,
        calls: bool,
    ) -> Result<Arc<dyn Grammar>, ApiError> {
        let compiler = self.compiler.get_or_init(|| {
            let mut ends = self.config.eos_token_ids.clone();
            ends.extend(&self.config.defaults.stop_token_ids);
            Compiler::new(Arc::clone(&self.tokenizer), self.config.vocab_size, &ends)
        });
        let compiler = compiler.as_ref().map_err(|e| ApiError::internal(e.clone()))?;
        let grammar = compiler.compile(grammar, thinking, calls);
        grammar.map_err(|e| ApiError::field(field, format!("{field:?} is no usable grammar: {e}")))
    }
}

/// [`App`], cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct AppState(Arc<App>);

impl Deref for AppState {
    type Target = App;

    fn deref(&self) -> &App {
        &self.0
    }
}

/// The HTTP API of one model.
#[derive(Debug)]
pub struct Gateway;

impl Gateway {
    /// Loads the checkpoint's tokenizer and chat template and builds the router. `metrics` are those of the whole process.
    ///
    /// # Errors
    /// When `tokenizer.json` is missing or unusable, or when there is a chat template and it does not parse.
    #[allow(
        clippy::new_ret_no_self,
        reason = "a gateway is its router; nothing else of it is ever used"
    )]
    pub fn new(
        config: GatewayConfig,
        handle: CoordinatorHandle,
        metrics: &Metrics,
    ) -> Result<Router, GatewayError> {
        let tokenizer = Arc::new(TextTokenizer::load(&config.model_dir)?);
        let template = ChatTemplate::load(&config.model_dir)?;
        let body_bytes = config.limits.body_bytes;
        let app = AppState(Arc::new(App {
            config,
            tokenizer,
            template,
            handle,
            metrics: RequestMetrics::shown(metrics),
            shown: metrics.clone(),
            compiler: OnceLock::new(),
            started: unix_time(),
        }));
        let generating = Router::new()
            .route("/v1/completions", post(completions::complete))
            .route("/v1/chat/completions", post(chat::complete))
            .route("/v1/responses", post(responses::create))
            .route_layer(middleware::from_fn_with_state(app.clone(), trace::begin));
        Ok(Router::new()
            .route("/", get(page::page))
            .route("/health", get(health::health))
            .route("/ready", get(health::ready))
            .route("/pipeline", get(health::pipeline))
            .route("/pipeline/steps", get(health::steps))
            .route("/metrics", get(health::metrics))
            .route("/metrics/targets", get(health::targets))
            .route("/v1/models", get(models::list))
            .route("/v1/models/{*id}", get(models::one))
            .merge(generating)
            .route("/v1/embeddings", post(no_embeddings))
            .route("/tokenize", post(tokenize::tokenize))
            .route("/detokenize", post(tokenize::detokenize))
            .fallback(not_found)
            .method_not_allowed_fallback(method_not_allowed)
            .layer(DefaultBodyLimit::max(body_bytes))
            .layer(CatchPanicLayer::custom(|_| {
                ApiError::internal("the server failed on this request").into_response()
            }))
            // What fails says so itself, in a line that names the request.
            .layer(TraceLayer::new_for_http().on_failure(()))
            .with_state(app))
    }
}

async fn not_found(method: Method, uri: Uri) -> Response {
    let message = format!("there is no {method} {}", uri.path());
    ApiError::client(StatusCode::NOT_FOUND, message).into_response()
}

async fn no_embeddings() -> Response {
    let message = "this server generates text; it has no model for embeddings";
    ApiError::client(StatusCode::BAD_REQUEST, message).into_response()
}

async fn method_not_allowed(method: Method, uri: Uri) -> Response {
    let message = format!("{} does not take {method}", uri.path());
    ApiError::client(StatusCode::METHOD_NOT_ALLOWED, message).into_response()
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Serves until `shutdown` completes; then takes no new connection, and returns when the running requests are
/// answered, after `grace` at most.
///
/// # Errors
/// When accepting connections fails for good.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    shutdown: impl Future<Output = ()> + Send + 'static,
    grace: Duration,
) -> io::Result<()> {
    // Tokens are small: they must not wait for the acknowledgement of the token before.
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
    });
    let (stopping, stopped) = tokio::sync::oneshot::channel();
    let signal = async move {
        shutdown.await;
        // Nobody waits any more when the server ended by itself.
        let _ = stopping.send(());
    };
    let server = axum::serve(listener, router).with_graceful_shutdown(signal);
    tokio::select! {
        result = server.into_future() => result,
        () = async {
            if stopped.await.is_err() {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(grace).await;
        } => {
            tracing::warn!("requests still run {grace:?} after the shutdown began; they are cut off");
            Ok(())
        }
    }
}
