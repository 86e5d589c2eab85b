//! GET /status: the whole view as JSON.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::App;
use crate::view::{
    BusView, CountersView, EventView, InstanceView, KeyView, MemoryView, StepTimes, View,
};

/// The view with its durations as numbers. `memory` is null until it is measured; `bus` has one entry for each
/// memory that serving instances read from.
#[derive(Serialize)]
struct Status<'a> {
    version: &'static str,
    served_model: &'a str,
    ready: bool,
    not_ready_reason: Option<&'a str>,
    /// Why nothing is even tried, where the configuration cannot work.
    parked: Option<&'a str>,
    draining: bool,
    uptime_us: u64,
    context_tokens: Option<u32>,
    vocabulary: Option<u32>,
    instances: &'a [InstanceView],
    queue: Queue<'a>,
    counters: &'a CountersView,
    events: &'a [EventView],
    reloads: u64,
    last_reload_error: Option<&'a str>,
    memory: Option<&'a MemoryView>,
    bus: &'a [BusView],
    step_times: &'a StepTimes,
}

#[derive(Serialize)]
struct Queue<'a> {
    waiting: u32,
    by_priority: [u64; 3],
    keys: &'a [KeyView],
    running: u32,
    limit: u32,
    bytes: u64,
    bytes_limit: u64,
    tokens: u64,
    tokens_limit: u64,
    oldest_wait_us: Option<u64>,
}

pub(crate) async fn status(State(app): State<Arc<App>>) -> Response {
    let view = app.gateway.view();
    Json(of(&view, &app.served_model)).into_response()
}

fn of<'a>(view: &'a View, served_model: &'a str) -> Status<'a> {
    let queue = &view.queue;
    Status {
        version: env!("CARGO_PKG_VERSION"),
        served_model,
        ready: view.ready,
        not_ready_reason: view.not_ready_reason.as_deref(),
        parked: view.parked.as_deref(),
        draining: view.draining,
        uptime_us: view.uptime_us,
        context_tokens: view.context_tokens,
        vocabulary: view.vocabulary,
        instances: &view.instances,
        queue: Queue {
            waiting: queue.waiting,
            by_priority: queue.by_priority,
            keys: &queue.keys,
            running: queue.running,
            limit: queue.limit,
            bytes: queue.bytes,
            bytes_limit: queue.bytes_limit,
            tokens: queue.tokens,
            tokens_limit: queue.tokens_limit,
            oldest_wait_us: queue
                .oldest_wait
                .map(|wait| u64::try_from(wait.as_micros()).unwrap_or(u64::MAX)),
        },
        counters: &view.counters,
        events: &view.events,
        reloads: view.reloads,
        last_reload_error: view.last_reload_error.as_deref(),
        memory: view.memory.as_ref(),
        bus: &view.buses,
        step_times: &view.step_times,
    }
}
