//! Read bandwidth of this machine's memory: the ceiling that all decoding is held to.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde::Serialize;

/// A sum over so many accumulators at once leaves no chain of additions for the bus to wait for.
const LANES: usize = 32;
/// The array is at least so many times the last-level cache, so that next to nothing of it is found there.
const CACHES: u64 = 4;
/// An array is not smaller than this in bytes; where the cache's size is unknown it is larger than any.
const ARRAY_BYTES_MIN: u64 = 256 << 20;
const ARRAY_BYTES_UNKNOWN_CACHE: u64 = 1 << 30;
/// An array takes at most this share of the machine's memory, one in so many.
const MEMORY_SHARE: u64 = 4;

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

impl Bandwidth {
    /// GB per second of the fastest pass: nothing that the engines do can pass it.
    #[must_use]
    pub fn best(&self) -> Option<f64> {
        self.gb_per_s.iter().copied().reduce(f64::max)
    }

    /// GB per second of the middle pass.
    #[must_use]
    pub fn median(&self) -> Option<f64> {
        let mut sorted = self.gb_per_s.clone();
        sorted.sort_by(f64::total_cmp);
        let upper = *sorted.get(sorted.len() / 2)?;
        let lower = sorted[(sorted.len() - 1) / 2];
        Some(lower.midpoint(upper))
    }
}

/// Bytes of an array that is read from memory and not from a cache of `cache_bytes`.
///
/// `None`: the machine has too little memory for it.
#[must_use]
pub fn array_bytes(cache_bytes: Option<u64>, memory_bytes: u64) -> Option<usize> {
    let wanted = cache_bytes.map_or(ARRAY_BYTES_UNKNOWN_CACHE, |cache| {
        cache.saturating_mul(CACHES).max(ARRAY_BYTES_MIN)
    });
    let fits = wanted <= memory_bytes / MEMORY_SHARE;
    usize::try_from(wanted).ok().filter(|_| fits)
}

/// Reads `plan.bytes` over and over, each thread its own part, all starting a pass together.
#[must_use]
pub fn measure(plan: Plan) -> Bandwidth {
    measure_while(plan, &|| true)
}

/// As [`measure`], while `may` holds: it is asked before and after each pass. A pass at whose end it
/// does not hold is not counted, and none is begun afterwards.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^52")]
pub fn measure_while(plan: Plan, may: &(dyn Fn() -> bool + Sync)) -> Bandwidth {
    let threads = plan.threads.max(1);
    let words = (plan.bytes / 8 / threads / LANES).max(1) * LANES;
    let barrier = Barrier::new(threads);
    let stop = AtomicBool::new(false);
    let times: Vec<(Vec<(Instant, Instant)>, u64)> = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    // Written by the thread that reads it, so that it lies near it; not zero, or the pages would be one.
                    let array = vec![1_u64; words];
                    let mut times = Vec::with_capacity(plan.passes);
                    let mut checksum = sum(&array);
                    for _ in 0..plan.passes {
                        if barrier.wait().is_leader() && !may() {
                            stop.store(true, Ordering::Relaxed);
                        }
                        barrier.wait();
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
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
    let mut counted = times
        .iter()
        .map(|(times, _)| times.len())
        .min()
        .unwrap_or(0);
    if counted > 0 && !may() {
        counted -= 1;
    }
    let passes = (0..counted).filter_map(|pass| {
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
    use std::sync::atomic::AtomicUsize;

    use super::*;

    const SMALL: Plan = Plan {
        threads: 2,
        bytes: 1 << 20,
        passes: 5,
    };

    #[test]
    fn every_byte_is_read_in_every_pass() {
        let found = measure(SMALL);
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

    #[test]
    fn a_pass_that_was_disturbed_is_not_counted_and_is_the_last() {
        let asked = AtomicUsize::new(0);
        let found = measure_while(SMALL, &|| asked.fetch_add(1, Ordering::Relaxed) < 3);
        // Asked before the first, second and third; the fourth time says no.
        assert_eq!(found.checksum, (1 << 17) * 4, "three passes were read");
        assert_eq!(found.gb_per_s.len(), 2, "the third was disturbed");
        let none = measure_while(SMALL, &|| false);
        assert_eq!((none.best(), none.median()), (None, None));
    }

    #[test]
    fn the_best_and_the_middle_pass_are_told() {
        let mut found = measure(SMALL);
        found.gb_per_s = vec![20.0, 25.0, 19.0];
        assert_eq!(found.best(), Some(25.0));
        assert_eq!(found.median(), Some(20.0));
        found.gb_per_s.push(22.0);
        assert_eq!(found.median(), Some(21.0));
    }

    #[test]
    fn the_array_is_four_caches_or_is_not_measured() {
        const GIB: u64 = 1 << 30;
        assert_eq!(array_bytes(Some(32 << 20), 8 * GIB), Some(256 << 20));
        assert_eq!(array_bytes(Some(384 << 20), 64 * GIB), Some(1536 << 20));
        assert_eq!(array_bytes(None, 64 * GIB), Some(1 << 30));
        assert_eq!(array_bytes(Some(384 << 20), 4 * GIB), None);
    }
}
