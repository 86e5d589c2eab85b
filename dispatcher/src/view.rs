//! How things stand, as the driver publishes it after a turn: what `/ready`, `/status` and `/metrics` read.

use std::time::Duration;

use serde::Serialize;

pub use crate::budget::MemoryView;
use crate::bus::usage::{self, Load};
pub use crate::bus::{BusView, StepTimes};
use crate::effect::Bus;
use crate::fleet::{Fleet, Place};
use crate::machine::Tick;
use crate::machine::event::KeyId;
use crate::machine::snapshot::{InstanceSnapshot, Snapshot};
use crate::process::Child;
use crate::reconfigure::Reconfigure;

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
    /// Why no instance is even tried: the configuration cannot work. `None` in all that serves.
    pub parked: Option<String>,
    pub draining: bool,
    pub instances: Vec<InstanceView>,
    pub queue: QueueView,
    pub counters: CountersView,
    /// The newest ones last.
    pub events: Vec<EventView>,
    /// Reloads that were read, and why the newest one was refused, if it was.
    pub reloads: u64,
    pub last_reload_error: Option<String>,
    /// `None` until the first look.
    pub memory: Option<MemoryView>,
    /// Each memory that serving instances read from.
    pub buses: Vec<BusView>,
    /// How long steps took since the start.
    pub step_times: StepTimes,
    /// Microseconds since the dispatcher's start.
    pub uptime_us: u64,
}

/// What the world knows beside the machine.
pub(crate) struct Beside<'a> {
    pub(crate) fleet: &'a Fleet,
    pub(crate) memory: Option<MemoryView>,
    pub(crate) reconfigure: &'a Reconfigure,
    pub(crate) bus: &'a Bus,
    pub(crate) events: Vec<EventView>,
    pub(crate) served_model: &'a str,
}

/// The machine's snapshot, with what the world knows beside it.
pub(crate) fn compose(snapshot: &Snapshot, beside: Beside<'_>, now: Tick) -> View {
    let Beside {
        fleet,
        memory,
        reconfigure,
        bus,
        events,
        served_model,
    } = beside;
    let instances: Vec<_> = snapshot
        .instances
        .iter()
        .zip(fleet.places())
        .map(|(place, known)| instance(place, known, bus, now))
        .collect();
    let ready = fleet.places().iter().find_map(|place| place.ready.as_ref());
    let loads: Vec<_> = fleet
        .places()
        .iter()
        .zip(&snapshot.instances)
        .filter_map(|(known, place)| load(place, known, now))
        .collect();
    let step_times = bus.learned.read();
    let queue = &snapshot.queue;
    let counters = &snapshot.counters;
    View {
        served_model: served_model.to_owned(),
        context_tokens: ready.map(|ready| ready.context_tokens),
        longest_token_bytes: ready.map(|ready| ready.longest_token_bytes),
        vocabulary: ready.map(|ready| ready.vocabulary),
        ready: snapshot.ready,
        not_ready_reason: snapshot.not_ready_reason.clone(),
        parked: None,
        draining: snapshot.draining,
        instances,
        queue: QueueView {
            waiting: small(queue.waiting),
            by_priority: queue.by_priority,
            keys: snapshot.keys.iter().map(key).collect(),
            running: small(queue.running),
            limit: small(queue.limit),
            bytes: queue.bytes,
            bytes_limit: queue.bytes_limit,
            tokens: queue.tokens,
            tokens_limit: queue.tokens_limit,
            oldest_wait: queue.oldest_wait,
        },
        counters: CountersView {
            accepted: counters.accepted,
            completed: counters.completed,
            failed: counters.failed,
            cancelled: counters.cancelled,
            denied: counters.denied,
            failovers: counters.failovers,
            stale: counters.stale,
            worker_exits: counters.worker_exits,
        },
        events,
        reloads: reconfigure.count,
        last_reload_error: reconfigure.last_error.clone(),
        memory,
        buses: usage::buses(&loads, &bus.known, &step_times, small(queue.waiting)),
        step_times,
        uptime_us: now.as_micros(),
    }
}

