//! The control plane: no I/O, no clock, no randomness of its own.
//!
//! [`Dispatch`] is told what happened ([`Event`]) and when, and says what to do ([`Action`]) and
//! when to be called again. One driver loop owns it; token text never passes through it.
//!
//! # An instance
//!
//! ```text
//!              hello          loaded         warm
//!  Spawning ─────────► Loading ─────► Warming ─────► Ready ──reload, drain──► Draining
//!     ▲   \______________ \______________ \_________   │ stalled                │ empty, asked,
//!     │        end of link, exit, or deadline        \  ▼                        ▼ or out of time
//!     │ due, or at once                               ▼ Terminating (TERM, then KILL at its deadline)
//!  Backoff ◄──────────────────────────────── link fenced and process reaped
//!     └── budget spent, or permanent ──► Quarantined (tried again later, or after a reload)
//! ```
//!
//! Two things end, each for itself: the link (`AttemptEnded`) and the process (`Exited`). Requests
//! go on after the first, as soon as it is known whether the death counts against them; the place is
//! filled again after both. While the dispatcher leaves, an empty place is `Stopped`.
//!
//! # A request
//!
//! ```text
//!  arrived ──► Queued ⇄ Measuring ──► Queued ──► Assigned ──► Streaming ──► exactly one Outcome
//!     │          ▲ ▲   └► Pausing ─┘    ▲           │             │
//!     │          │ └────────────────────┴── Held ◄──┴─────────────┘ its worker died
//!     └► Denied  └─ the head of its key's queue
//! ```
//!
//! # Invariants
//!
//! [`Dispatch::check_invariants`] holds them; a debug build calls it after every event.
//!
//! * accepted = queued + assigned + finished
//! * the queue holds no more than its bound, resumed requests apart
//! * an instance's in-flight equals the seats assigned to it, those of unanswered cancels included,
//!   and is no more than its slots
//! * assigned implies that the generation is current and its link open
//! * a request that runs alone has no company
//! * a request that waited too long, or killed too many engines, is gone
//! * received <= assigned <= first token <= now
//! * `next_deadline` is the minimum of all deadlines

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod action;
mod admission;
mod dispatch;
pub mod event;
mod instance;
mod liveness;
pub mod measurement;
pub mod policy;
mod queue;
mod request;
mod restart;
mod schedule;
pub mod snapshot;
pub mod tick;
mod timers;

pub use action::{Action, Denied, Failure, Outcome, QueueBound};
pub use dispatch::Dispatch;
pub use event::{Arrival, Event};
pub use policy::Policy;
pub use snapshot::Snapshot;
pub use tick::Tick;
