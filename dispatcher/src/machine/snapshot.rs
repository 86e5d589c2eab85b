//! How the machine stands, as plain data for `/ready`, `/status` and `/metrics`.

use std::time::Duration;

use proto::{Generation, InstanceId};

use super::dispatch::{Dispatch, Shutdown};
use super::event::{KeyId, MemoryPressure};
use super::instance::{Instance, State, reason};
use super::tick::Tick;

/// Keys of the queue in a picture.
const KEYS_SHOWN: usize = 8;

/// One consistent picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    pub ready: bool,
    /// Why `ready` is false, in words.
    pub not_ready_reason: Option<String>,
    pub draining: bool,
    pub instances: Vec<InstanceSnapshot>,
    pub queue: QueueSnapshot,
    /// Keys with the most waiting entries, the most first.
    pub keys: Vec<(KeyId, u64)>,
    pub counters: Counters,
}

#[derive(Clone, Debug, PartialEq)]
pub struct InstanceSnapshot {
    pub instance: InstanceId,
    pub generation: Generation,
    /// `spawning`, `loading`, `warming`, `ready`, `draining`, `terminating`, `backoff`,
    /// `quarantined`; `stopped` while the dispatcher leaves.
    pub state: &'static str,
    /// Why it is ending, in backoff or quarantined.
    pub reason: Option<String>,
    /// Takes work now: Ready, and not silent with work pending.
    pub responsive: bool,
    /// Seats taken, those of unanswered cancels included.
    pub running: u32,
    /// 0 until it is Ready.
    pub slots: u32,
    /// Prompts that it is counting.
    pub measuring: u32,
    /// Age of the last pulse, of a Ready one.
    pub last_pulse: Option<Duration>,
    pub restarts: u64,
    pub crashes: u64,
    /// Until the next try of one in backoff or quarantined; `None`: not before a reload.
    pub next_try_in: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueSnapshot {
    /// Waiting entries, measuring and resumed ones included.
    pub waiting: u64,
    /// Waiting entries of priority high, normal and low.
    pub by_priority: [u64; 3],
    /// Requests that have a slot.
    pub running: u64,
    pub limit: u64,
    pub bytes: u64,
    pub bytes_limit: u64,
    /// Estimated tokens.
    pub tokens: u64,
    pub tokens_limit: u64,
    /// Wait of the entry that arrived first.
    pub oldest_wait: Option<Duration>,
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Let into the queue.
    pub accepted: u64,
    pub completed: u64,
    pub failed: u64,
    pub cancelled: u64,
    /// Refused, at the door or out of the queue.
    pub denied: u64,
    /// Of those, out of the queue.
    pub denied_after_wait: u64,
    /// Attempts that ended with their worker and went on elsewhere.
    pub failovers: u64,
    /// Dropped as being of an older attempt, generation or request.
    pub stale: u64,
    pub worker_exits: u64,
}

impl Counters {
    pub(super) fn ended_after_acceptance(&self) -> u64 {
        self.completed + self.failed + self.cancelled + self.denied_after_wait
    }
}

impl Dispatch {
    /// How things stand at `now`.
    #[must_use]
    pub fn snapshot(&self, now: Tick) -> Snapshot {
        let not_ready_reason = self.not_ready_reason(now);
        let running = self.requests.len() as u64 - self.queue.len();
        let total = self.queue.total();
        let oldest = self.queue.requests().next();
        let oldest = oldest.and_then(|id| self.requests.get(&id));
        Snapshot {
            ready: not_ready_reason.is_none(),
            not_ready_reason,
            draining: self.shutdown != Shutdown::No,
            instances: self
                .instances
                .iter()
                .map(|place| self.look_at(place, now))
                .collect(),
            queue: QueueSnapshot {
                waiting: total.entries,
                by_priority: self.queue.by_priority(),
                running,
                limit: u64::from(self.policy.queue_entries_max),
                bytes: total.bytes,
                bytes_limit: self.policy.queue_bytes_max,
                tokens: total.tokens,
                tokens_limit: self.policy.queue_tokens_max,
                oldest_wait: oldest.map(|request| now.since(request.received)),
            },
            keys: self.queue.fullest(KEYS_SHOWN),
            counters: self.counters,
        }
    }

    fn look_at(&self, place: &Instance, now: Tick) -> InstanceSnapshot {
        let (reason, until) = match &place.state {
            State::Backoff { until, reason } => (Some(reason.clone()), Some(*until)),
            State::Quarantined { until, reason } => (Some(reason.clone()), *until),
            State::Terminating(death) => (Some(reason(death.why, death.exit)), None),
            _ => (None, None),
        };
        let last_pulse = match &place.state {
            State::Ready { liveness } => Some(liveness.pulse_age(now)),
            _ => None,
        };
        InstanceSnapshot {
            instance: place.id,
            generation: place.generation,
            state: place.state.word(),
            reason,
            responsive: place.is_responsive(&self.policy, now),
            running: place.in_flight(),
            slots: place.slots(),
            measuring: u32::try_from(place.measuring.len()).unwrap_or(u32::MAX),
            last_pulse,
            restarts: place.restarts,
            crashes: place.crashes,
            next_try_in: until.map(|until| until.since(now)),
        }
    }

    fn not_ready_reason(&self, now: Tick) -> Option<String> {
        if self.shutdown != Shutdown::No {
            return Some("draining".to_owned());
        }
        if self.memory == MemoryPressure::Hard {
            return Some("memory is short".to_owned());
        }
        let mut places = self.instances.iter();
        if places.any(|place| place.is_responsive(&self.policy, now)) {
            return None;
        }
        let places = self.instances.iter().map(|place| match &place.state {
            State::Ready { .. } => format!("instance {}: silent with work pending", place.id),
            State::Backoff { reason, .. } | State::Quarantined { reason, .. } => {
                format!("instance {}: {} ({reason})", place.id, place.state.word())
            }
            state => format!("instance {}: {}", place.id, state.word()),
        });
        Some(places.collect::<Vec<_>>().join("; "))
    }
}
