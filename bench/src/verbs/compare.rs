//! `compare`: two servers in turn, or two files, and whether one is faster.

use std::path::Path;

use super::matrix::{Asked, closed, measure};
use super::say;
use crate::cli::CompareArgs;
use crate::error::BenchError;
use crate::record::{self, Recorded};
use crate::report;
use crate::report::compared::{common, key_words, sound};
use crate::report::markdown::Slo;
use crate::sweep::Order;
use crate::target::Size;
use crate::verdict;

pub(super) fn compare_verb(args: &CompareArgs) -> Result<(), BenchError> {
    if let [a, b] = args.files.as_slice() {
        return compare_files(a, b, args.matrix.seed);
    }
    if args.matrix.arm.len() != 2 {
        return Err(BenchError::Usage(
            "compare takes --arm twice, or --files".into(),
        ));
    }
    let asked = Asked {
        sizes: vec![Size {
            instances: args.instances,
            slots: args.slots,
        }],
        loads: closed(&args.concurrency),
        order: Some(Order::Alternating),
        repeats: Some(5),
        ..Asked::of("compare")
    };
    let found = measure(&args.matrix, &asked)?;
    say(&report::markdown(&found, Slo::default()));
    Ok(())
}

fn compare_files(a: &Path, b: &Path, seed: u64) -> Result<(), BenchError> {
    let last = |path: &Path| -> Result<Recorded, BenchError> {
        let mut runs = record::read(path)?;
        runs.pop()
            .ok_or_else(|| BenchError::Usage(format!("{} holds no run", path.display())))
    };
    let (one, other) = (last(a)?, last(b)?);
    one.run.contract.require_same(&other.run.contract)?;
    let name = |path: &Path| {
        let stem = path.file_stem().unwrap_or_default();
        stem.to_string_lossy().into_owned()
    };
    let (mine, theirs) = (&one.cells, &other.cells);
    let keys = common(mine, theirs);
    if keys.is_empty() {
        return Err(BenchError::Usage(
            "the files have no cell of the same size and load".into(),
        ));
    }
    for key in keys {
        let compared = verdict::compare(
            &sound(mine, None, key),
            &sound(theirs, None, key),
            false,
            seed,
        );
        say(&format!("{}\n", key_words(&key)));
        say(&verdict::markdown(&name(a), &name(b), &compared));
    }
    Ok(())
}
