//! The OpenAI-compatible front: routes, limits, graceful stop.

mod accept;
mod auth;
mod chat;
mod completions;
mod error;
mod health;
mod inference;
mod json;
mod logprobs;
mod models;
mod openai;
mod peer;
mod respond;
mod sse;
mod status;
mod timings;
mod upload;
mod validate;

use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use axum::routing::{get, post};
use tokio::net::TcpListener;

use crate::gateway::Gateway;
use crate::metrics::Metrics;
use error::ApiError;
use peer::Patience;
use respond::StreamTimes;

/// What the front works with.
#[derive(Clone, Debug)]
pub struct Front {
    pub gateway: Gateway,
    pub metrics: Metrics,
    pub config: FrontConfig,
}

/// The front's settings and bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct FrontConfig {
    /// The one name that `model` may have, beside `default`.
    pub served_model: String,
    /// Keys that are let in. None: everyone is.
    pub api_keys: Vec<String>,
    /// Bytes of one request's body.
    pub body_bytes_max: usize,
    /// Bytes of all bodies that are being read together.
    pub bodies_bytes_max: usize,
    /// From a request's head to the last byte of its body.
    pub body_timeout: Duration,
    /// Open connections; a few more are answered about health and metrics.
    pub connections_max: usize,
    /// From a request's first byte (on a new connection: from its start) to the end of its head.
    pub header_timeout: Duration,
    /// Between two requests on one connection.
    pub idle_timeout: Duration,
    /// Without one whole event written: the client does not read.
    pub stall_timeout: Duration,
    /// A stream's status and headers go out after this, if no token came before.
    pub first_token_wait: Duration,
    /// Between the comments of a stream that has nothing to say.
    pub keepalive: Duration,
    /// From the stop to the moment when what still runs is cut off.
    pub stop_timeout: Duration,
}

impl Default for FrontConfig {
    fn default() -> Self {
        Self {
            served_model: "default".into(),
            api_keys: Vec::new(),
            body_bytes_max: 8 << 20,
            bodies_bytes_max: 256 << 20,
            body_timeout: Duration::from_secs(30),
            connections_max: 4096,
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
            stall_timeout: Duration::from_secs(30),
            first_token_wait: Duration::from_secs(10),
            keepalive: Duration::from_secs(15),
            stop_timeout: Duration::from_secs(35),
        }
    }
}

/// What every handler shares.
#[derive(Debug)]
struct App {
    gateway: Gateway,
    metrics: Metrics,
    served_model: String,
    keys: auth::Keys,
    uploads: upload::Uploads,
    times: StreamTimes,
    /// Seconds from 1970 to the start of this front, and the clock's moment then.
    started_unix_s: u64,
    started: crate::machine::Tick,
    random: std::hash::RandomState,
    drawn: AtomicU64,
}

impl App {
    fn new(front: Front) -> Self {
        let config = front.config;
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self {
            started: front.gateway.clock().now(),
            gateway: front.gateway,
            metrics: front.metrics,
            served_model: config.served_model,
            keys: auth::Keys::new(&config.api_keys),
            uploads: upload::Uploads::new(
                config.body_bytes_max,
                config.bodies_bytes_max,
                config.body_timeout,
            ),
            times: StreamTimes {
                first_wait: config.first_token_wait,
                keepalive: config.keepalive,
            },
            started_unix_s: since_1970.map_or(0, |since| since.as_secs()),
            random: std::hash::RandomState::new(),
            drawn: AtomicU64::new(0),
        }
    }

    /// Seconds from 1970 to now.
    fn unix_s(&self) -> u64 {
        self.started_unix_s + self.gateway.clock().now().since(self.started).as_secs()
    }

    /// A number that no other call returns but by chance: keyed by the process's randomness.
    fn draw(&self) -> u64 {
        let turn = self.drawn.fetch_add(1, Ordering::Relaxed);
        self.random.hash_one((turn, self.gateway.clock().now()))
    }
}

/// Serves `front` on `listener` until `stop` resolves and what was running then has ended.
pub async fn serve(listener: TcpListener, front: Front, stop: impl Future<Output = ()>) {
    let limits = accept::Limits {
        connections_max: front.config.connections_max,
        patience: Patience {
            head: front.config.header_timeout,
            idle: front.config.idle_timeout,
            stall: front.config.stall_timeout,
        },
        stop_timeout: front.config.stop_timeout,
    };
    let metrics = front.metrics.clone();
    accept::serve(listener, router(front), metrics, limits, stop).await;
}

fn router(front: Front) -> Router {
    let app = Arc::new(App::new(front));
    Router::new()
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::one))
        .route("/health", get(health::health))
        .route("/ready", get(health::ready))
        .route("/status", get(status::status))
        .route("/metrics", get(metrics))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(axum::middleware::from_fn_with_state(
            Arc::clone(&app),
            observe,
        ))
        .with_state(app)
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    use axum::response::IntoResponse;
    let text = app.metrics.encode(&app.gateway.view());
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(axum::http::header::CONTENT_TYPE, kind)], text).into_response()
}

async fn unknown_route(request: Request) -> ApiError {
    let mut error = ApiError::invalid(
        "unknown_url",
        format!("there is no `{}` here", openai::brief(request.uri().path())),
    );
    error.status = StatusCode::NOT_FOUND;
    error
}

async fn wrong_method(request: Request) -> ApiError {
    let mut error = ApiError::invalid(
        "method_not_allowed",
        format!(
            "`{}` does not take {}",
            openai::brief(request.uri().path()),
            openai::brief(request.method().as_str())
        ),
    );
    error.status = StatusCode::METHOD_NOT_ALLOWED;
    error
}

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Gives every request and its response an `x-request-id`, and counts the response.
async fn observe(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let id = match request.headers().get(&REQUEST_ID) {
        Some(given) if is_printable(given) => given.clone(),
        _ => HeaderValue::from_str(&format!("req-{:016x}", app.draw()))
            .unwrap_or(HeaderValue::from_static("req")),
    };
    let route = crate::metrics::Route::of(request.uri().path());
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let mut response = next.run(request).await;
    app.metrics.responded(route, response.status().as_u16());
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

fn is_printable(value: &HeaderValue) -> bool {
    const BYTES_MAX: usize = 128;
    let bytes = value.as_bytes();
    !bytes.is_empty() && bytes.len() <= BYTES_MAX && bytes.iter().all(u8::is_ascii_graphic)
}
