//! GET /health and /ready: alive, and able to serve, by the machine's own view.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::App;
use crate::view::View;

/// 200 as long as this process answers; with `?deep=1` as [`ready`], with each instance's pulse.
pub(crate) async fn health(State(app): State<Arc<App>>, uri: Uri) -> Response {
    let deep = uri.query().is_some_and(|query| {
        query
            .split('&')
            .any(|pair| pair == "deep=1" || pair == "deep=true")
    });
    if !deep {
        return Json(json!({ "status": "ok" })).into_response();
    }
    let view = app.gateway.view();
    let instances: Vec<Value> = view
        .instances
        .iter()
        .map(|instance| {
            json!({
                "instance": instance.instance,
                "state": instance.state,
                "running": instance.running,
                "live_slots": instance.live_slots,
                "steps": instance.steps,
                "last_pulse_ms": instance.last_pulse_us.map(|age_us| age_us as f64 / 1e3),
                "reason": instance.reason,
            })
        })
        .collect();
    answer(&view, &json!({ "instances": instances }))
}

/// 200 where requests can be served now, 503 with the reason where not.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Response {
    answer(&app.gateway.view(), &json!({}))
}

fn answer(view: &View, more: &Value) -> Response {
    let mut body = json!({ "ready": view.ready });
    if !view.ready {
        body["reason"] = json!(view.not_ready_reason.as_deref().unwrap_or("starting"));
    }
    if let (Some(body), Some(more)) = (body.as_object_mut(), more.as_object()) {
        body.extend(more.clone());
    }
    if view.ready {
        return Json(body).into_response();
    }
    let headers = [(header::RETRY_AFTER, "1")];
    (StatusCode::SERVICE_UNAVAILABLE, headers, Json(body)).into_response()
}
