//! Ticks to queue wait, time to first token, inter-token gap and total: the definitions live here.

use std::time::Duration;

use proto::{Generation, InstanceId, RequestId};

use super::action::Outcome;
use super::event::{ExitStatus, KeyId};
use super::tick::Tick;

/// What the machine has to say to the metrics, the log and the crash records.
#[derive(Clone, Debug, PartialEq)]
pub enum Measurement {
    /// A request's one terminal record.
    Request(Box<RequestRecord>),
    /// A worker process ended.
    WorkerExit {
        instance: InstanceId,
        generation: Generation,
        status: ExitStatus,
        cause: ExitCause,
        uptime: Duration,
        /// Requests that were assigned to it.
        batch: Vec<RequestId>,
    },
    /// An instance changed its state.
    Instance {
        instance: InstanceId,
        generation: Generation,
        state: &'static str,
    },
    /// A frame, exit or timer of an older generation or attempt was dropped.
    Stale,
    /// An attempt ended and its request goes on elsewhere; `tokens` were accepted before.
    Failover {
        request: RequestId,
        tokens: u32,
    },
    FingerprintQuarantined {
        request: RequestId,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExitCause {
    /// Asked for: drain, reload, stop.
    Planned,
    /// SIGKILL, SIGTERM, SIGINT or SIGHUP that we did not send.
    External,
    /// Every other signal, an unplanned exit, a stall kill, the OOM killer.
    Engine,
    /// Exit code 78: configuration, do not retry.
    Permanent,
}

/// Moments of one request on the machine's clock. `None`: it never came to that.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestRecord {
    pub request: RequestId,
    /// A hash of its API key.
    pub key: KeyId,
    pub prompt_bytes: u64,
    pub received: Tick,
    /// First assignment: queue wait is from `received` to here.
    pub assigned: Option<Tick>,
    /// TTFT is from `received` to here, queue and load included.
    pub first_token: Option<Tick>,
    pub ended: Tick,
    pub prompt_tokens: Option<u32>,
    pub completion_tokens: u32,
    pub cached_tokens: u32,
    pub attempts: u32,
    pub instance: Option<InstanceId>,
    pub outcome: Outcome,
}
