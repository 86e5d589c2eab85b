//! What reaches the driver loop, from links, processes, signals and the HTTP front.

use std::time::Duration;

use proto::to_dispatcher::{PromptError, Ready, Tokenised};
use proto::{Attempt, FinishReason, Generation, InstanceId, RequestId};

use crate::bus::Measurement;
use crate::config::Config;
use crate::link;
use crate::machine::event::{Accepted, AttemptError, ExitStatus, MemoryPressure};
use crate::memory::watch::Report;

/// Everything but the front's commands, which have a channel of their own.
#[derive(Debug)]
pub enum Input {
    // ---- from a link ----
    /// Handshake done; `handle` reaches the worker.
    Connected {
        instance: InstanceId,
        generation: Generation,
        handle: link::Handle,
        build: String,
    },
    Loading {
        instance: InstanceId,
        generation: Generation,
        permille: u32,
    },
    Warming {
        instance: InstanceId,
        generation: Generation,
        done: u32,
        of: u32,
    },
    Ready {
        instance: InstanceId,
        generation: Generation,
        ready: Box<Ready>,
    },
    Tokenised {
        request: RequestId,
        instance: InstanceId,
        generation: Generation,
        outcome: Result<Tokenised, PromptError>,
    },
    Started {
        request: RequestId,
        attempt: Attempt,
        cached_tokens: u32,
    },
    FirstToken {
        request: RequestId,
        attempt: Attempt,
    },
    Finished {
        request: RequestId,
        attempt: Attempt,
        reason: FinishReason,
        tokens: u32,
    },
    CancelDone {
        request: RequestId,
        attempt: Attempt,
    },
    RequestFailed {
        request: RequestId,
        attempt: Attempt,
        error: AttemptError,
    },
    /// The relay's bound is passed.
    SlowReader {
        request: RequestId,
    },
    /// Counters of the engine thread, at most every 50 ms a link. `tokens`, `batch_sum` and `kv_tokens`
    /// over `steps_done` are since the last one.
    Progress {
        instance: InstanceId,
        generation: Generation,
        pulse: u64,
        steps: u64,
        live_slots: u32,
        longest_step: Duration,
        tokens: u64,
        batch_sum: u64,
        steps_done: u64,
        /// Cached tokens that the rows of these steps read.
        kv_tokens: u64,
        busy: Duration,
    },
    Drained {
        instance: InstanceId,
        generation: Generation,
    },
    /// The link is fenced and shut down. Once a connected generation.
    AttemptEnded {
        instance: InstanceId,
        generation: Generation,
        accepted: Vec<Accepted>,
        cause: LinkEnd,
    },
    /// Frames, rows or exits of older attempts or generations that were dropped.
    Stale {
        count: u64,
    },

    // ---- from processes ----
    /// `tail`: the last lines of the worker's output.
    Exited {
        instance: InstanceId,
        generation: Generation,
        status: ExitStatus,
        tail: Vec<String>,
    },

    // ---- from signals ----
    Drain,
    Stop,
    Reload,
    /// The configuration was read again, or why it cannot be.
    Reloaded(Box<Result<Config, String>>),

    // ---- from the memory watch ----
    Memory(MemoryPressure),
    /// One look: what the workers take, what is used of the limits.
    Measured(Box<Report>),

    // ---- from the bus ----
    /// The read bandwidth of this machine's memory.
    BusMeasured(Box<Measurement>),
}

/// Why a link ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEnd {
    /// The worker's end closed.
    Eof,
    /// The worker broke the protocol, with words.
    Protocol(String),
    /// We closed it.
    Closed,
}