/// A place whose worker serves, as the bus sees it.
fn load(place: &InstanceSnapshot, known: &Place, now: Tick) -> Option<Load> {
    let ready = known.ready.as_ref()?;
    known.child.as_ref()?;
    let rates = known.rates(now);
    Some(Load {
        instance: place.instance.0,
        device: ready.device.clone(),
        assigned: known.device.as_ref().map(ToString::to_string),
        slots: ready.slots,
        weight_bytes_per_step: ready.weight_bytes_per_step,
        kv_bytes_per_token: ready.kv_bytes_per_token,
        steps_per_s: rates.steps_per_s,
        batch_mean: rates.batch_mean,
        kv_tokens_per_s: rates.kv_tokens_per_s,
        busy: rates.busy,
    })
}

fn instance(place: &InstanceSnapshot, known: &Place, bus: &Bus, now: Tick) -> InstanceView {
    let ready = known.ready.as_ref();
    let rates = known.rates(now);
    let share = load(place, known, now).map(|load| usage::share(&load, &bus.known));
    InstanceView {
        instance: place.instance.0,
        generation: place.generation.0,
        state: place.state,
        reason: place.reason.clone(),
        pid: known.child.as_ref().map(Child::pid),
        engine: ready.map(|ready| ready.engine.clone()),
        model: ready.map(|ready| ready.model.name.clone()),
        model_hash: ready.map(|ready| hex(&ready.model.hash)),
        device: ready.map(|ready| ready.device.clone()),
        assigned_device: known.device.as_ref().map(ToString::to_string),
        device_memory_bytes: known.device.as_ref().map(|device| device.memory_bytes),
        build: known.build.clone(),
        slots: place.slots,
        context_tokens: ready.map_or(0, |ready| ready.context_tokens),
        progress_permille: known.progress_permille,
        running: place.running,
        live_slots: known.live_slots,
        steps: known.steps,
        longest_step_us: u64::try_from(known.longest_step.as_micros()).unwrap_or(u64::MAX),
        last_pulse_us: place
            .last_pulse
            .map(|age| u64::try_from(age.as_micros()).unwrap_or(u64::MAX)),
        restarts: place.restarts,
        crashes: place.crashes,
        footprint_bytes: known.footprint.map(|one| one.proportional),
        private_bytes: known.footprint.map(|one| one.private),
        weight_bytes_per_step: ready.map(|ready| ready.weight_bytes_per_step),
        tokens_per_s: rates.tokens_per_s,
        batch_mean: rates.batch_mean,
        steps_per_s: rates.steps_per_s,
        bus_bytes_per_s: share.map(|share| share.bytes_per_s),
        bus_usage: share.and_then(|share| share.usage),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn key((key, waiting): &(KeyId, u64)) -> KeyView {
    KeyView {
        key: format!("{:016x}", key.0),
        waiting: *waiting,
    }
}

fn small(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
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
    /// The device that `--devices` gave it, and all memory of that.
    pub assigned_device: Option<String>,
    pub device_memory_bytes: Option<u64>,
    pub build: Option<String>,
    pub slots: u32,
    pub context_tokens: u32,
    /// How far it is in `loading` or in `warming`, of 1,000.
    pub progress_permille: u32,
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
    /// Its worker's memory, with its share of what workers have in common; `None` until measured.
    pub footprint_bytes: Option<u64>,
    /// What would come free with it.
    pub private_bytes: Option<u64>,
    pub weight_bytes_per_step: Option<u64>,
    /// Decode tokens per second and mean batch over the last seconds.
    pub tokens_per_s: f64,
    pub batch_mean: f64,
    /// Steps that the engine counted, per second.
    pub steps_per_s: f64,
    /// Bytes that its steps read a second, and that as a part of what its memory can deliver; `None`
    /// where there is no figure.
    pub bus_bytes_per_s: Option<f64>,
    pub bus_usage: Option<f64>,
}

/// Something that an operator would want to know of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EventView {
    /// Seconds since the Unix epoch.
    pub at_unix_s: u64,
    pub words: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct QueueView {
    pub waiting: u32,
    /// Waiting entries of priority high, normal and low.
    pub by_priority: [u64; 3],
    /// Keys with the most waiting entries, the most first.
    pub keys: Vec<KeyView>,
    pub running: u32,
    pub limit: u32,
    pub bytes: u64,
    pub bytes_limit: u64,
    pub tokens: u64,
    pub tokens_limit: u64,
    pub oldest_wait: Option<Duration>,
}

/// One API key's share of the queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KeyView {
    /// A hash of it.
    pub key: String,
    pub waiting: u64,
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
