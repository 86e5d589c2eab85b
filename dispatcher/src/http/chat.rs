//! POST /v1/chat/completions.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::App;
use super::error::ApiError;
use super::inference::{self, Submitted};
use super::respond;
use super::validate::Route;

pub(crate) async fn handle(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let Submitted {
        open,
        identity,
        stream,
        extras,
    } = inference::submit(&app, Route::Chat, request).await?;
    if stream {
        return respond::stream(open, Route::Chat, &identity, extras, app.times).await;
    }
    let mut whole = respond::collect(open, extras, Route::Chat).await?;
    let logprobs = if whole.logprobs.is_empty() {
        Value::Null
    } else {
        whole.logprobs.take_chat()
    };
    let mut body = json!({
        "id": identity.id,
        "object": "chat.completion",
        "created": identity.created,
        "model": identity.model,
        "choices": [{
            "index": 0,
            "message": { "role": "assistant", "content": whole.text },
            "logprobs": logprobs,
            "finish_reason": whole.reason.as_str(),
        }],
        "usage": whole.usage,
        "timings": whole.timings,
    });
    whole.add_ids(Route::Chat, &mut body);
    Ok(Json(body).into_response())
}
