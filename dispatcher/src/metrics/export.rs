//! Measurements to counters and histograms.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use proto::{FinishReason, InstanceId};

use super::histogram::Histogram;
use super::scrape;
use crate::machine::event::CancelCause;
use crate::machine::measurement::{ExitCause, Measurement, RequestRecord};
use crate::machine::{Denied, Failure, Outcome};
use crate::view::View;

/// vLLM's bounds of the time to the first token, in microseconds.
const FIRST_TOKEN_US: &[u64] = &[
    1_000,
    5_000,
    10_000,
    20_000,
    40_000,
    60_000,
    80_000,
    100_000,
    250_000,
    500_000,
    750_000,
    1_000_000,
    2_500_000,
    5_000_000,
    7_500_000,
    10_000_000,
    20_000_000,
    40_000_000,
    80_000_000,
    160_000_000,
    640_000_000,
];
/// vLLM's bounds of the gap between tokens and finer ones below them, in microseconds.
const GAP_US: &[u64] = &[
    500, 1_000, 2_500, 5_000, 7_500, 10_000, 15_000, 25_000, 50_000, 75_000, 100_000, 150_000,
    200_000, 300_000, 400_000, 500_000, 750_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000,
];
/// Refusals, in microseconds: finer about the 5 ms that are promised.
const REFUSAL_US: &[u64] = &[
    50, 100, 250, 500, 1_000, 2_000, 3_000, 4_000, 5_000, 7_500, 10_000, 15_000, 25_000, 50_000,
    100_000, 250_000, 1_000_000, 10_000_000,
];
/// Whole requests and their parts, in microseconds.
const REQUEST_US: &[u64] = &[
    1_000,
    10_000,
    50_000,
    100_000,
    200_000,
    300_000,
    500_000,
    800_000,
    1_000_000,
    1_500_000,
    2_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    15_000_000,
    20_000_000,
    30_000_000,
    60_000_000,
    120_000_000,
    240_000_000,
    480_000_000,
    960_000_000,
];
const TOKENS: &[u64] = &[
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000,
];
const BATCH: &[u64] = &[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256];

const FINISHED: [&str; 3] = ["stop", "length", "abort"];
const CANCELLED: [&str; 2] = ["client_disconnect", "slow_reader"];
const EXITS: [&str; 4] = ["planned", "external", "engine", "permanent"];
const DENIED: [&str; 10] = [
    "queue_full",
    "draining",
    "no_instance",
    "out_of_memory",
    "queue_timeout",
    "deadline_exceeded",
    "prompt_too_long",
    "prompt_too_large",
    "prompt_rejected",
    "quarantined",
];
const FAILED: [&str; 7] = [
    "rejected",
    "engine",
    "worker_crashed",
    "worker_oom",
    "no_instance",
    "draining",
    "deadline_exceeded",
];

