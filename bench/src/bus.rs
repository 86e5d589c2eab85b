//! Read bandwidth of this machine's memory: the ceiling that all decoding is held to.

use std::sync::Barrier;
use std::time::Instant;

use serde::Serialize;

use crate::statistics::{figure, interpolated, median};

/// A sum over so many accumulators at once leaves no chain of additions for the bus to wait for.
const LANES: usize = 32;

/// How it is measured.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub threads: usize,
    /// Of all threads together.
    pub bytes: usize,
    pub passes: usize,
}

/// Reading one array with so many threads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bandwidth {
    pub threads: usize,
    pub bytes: usize,
    /// GB (10⁹ bytes) per second, each pass.
    pub gb_per_s: Vec<f64>,
    /// Sum of what was read: it is known, so a compiler that left reads out would show.
    pub checksum: u64,
}

impl std::fmt::Display for Bandwidth {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let at = |q| interpolated(&self.gb_per_s, q).map_or_else(|| "-".into(), figure);
        write!(
            out,
            "threads={} bytes={} passes={} read_gb_per_s best={} median={} worst={}",
            self.threads,
            self.bytes,
            self.gb_per_s.len(),
            at(1.0),
            median(&self.gb_per_s).map_or_else(|| "-".into(), figure),
            at(0.0)
        )
    }
}

/// Bytes of the largest cache of this machine, where the system tells.
#[must_use]
pub fn last_level_cache_bytes() -> Option<usize> {
    let folder = "/sys/devices/system/cpu/cpu0/cache";
    let sizes = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let text = std::fs::read_to_string(entry.path().join("size")).ok()?;
            let text = text.trim();
            let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
            let shift = match unit {
                "K" => 10,
                "M" => 20,
                _ => return None,
            };
            Some(number.parse::<usize>().ok()? << shift)
        });
    sizes.max()
}

/// Reads `plan.bytes` over and over, each thread its own part, all starting a pass together.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^52")]
pub fn measure(plan: Plan) -> Bandwidth {
    let threads = plan.threads.max(1);
    let words = (plan.bytes / 8 / threads / LANES).max(1) * LANES;
    let barrier = Barrier::new(threads);
    let times: Vec<(Vec<(Instant, Instant)>, u64)> = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    // Written by the thread that reads it, so that it lies near it; not zero, or the pages would be one.
                    let array = vec![1_u64; words];
                    let mut times = Vec::with_capacity(plan.passes);
                    let mut checksum = sum(&array);
                    for _ in 0..plan.passes {
                        barrier.wait();
                        let began = Instant::now();
                        let read = sum(std::hint::black_box(&array));
                        times.push((began, Instant::now()));
                        checksum = checksum.wrapping_add(read);
                    }
                    (times, checksum)
                })
            })
            .collect();
        readers
            .into_iter()
            .filter_map(|reader| reader.join().ok())
            .collect()
    });
    let total_bytes = words * 8 * threads;
    let passes = (0..plan.passes).filter_map(|pass| {
        let began = times.iter().map(|(times, _)| times[pass].0).min()?;
        let ended = times.iter().map(|(times, _)| times[pass].1).max()?;
        Some(total_bytes as f64 / (ended - began).as_secs_f64() / 1e9)
    });
    Bandwidth {
        threads,
        bytes: total_bytes,
        gb_per_s: passes.collect(),
        checksum: times.iter().map(|(_, checksum)| *checksum).sum(),
    }
}

fn sum(array: &[u64]) -> u64 {
    let mut lanes = [0_u64; LANES];
    for chunk in array.chunks_exact(LANES) {
        for (lane, word) in lanes.iter_mut().zip(chunk) {
            *lane = lane.wrapping_add(*word);
        }
    }
    lanes.iter().fold(0, |sum, lane| sum.wrapping_add(*lane))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read_in_every_pass() {
        let plan = Plan {
            threads: 2,
            bytes: 1 << 20,
            passes: 5,
        };
        let found = measure(plan);
        assert_eq!(found.bytes, 1 << 20);
        assert_eq!(found.checksum, (1 << 17) * 6);
        assert_eq!(found.gb_per_s.len(), 5);
        assert!(
            found
                .gb_per_s
                .iter()
                .all(|rate| *rate > 0.01 && *rate < 10_000.0)
        );
    }
}
