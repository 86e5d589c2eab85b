//! The memory bus: what is known of its read bandwidth, or what it is measured as now.

use std::path::Path;

use super::Finding;
use crate::bus::Machine;
use crate::bus::store::{self, Measurement, Store};

const SUBJECT: &str = "memory bus";

/// What is kept of this machine; with `anew`, measured now, kept, and told.
pub(super) fn examine(cache: &Path, anew: bool) -> Finding {
    let machine = Machine::probe();
    let store = Store::new(cache);
    if !anew {
        return match store.get(&machine) {
            Some(known) => told(&known),
            None => Finding::unknown(
                SUBJECT,
                "not measured yet: a server does it in an idle moment, `dispatcher doctor --bus` at once",
            ),
        };
    }
    let Some(found) = store::measure_now(&machine) else {
        return Finding::unknown(
            SUBJECT,
            "cannot be measured: too little memory is free for an array that the caches cannot hold",
        );
    };
    match store.put(&found) {
        Ok(()) => told(&found),
        Err(error) => Finding::poor(
            SUBJECT,
            format!("{}, which cannot be kept: {error}", words(&found)),
            format!("make {} writable", cache.display()),
        ),
    }
}

fn told(found: &Measurement) -> Finding {
    if found.is_settled() {
        return Finding::good(SUBJECT, words(found));
    }
    Finding::poor(
        SUBJECT,
        words(found),
        "passes differ, so something else used the memory: end it and run `dispatcher doctor --bus`",
    )
}

fn words(found: &Measurement) -> String {
    format!(
        "reads {:.1} GB/s at best (median {:.1}, {} threads)",
        found.best_gb_per_s, found.median_gb_per_s, found.threads
    )
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    fn measured(median_gb_per_s: f64) -> Measurement {
        Measurement {
            machine: Machine::probe(),
            threads: 2,
            array_bytes: 1 << 30,
            best_gb_per_s: 25.0,
            median_gb_per_s,
            passes: 20,
            unix_s: 0,
        }
    }

    #[test]
    fn what_is_kept_is_told_and_what_is_not_settled_says_so() {
        let cache = tempfile::tempdir().unwrap();
        assert_eq!(examine(cache.path(), false).level, Level::Unknown);
        for (median, level) in [(24.0, Level::Good), (15.0, Level::Poor)] {
            Store::new(cache.path()).put(&measured(median)).unwrap();
            let finding = examine(cache.path(), false);
            assert_eq!(finding.level, level);
            assert!(finding.fact.starts_with("reads 25.0 GB/s"), "{finding:?}");
        }
    }
}