/// A counter for each word of a fixed list.
#[derive(Debug)]
pub(super) struct Words<const N: usize> {
    pub(super) words: [&'static str; N],
    pub(super) counts: [AtomicU64; N],
}

impl<const N: usize> Words<N> {
    fn new(words: [&'static str; N]) -> Self {
        Self {
            words,
            counts: [const { AtomicU64::new(0) }; N],
        }
    }

    fn add(&self, word: &str) {
        if let Some(index) = self.words.iter().position(|one| *one == word) {
            self.counts[index].fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.counts.iter().map(|one| one.load(Ordering::Relaxed));
        self.words.into_iter().zip(counts)
    }
}

#[derive(Debug)]
pub(super) struct PerInstance {
    pub(super) label: String,
    pub(super) batch: Histogram,
    pub(super) step: Histogram,
    pub(super) prefill_tokens: AtomicU64,
    pub(super) exits: Words<4>,
}

/// Route of a response, as a label: never the client's own words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route(pub(super) &'static str);

impl Route {
    #[must_use]
    pub fn of(path: &str) -> Self {
        const ROUTES: [&str; 7] = [
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/models",
            "/health",
            "/ready",
            "/status",
            "/metrics",
        ];
        Self(
            ROUTES
                .into_iter()
                .find(|route| *route == path)
                .unwrap_or("other"),
        )
    }
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) model: String,
    pub(super) instances: Vec<PerInstance>,
    pub(super) first_token: Histogram,
    pub(super) gap: Histogram,
    pub(super) end_to_end: Histogram,
    pub(super) queue: Histogram,
    pub(super) prefill: Histogram,
    pub(super) decode: Histogram,
    pub(super) request_prompt_tokens: Histogram,
    pub(super) request_generation_tokens: Histogram,
    pub(super) prompt_tokens: AtomicU64,
    pub(super) generation_tokens: AtomicU64,
    pub(super) cached_tokens: AtomicU64,
    pub(super) finished: Words<3>,
    pub(super) cancelled: Words<2>,
    pub(super) denied: Words<10>,
    pub(super) failed: Words<7>,
    pub(super) failovers: AtomicU64,
    pub(super) stale: AtomicU64,
    pub(super) quarantined: AtomicU64,
    pub(super) connections: AtomicU64,
    pub(super) accept_failures: AtomicU64,
    pub(super) refusal: Histogram,
    /// Once a response, so that a lock does no harm.
    pub(super) responses: Mutex<BTreeMap<(Route, u16), u64>>,
}

/// Where everything is counted. Cheap to clone; recording a step or a token takes no lock.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Inner>);

impl Metrics {
    /// For a pool of `instances`.
    #[must_use]
    pub fn new(instances: u32, served_model: &str) -> Self {
        let instances = (0..instances)
            .map(|instance| PerInstance {
                label: instance.to_string(),
                batch: Histogram::of_counts(BATCH),
                step: Histogram::of_durations(GAP_US),
                prefill_tokens: AtomicU64::new(0),
                exits: Words::new(EXITS),
            })
            .collect();
        Self(Arc::new(Inner {
            model: served_model.to_owned(),
            instances,
            first_token: Histogram::of_durations(FIRST_TOKEN_US),
            gap: Histogram::of_durations(GAP_US),
            end_to_end: Histogram::of_durations(REQUEST_US),
            queue: Histogram::of_durations(REQUEST_US),
            prefill: Histogram::of_durations(REQUEST_US),
            decode: Histogram::of_durations(REQUEST_US),
            request_prompt_tokens: Histogram::of_counts(TOKENS),
            request_generation_tokens: Histogram::of_counts(TOKENS),
            prompt_tokens: AtomicU64::new(0),
            generation_tokens: AtomicU64::new(0),
            cached_tokens: AtomicU64::new(0),
            finished: Words::new(FINISHED),
            cancelled: Words::new(CANCELLED),
            denied: Words::new(DENIED),
            failed: Words::new(FAILED),
            failovers: AtomicU64::new(0),
            stale: AtomicU64::new(0),
            quarantined: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            accept_failures: AtomicU64::new(0),
            refusal: Histogram::of_durations(REFUSAL_US),
            responses: Mutex::new(BTreeMap::new()),
        }))
    }

    fn instance(&self, instance: InstanceId) -> Option<&PerInstance> {
        self.0.instances.get(usize::try_from(instance.0).ok()?)
    }

    // ---- the link ----

    /// One engine step: sequences that decoded, prompt tokens computed beside them, and its duration.
    pub fn step(&self, instance: InstanceId, batch: u32, prefill_tokens: u32, duration: Duration) {
        let Some(instance) = self.instance(instance) else {
            return;
        };
        // A step that only prefills decodes nothing, and says nothing about the batch.
        if batch > 0 {
            instance.batch.observe(batch.into());
        }
        instance.step.observe_duration(duration);
        instance
            .prefill_tokens
            .fetch_add(prefill_tokens.into(), Ordering::Relaxed);
    }

    /// Between two tokens of one stream.
    pub fn gap(&self, gap: Duration) {
        self.0.gap.observe_duration(gap);
    }

    /// `count` things of an older attempt or generation were dropped.
    pub fn stale(&self, count: u64) {
        self.0.stale.fetch_add(count, Ordering::Relaxed);
    }

    // ---- the machine ----

