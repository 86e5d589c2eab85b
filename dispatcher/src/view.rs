//! How things stand, as the driver publishes it after a turn: what `/ready`, `/status` and `/metrics` read.

use std::time::Duration;

use serde::Serialize;

/// One consistent picture. Replaced, never changed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct View {
    pub served_model: String,
    /// Vocabulary-independent facts of the first instance that became Ready; `None` until then.
    pub context_tokens: Option<u32>,
    pub longest_token_bytes: Option<u32>,
    pub vocabulary: Option<u32>,
    pub ready: bool,
    /// Why `ready` is false, in words.
    pub not_ready_reason: Option<String>,
    pub draining: bool,
    pub instances: Vec<InstanceView>,
    pub queue: QueueView,
    pub counters: CountersView,
    /// Microseconds since the dispatcher's start.
    pub uptime_us: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct InstanceView {
    pub instance: u32,
    pub generation: u64,
    /// The lifecycle's word: `spawning`, `loading`, `warming`, `ready`, `draining`, `terminating`, `backoff`, `quarantined`.
    pub state: &'static str,
    /// Why it is in `backoff` or `quarantined`.
    pub reason: Option<String>,
    pub pid: Option<u32>,
    pub engine: Option<String>,
    pub model: Option<String>,
    pub model_hash: Option<String>,
    pub device: Option<String>,
    pub build: Option<String>,
    pub slots: u32,
    pub context_tokens: u32,
    /// Requests assigned to it.
    pub running: u32,
    /// From its last `Progress`.
    pub live_slots: u32,
    pub steps: u64,
    pub longest_step_us: u64,
    /// Age of the last pulse.
    pub last_pulse_us: Option<u64>,
    pub restarts: u64,
    pub crashes: u64,
    pub resident_bytes: Option<u64>,
    pub weight_bytes_per_step: Option<u64>,
    /// Decode tokens per second and mean batch over the last seconds.
    pub tokens_per_s: f64,
    pub batch_mean: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct QueueView {
    pub waiting: u32,
    pub running: u32,
    pub limit: u32,
    pub bytes: u64,
    pub bytes_limit: u64,
    pub tokens: u64,
    pub tokens_limit: u64,
    pub oldest_wait: Option<Duration>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CountersView {
    pub accepted: u64,
    pub completed: u64,
    pub failed: u64,
    pub cancelled: u64,
    pub denied: u64,
    pub failovers: u64,
    pub stale: u64,
    pub worker_exits: u64,
}
