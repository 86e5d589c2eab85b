//! What both inference routes do alike: key, body, checks, submission.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::http::HeaderMap;

use tracing::debug;

use super::App;
use super::error::ApiError;
use super::json;
use super::openai::Body;
use super::peer::Peer;
use super::respond::Open;
use super::sse::Identity;
use super::validate::{self, Context, Route};

/// A request that was handed over, and how it is to be answered.
pub(crate) struct Submitted {
    pub(crate) open: Open,
    pub(crate) identity: Identity,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
}

/// Reads, checks and submits `request`.
///
/// # Errors
///
/// What the client did wrong; the outcome of what was submitted comes through `open`.
pub(crate) async fn submit(
    app: &App,
    route: Route,
    request: Request,
) -> Result<Submitted, ApiError> {
    let (head, body) = request.into_parts();
    let key = app.keys.check(&head.headers)?;
    let peer = head
        .extensions
        .get::<Arc<Peer>>()
        .cloned()
        .unwrap_or_else(|| Arc::new(Peer::new(false)));
    if peer.reserve {
        return Err(ApiError::unavailable(
            "too_many_connections",
            "the server's connections are used up",
            Duration::from_secs(1),
        ));
    }
    let checked = {
        let upload = app.uploads.read(&head.headers, body).await?;
        let body: Body = json::parse(&upload.bytes)?;
        let context = Context {
            served_model: &app.served_model,
            key,
            fresh_seed: app.draw(),
            priority_header: text(&head.headers, "x-priority"),
            timeout_header: text(&head.headers, "x-request-timeout"),
        };
        validate::check(route, body, &context)?
    };
    let ticket = app.gateway.submit(checked.submission).await;
    debug!(
        request = %ticket.request,
        id = text(&head.headers, "x-request-id").unwrap_or(""),
        stream = checked.stream,
        "request submitted"
    );
    let prefix = match route {
        Route::Chat => "chatcmpl",
        Route::Completions => "cmpl",
    };
    Ok(Submitted {
        open: Open::new(ticket, peer, app.gateway.clock()),
        identity: Identity {
            id: format!("{prefix}-{:016x}", app.draw()),
            created: app.unix_s(),
            model: app.served_model.clone(),
        },
        stream: checked.stream,
        include_usage: checked.include_usage,
    })
}

/// A header's text; what is not text is refused later by its own check.
fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap_or("?"))
}
