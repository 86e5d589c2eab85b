//! All that the machine can ask of the world.

use std::time::Duration;

use proto::{Attempt, FinishReason, Generation, InstanceId, RequestId};

use super::event::CancelCause;
use super::measurement::Measurement;

#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    // ---- processes ----
    Spawn {
        instance: InstanceId,
        generation: Generation,
    },
    /// SIGTERM to the worker's group.
    Terminate {
        instance: InstanceId,
        generation: Generation,
    },
    /// SIGKILL to the worker's group. The world fences the link at the same moment and then sends
    /// `Event::AttemptEnded`.
    Kill {
        instance: InstanceId,
        generation: Generation,
    },
    /// Fence the link now (its process may live on) and send `Event::AttemptEnded`.
    CloseLink {
        instance: InstanceId,
        generation: Generation,
    },
    SendDrain {
        instance: InstanceId,
        generation: Generation,
    },

    // ---- requests ----
    SendTokenise {
        request: RequestId,
        instance: InstanceId,
        generation: Generation,
    },
    /// Where nothing is left to be produced (a resumed stream whose ids already match a stop), the
    /// world sends nothing and answers with `Event::Finished` itself.
    SendGenerate {
        request: RequestId,
        attempt: Attempt,
        instance: InstanceId,
        generation: Generation,
    },
    /// The seat stays taken until `Event::CancelDone`, `Finished` or `RequestFailed` of this attempt,
    /// or the link's `AttemptEnded`: a row with an end must be told even where its relay has ended.
    SendCancel {
        request: RequestId,
        attempt: Attempt,
        instance: InstanceId,
        generation: Generation,
    },
    /// The request's one terminal event. For `Completed` the relay holds the end in general (it
    /// does not where the last worker died between the last token and its end); for all others
    /// the relay is ended with it. The relay's first end wins, so the world ends it in every case,
    /// and drops what it kept for a resume.
    End {
        request: RequestId,
        outcome: Outcome,
    },

    // ---- records ----
    Record(Measurement),
    /// All is ended: the dispatcher may exit. Nothing follows.
    Stopped,
}

/// How a request ended. Exactly one each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Completed {
        reason: FinishReason,
    },
    /// It never occupied a slot.
    Denied(Denied),
    /// It was started and could not be finished.
    Failed(Failure),
    Cancelled(CancelCause),
}

/// Why a request was not let in, or left the queue before it had a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denied {
    /// 429: the queue is full by count, bytes or estimated tokens, or this key's share of it is used up.
    QueueFull {
        bound: QueueBound,
        depth: u64,
        limit: u64,
        retry_after: Duration,
    },
    /// 503.
    Draining { retry_after: Duration },
    /// 503: every instance is parked; the cause of the last one.
    NoInstance { retry_after: Duration },
    /// 503: the dispatcher's configuration cannot work, so that there is no machine that could serve.
    Parked {
        cause: String,
        retry_after: Duration,
    },
    /// 503: memory is short.
    OutOfMemory { retry_after: Duration },
    /// 504: it waited longer than its bound and will never start.
    QueueTimeout { waited: Duration },
    /// 504: the client's own deadline passed.
    DeadlineExceeded,
    /// 400 `context_length_exceeded`.
    PromptTooLong {
        prompt_tokens: u32,
        context_tokens: u32,
    },
    /// 400 `context_length_exceeded`, by the byte cap.
    PromptTooLarge { bytes: u64, limit_bytes: u64 },
    /// 400: the template, or a token id out of range.
    PromptRejected(String),
    /// 503: it was poisonous before, and its fingerprint is quarantined.
    Quarantined { retry_after: Duration },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueueBound {
    Entries,
    Bytes,
    Tokens,
    KeyShare,
}

/// Why a request that had started could not be finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// 400: the engine refused it.
    Rejected(String),
    /// 500: the engine gave the row up.
    Engine(String),
    /// 503 `worker_crashed` (or `worker_oom`): two engines died of it.
    WorkerDied { oom: bool, deaths: u32 },
    /// 503: no instance with the same model is left to resume it.
    NoInstance,
    /// 503: the drain time-out, or a second signal, ended it.
    Draining,
    /// 504: the client's own deadline passed mid-stream.
    DeadlineExceeded,
}
