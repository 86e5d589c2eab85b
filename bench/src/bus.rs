//! Read bandwidth of this machine's memory: the dispatcher's own measurement, as lines of the bench.

pub use dispatcher::bus::bandwidth::{Bandwidth, Plan, measure};

use crate::statistics::{figure, interpolated, median};

/// Bytes of the last-level caches of this machine together, where the system tells.
#[must_use]
pub fn last_level_cache_bytes() -> Option<usize> {
    let bytes = dispatcher::bus::cache::last_level_bytes()?;
    usize::try_from(bytes).ok()
}

/// One line for people.
#[must_use]
pub fn line(found: &Bandwidth) -> String {
    let at = |q| interpolated(&found.gb_per_s, q).map_or_else(|| "-".into(), figure);
    format!(
        "threads={} bytes={} passes={} read_gb_per_s best={} median={} worst={}",
        found.threads,
        found.bytes,
        found.gb_per_s.len(),
        at(1.0),
        median(&found.gb_per_s).map_or_else(|| "-".into(), figure),
        at(0.0)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_best_median_and_worst() {
        let found = Bandwidth {
            threads: 2,
            bytes: 1 << 20,
            gb_per_s: vec![20.0, 30.0, 25.0],
            checksum: 0,
        };
        let line = line(&found);
        for part in ["threads=2", "passes=3", "best=30", "median=25", "worst=20"] {
            assert!(line.contains(part), "{line}");
        }
    }
}
