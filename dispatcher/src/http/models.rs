//! GET /v1/models: what is served, and how much of it.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use super::App;
use super::error::ApiError;
use super::openai::brief;

pub(crate) async fn list(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    app.keys.check(&headers)?;
    Ok(Json(json!({ "object": "list", "data": [model(&app)] })))
}

pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    app.keys.check(&headers)?;
    if name == app.served_model || name == "default" {
        return Ok(Json(model(&app)));
    }
    let mut error = ApiError::invalid(
        "model_not_found",
        format!(
            "the model `{}` is not served here; `{}` is",
            brief(&name),
            app.served_model
        ),
    );
    error.status = StatusCode::NOT_FOUND;
    Err(error.with_param("model"))
}

fn model(app: &App) -> Value {
    let view = app.gateway.view();
    let slots: u32 = view
        .instances
        .iter()
        .filter(|instance| instance.state == "ready")
        .map(|instance| instance.slots)
        .sum();
    json!({
        "id": app.served_model,
        "object": "model",
        "created": app.started_unix_s,
        "owned_by": "dispatcher",
        "max_model_len": view.context_tokens,
        "capacity": {
            "slots": slots,
            "running": view.queue.running,
            "waiting": view.queue.waiting,
            "waiting_limit": view.queue.limit,
        },
    })
}