    /// Counts what the machine reports.
    pub fn record(&self, measurement: &Measurement) {
        let inner = &self.0;
        match measurement {
            Measurement::Request(record) => self.request(record),
            Measurement::WorkerExit {
                instance, cause, ..
            } => {
                if let Some(instance) = self.instance(*instance) {
                    instance.exits.add(match cause {
                        ExitCause::Planned => "planned",
                        ExitCause::External => "external",
                        ExitCause::Engine => "engine",
                        ExitCause::Permanent => "permanent",
                    });
                }
            }
            // The view has the state.
            Measurement::Instance { .. } => {}
            Measurement::Stale => self.stale(1),
            Measurement::Failover { .. } => {
                inner.failovers.fetch_add(1, Ordering::Relaxed);
            }
            Measurement::FingerprintQuarantined { .. } => {
                inner.quarantined.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn request(&self, record: &RequestRecord) {
        let inner = &self.0;
        let generated = u64::from(record.completion_tokens);
        let prompt = u64::from(record.prompt_tokens.unwrap_or(0));
        inner
            .generation_tokens
            .fetch_add(generated, Ordering::Relaxed);
        if let Some(assigned) = record.assigned {
            inner
                .queue
                .observe_duration(assigned.since(record.received));
            inner.prompt_tokens.fetch_add(prompt, Ordering::Relaxed);
            let cached = u64::from(record.cached_tokens);
            inner.cached_tokens.fetch_add(cached, Ordering::Relaxed);
        }
        if let Some(first) = record.first_token {
            inner
                .first_token
                .observe_duration(first.since(record.received));
            if let Some(assigned) = record.assigned {
                inner.prefill.observe_duration(first.since(assigned));
            }
        }
        match &record.outcome {
            Outcome::Completed { reason } => {
                inner
                    .end_to_end
                    .observe_duration(record.ended.since(record.received));
                if let Some(first) = record.first_token {
                    inner.decode.observe_duration(record.ended.since(first));
                }
                inner.request_prompt_tokens.observe(prompt);
                inner.request_generation_tokens.observe(generated);
                inner.finished.add(match reason {
                    FinishReason::Stop => "stop",
                    FinishReason::Length => "length",
                });
            }
            Outcome::Denied(denied) => inner.denied.add(denied_word(denied)),
            Outcome::Failed(failure) => inner.failed.add(failed_word(failure)),
            Outcome::Cancelled(cause) => {
                inner.finished.add("abort");
                inner.cancelled.add(match cause {
                    CancelCause::ClientDisconnect => "client_disconnect",
                    CancelCause::SlowReader => "slow_reader",
                });
            }
        }
    }

    // ---- the front ----

    pub(crate) fn connection_opened(&self) {
        self.0.connections.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn connection_closed(&self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn accept_failed(&self) {
        self.0.accept_failures.fetch_add(1, Ordering::Relaxed);
    }

    /// A request was answered 429 so long after its head was read.
    pub(crate) fn refused(&self, after: Duration) {
        self.0.refusal.observe_duration(after);
    }

    pub(crate) fn responded(&self, route: Route, status: u16) {
        let mut responses = self
            .0
            .responses
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *responses.entry((route, status)).or_default() += 1;
    }

    /// All metrics in the OpenMetrics text format.
    #[must_use]
    pub fn encode(&self, view: &Arc<View>) -> String {
        scrape::text(&self.0, view)
    }
}

fn denied_word(denied: &Denied) -> &'static str {
    match denied {
        Denied::QueueFull { .. } => "queue_full",
        Denied::Draining { .. } => "draining",
        Denied::NoInstance { .. } => "no_instance",
        Denied::Parked { .. } => "parked",
        Denied::OutOfMemory { .. } => "out_of_memory",
        Denied::QueueTimeout { .. } => "queue_timeout",
        Denied::DeadlineExceeded => "deadline_exceeded",
        Denied::PromptTooLong { .. } => "prompt_too_long",
        Denied::PromptTooLarge { .. } => "prompt_too_large",
        Denied::PromptRejected(_) => "prompt_rejected",
        Denied::Quarantined { .. } => "quarantined",
    }
}

fn failed_word(failure: &Failure) -> &'static str {
    match failure {
        Failure::Rejected(_) => "rejected",
        Failure::Engine(_) => "engine",
        Failure::WorkerDied { oom: false, .. } => "worker_crashed",
        Failure::WorkerDied { oom: true, .. } => "worker_oom",
        Failure::NoInstance => "no_instance",
        Failure::Draining => "draining",
        Failure::DeadlineExceeded => "deadline_exceeded",
    }
}
