//! Read bandwidth of this machine's memory: the dispatcher's own measurement.

pub use dispatcher::bus::bandwidth::{Plan, measure};

/// Bytes of the last-level caches of this machine together, where the system tells.
#[must_use]
pub fn last_level_cache_bytes() -> Option<usize> {
    let bytes = dispatcher::bus::cache::last_level_bytes()?;
    usize::try_from(bytes).ok()
}
