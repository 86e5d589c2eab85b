//! The control plane: no I/O, no clock, no randomness of its own.

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
