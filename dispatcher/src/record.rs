//! Where measurements go: metrics, log lines, crash records. Never prompt text.

use std::collections::VecDeque;

use crate::crash::{CrashLog, CrashRecord, unix_seconds};
use crate::fleet::PostMortem;
use crate::machine::Outcome;
use crate::machine::event::ExitStatus;
use crate::machine::measurement::{ExitCause, Measurement, RequestRecord};
use crate::metrics::Metrics;
use crate::view::EventView;

/// Events kept for `/status`.
const EVENTS_MAX: usize = 32;

/// Takes what the machine measured to where people look.
pub(crate) struct Recorder {
    metrics: Metrics,
    crashes: CrashLog,
    events: VecDeque<EventView>,
}

impl Recorder {
    pub(crate) fn new(metrics: Metrics, crashes: CrashLog) -> Self {
        Self {
            metrics,
            crashes,
            events: VecDeque::new(),
        }
    }

    /// Keeps something that an operator would want to know of.
    pub(crate) fn event(&mut self, words: String) {
        if self.events.len() >= EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(EventView {
            at_unix_s: unix_seconds(),
            words,
        });
    }

    /// The newest ones last.
    pub(crate) fn events(&self) -> Vec<EventView> {
        self.events.iter().cloned().collect()
    }

    pub(crate) fn record(&mut self, measurement: &Measurement) {
        self.metrics.record(measurement);
        match measurement {
            Measurement::Request(record) => log_request(record),
            Measurement::Instance {
                instance,
                generation,
                state,
            } => {
                tracing::info!(%instance, %generation, state, "instance");
                if matches!(*state, "ready" | "backoff" | "quarantined") {
                    self.event(format!("instance {instance} is {state}"));
                }
            }
            Measurement::Failover { request, tokens } => {
                tracing::warn!(%request, tokens, "request goes on elsewhere");
                self.event(format!("a request went on elsewhere after {tokens} tokens"));
            }
            Measurement::FingerprintQuarantined { request } => {
                tracing::error!(%request, "two engines died of this request: its prompt is quarantined");
                self.event("two engines died of one request: its prompt is quarantined".to_owned());
            }
            Measurement::WorkerExit { .. } | Measurement::Stale => {}
        }
    }

    pub(crate) fn stale(&self, count: u64) {
        self.metrics.stale(count);
    }

    /// A worker ended: one log line, and a crash record where nobody asked for it.
    pub(crate) fn worker_exit(
        &mut self,
        measurement: &Measurement,
        post_mortem: PostMortem,
        fingerprints: Vec<String>,
    ) {
        self.metrics.record(measurement);
        let Measurement::WorkerExit {
            instance,
            generation,
            status,
            cause,
            uptime,
            ..
        } = measurement
        else {
            return;
        };
        if *cause == ExitCause::Planned {
            tracing::info!(%instance, %generation, ?status, "worker exited as asked");
            return;
        }
        tracing::warn!(
            %instance, %generation, ?status, ?cause, ?uptime,
            last_line = post_mortem.tail.last().map_or("", String::as_str),
            "worker died"
        );
        let (exit_code, signal, oom) = match *status {
            ExitStatus::Code(code) => (Some(code), None, false),
            ExitStatus::Signal { signal, oom } => (None, Some(signal), oom),
        };
        let record = CrashRecord {
            at_unix_s: unix_seconds(),
            instance: instance.0,
            generation: generation.0,
            cause: cause_word(*cause).to_owned(),
            exit_code,
            signal,
            oom,
            uptime_ms: u64::try_from(uptime.as_millis()).unwrap_or(u64::MAX),
            engine: post_mortem.engine,
            model: post_mortem.model,
            fingerprints,
            tail: post_mortem.tail,
        };
        self.event(format!(
            "the worker of instance {instance} died ({}): {}",
            record.cause,
            record.how()
        ));
        if let Err(error) = self.crashes.write(&record) {
            // A full disk must not take the server with it.
            tracing::error!(%error, "failed to write the crash record");
        }
    }
}

fn cause_word(cause: ExitCause) -> &'static str {
    match cause {
        ExitCause::Planned => "planned",
        ExitCause::External => "external",
        ExitCause::Engine => "engine",
        ExitCause::Permanent => "permanent",
    }
}

fn log_request(record: &RequestRecord) {
    let ms = |tick: Option<crate::machine::Tick>| {
        tick.map(|tick| tick.since(record.received).as_secs_f64() * 1e3)
    };
    let total_ms = record.ended.since(record.received).as_secs_f64() * 1e3;
    tracing::info!(
        request = record.request.0,
        key = format_args!("{:016x}", record.key.0),
        prompt_bytes = record.prompt_bytes,
        outcome = outcome_word(&record.outcome),
        instance = record.instance.map(|instance| instance.0),
        attempts = record.attempts,
        prompt_tokens = record.prompt_tokens,
        completion_tokens = record.completion_tokens,
        cached_tokens = record.cached_tokens,
        queue_ms = ms(record.assigned),
        ttft_ms = ms(record.first_token),
        total_ms,
        "request"
    );
}

/// One word for the log: the variant's name, never its words (which may quote the client).
fn outcome_word(outcome: &Outcome) -> &'static str {
    use crate::machine::event::CancelCause;
    use crate::machine::{Denied, Failure};
    match outcome {
        Outcome::Completed { reason } => reason.as_str(),
        Outcome::Denied(denied) => match denied {
            Denied::QueueFull { .. } => "queue_full",
            Denied::Draining { .. } => "draining",
            Denied::NoInstance { .. } => "no_instance",
            Denied::Parked { .. } => "parked",
            Denied::OutOfMemory { .. } => "out_of_memory",
            Denied::QueueTimeout { .. } => "queue_timeout",
            Denied::DeadlineExceeded => "deadline_exceeded",
            Denied::PromptTooLong { .. } | Denied::PromptTooLarge { .. } => {
                "context_length_exceeded"
            }
            Denied::PromptRejected(_) => "prompt_rejected",
            Denied::Quarantined { .. } => "quarantined",
        },
        Outcome::Failed(failure) => match failure {
            Failure::Rejected(_) => "rejected",
            Failure::Engine(_) => "engine_error",
            Failure::WorkerDied { .. } => "worker_died",
            Failure::NoInstance => "no_instance",
            Failure::Draining => "draining",
            Failure::DeadlineExceeded => "deadline_exceeded",
        },
        Outcome::Cancelled(CancelCause::ClientDisconnect) => "client_disconnect",
        Outcome::Cancelled(CancelCause::SlowReader) => "slow_reader",
    }
}
