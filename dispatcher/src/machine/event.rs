//! All that the world can tell the machine.

use std::time::Duration;

use proto::{Attempt, FinishReason, Generation, InstanceId, RequestId};

use super::tick::Tick;

/// A request's share of the queue is kept by this: a hash of its API key, never the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(pub u64);

/// A request's identity across repeats, without its text: what a poisonous prompt is known by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub u64);

/// A model's identity; a stream resumes only where it is the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelHash(pub [u8; 32]);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    High,
    #[default]
    Normal,
    Low,
}

/// What the machine needs to know of a request at arrival. It never sees text.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrival {
    pub request: RequestId,
    /// When the front had it. It may have waited for the loop that tells this machine of it; a
    /// moment in the future is taken as now.
    pub received: Tick,
    pub key: KeyId,
    pub priority: Priority,
    pub fingerprint: Fingerprint,
    /// Bytes this entry holds while it waits: prompt text or ids.
    pub bytes: u64,
    /// Bytes of prompt text alone, for the token estimate (bytes/4) and the byte cap; 0 for ids.
    pub prompt_bytes: u64,
    /// Where the prompt came as ids its length is known.
    pub prompt_tokens: Option<u32>,
    /// What the client asked for; `None`: up to the context.
    pub max_tokens: Option<u32>,
    /// How long the client will wait for its last token, from arrival.
    pub deadline: Option<Duration>,
    /// Rolling hash over the canonical bytes of the prompt's head, for prefix affinity.
    pub affinity: Option<u64>,
}

/// How a worker process ended, by its wait status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExitStatus {
    Code(i32),
    Signal {
        signal: i32,
        /// The cgroup's `oom_kill` count rose while it died.
        oom: bool,
    },
}

/// Why the client no longer wants its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CancelCause {
    ClientDisconnect,
    SlowReader,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    // ---- clients ----
    Arrived(Box<Arrival>),
    ClientGone {
        request: RequestId,
        cause: CancelCause,
    },

    // ---- a worker's prompt thread ----
    /// Answer to `Action::SendTokenise`.
    Tokenised {
        request: RequestId,
        instance: InstanceId,
        generation: Generation,
        outcome: TokenisedOutcome,
    },

    // ---- a worker's life ----
    Spawned {
        instance: InstanceId,
        generation: Generation,
    },
    /// No process came to be. `permanent`: it never will (binary missing, not executable).
    SpawnFailed {
        instance: InstanceId,
        generation: Generation,
        permanent: bool,
    },
    /// Handshake done.
    Connected {
        instance: InstanceId,
        generation: Generation,
    },
    /// Loading (or warming) moved on.
    LoadProgress {
        instance: InstanceId,
        generation: Generation,
        permille: u32,
    },
    WarmProgress {
        instance: InstanceId,
        generation: Generation,
        done: u32,
        of: u32,
    },
    Ready {
        instance: InstanceId,
        generation: Generation,
        facts: WorkerFacts,
    },
    /// The engine thread's counters: from `Progress` frames and from `Tokens` frames (thinned out).
    Progress {
        instance: InstanceId,
        generation: Generation,
        pulse: u64,
        longest_step: Duration,
    },
    Drained {
        instance: InstanceId,
        generation: Generation,
    },
    /// The link is fenced: shut down, unread bytes discarded, every relay's attempt advanced. The
    /// world sends it once a generation, after EOF, a protocol error or `Action::CloseLink`, and in
    /// any case within `Policy::link_grace` of the exit.
    /// `accepted` holds what the relays of this link's requests had accepted, not what was sent.
    AttemptEnded {
        instance: InstanceId,
        generation: Generation,
        accepted: Vec<Accepted>,
    },
    /// `waitpid` returned.
    Exited {
        instance: InstanceId,
        generation: Generation,
        status: ExitStatus,
    },

    // ---- a request's life on a worker; all carry the attempt, stale ones are counted and dropped ----
    Started {
        request: RequestId,
        attempt: Attempt,
        cached_tokens: u32,
    },
    FirstToken {
        request: RequestId,
        attempt: Attempt,
    },
    /// The relay accepted the last token with its end. `tokens`: all of the stream, of every attempt.
    Finished {
        request: RequestId,
        attempt: Attempt,
        reason: FinishReason,
        tokens: u32,
    },
    /// The worker answered a cancel.
    CancelDone {
        request: RequestId,
        attempt: Attempt,
    },
    RequestFailed {
        request: RequestId,
        attempt: Attempt,
        error: AttemptError,
    },

    // ---- operators ----
    /// SIGTERM: stop admitting, finish what runs up to the drain time-out.
    Drain,
    /// Second signal: at once.
    Stop,
    /// SIGHUP: replace every worker, one after another; unpark parked ones.
    Reload,
    /// Memory watermark: `Soft` pauses assignment of new work, `Hard` sheds queued entries.
    Memory(MemoryPressure),

    // ---- time ----
    /// `next_deadline` has passed, or may have.
    DeadlineReached,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    pub request: RequestId,
    pub attempt: Attempt,
    /// Tokens of the whole stream that the relay holds.
    pub tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerFacts {
    pub slots: u32,
    /// Tokens per slot, prompt and output together.
    pub context_tokens: u32,
    pub longest_token_bytes: u32,
    pub model: ModelHash,
    /// Load and warm-up, for the Retry-After estimate.
    pub start_up: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenisedOutcome {
    /// The world keeps the ids; the machine needs their number.
    Tokens(u32),
    /// The client's fault, with words for it.
    Rejected(String),
    /// The prompt thread is busy or timed out: not the client's fault.
    Unavailable,
}

/// Why an attempt failed while its worker lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttemptError {
    /// The client's fault, with words for it.
    Rejected(String),
    /// The engine gave this row up.
    Engine(String),
    /// No slot, or draining: assign again, it does not count.
    NotTaken,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemoryPressure {
    #[default]
    None,
    Soft,
    Hard,
}
