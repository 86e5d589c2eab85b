//! Durations measured inside a worker. Never instants: clocks do not cross processes.

use serde::{Deserialize, Serialize};

use crate::codec::{Decode, Encode};

/// A duration in microseconds.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    Encode,
    Decode,
)]
pub struct Micros(pub u64);

impl From<std::time::Duration> for Micros {
    fn from(duration: std::time::Duration) -> Self {
        Self(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
    }
}

impl From<Micros> for std::time::Duration {
    fn from(micros: Micros) -> Self {
        Self::from_micros(micros.0)
    }
}
