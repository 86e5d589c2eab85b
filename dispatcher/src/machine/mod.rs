//! The control plane: no I/O, no clock, no randomness of its own.

pub mod action;
pub mod event;
pub mod measurement;
pub mod policy;
pub mod tick;

pub use action::{Action, Denied, Failure, Outcome, QueueBound};
pub use event::{Arrival, Event};
pub use policy::Policy;
pub use tick::Tick;
