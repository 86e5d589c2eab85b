//! The memory bus: how fast it reads, how much of that the engines use, and what would help.
//!
//! Decoding reads every weight once a step, whatever the batch. So the bytes of a step times the
//! steps per second, over what the memory can deliver, says how far an engine is from the machine's
//! own limit. docs/BUS.md has the formulas.

pub mod advice;
pub mod bandwidth;
pub mod cache;
pub mod datasheet;
pub mod learned;
pub mod machine;
pub mod processor;
pub mod store;
pub mod usage;
pub mod watch;
pub mod weights;

pub use bandwidth::Bandwidth;
pub use learned::{Learned, StepTimes};
pub use machine::Machine;
pub use processor::Processor;
pub use store::{Measurement, Store};
pub use usage::BusView;
pub use weights::Weights;
