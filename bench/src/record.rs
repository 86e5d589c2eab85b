//! The lines of a result file. Everything reported can be computed again from them.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cell::{Cell, Measured};
use crate::contract::Contract;
use crate::error::BenchError;
use crate::host::Surroundings;
use crate::process::Memory;
use crate::report::jsonl;
use crate::sample::Sample;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub enum Record {
    /// The first of a run; cells below it belong to it.
    Run(Box<Run>),
    /// A cell begins.
    Cell { cell: u32, what: Cell },
    /// A request of a cell has ended.
    Sample { cell: u32, sample: Box<Sample> },
    /// A cell has ended.
    CellEnd { cell: u32, memory: Option<Memory> },
    /// A cell could not be measured.
    CellFailed { cell: u32, reason: String },
}

/// What a run was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    pub verb: String,
    pub contract: Contract,
    pub contract_hash: String,
    pub surroundings: Surroundings,
    /// As typed.
    pub command: Vec<String>,
    /// Of each arm: its URL or its command.
    pub arms: BTreeMap<String, String>,
    pub seed: u64,
}

/// A run as its file tells it.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    pub run: Run,
    pub cells: Vec<Measured>,
    pub failures: Vec<String>,
    /// Cells that began and did not end: what they have is shown, and that they lack the rest is told.
    pub unfinished: usize,
}

/// All runs of a file.
///
/// # Errors
/// It can't be read, or holds no run.
pub fn read(path: &Path) -> Result<Vec<Recorded>, BenchError> {
    let contents = jsonl::read::<Record>(path)?;
    let mut runs: Vec<(Recorded, BTreeMap<u32, Measured>)> = Vec::new();
    for record in contents.records {
        if let Record::Run(run) = record {
            let recorded = Recorded {
                run: *run,
                cells: Vec::new(),
                failures: Vec::new(),
                unfinished: 0,
            };
            runs.push((recorded, BTreeMap::new()));
            continue;
        }
        let Some((recorded, open)) = runs.last_mut() else {
            continue;
        };
        match record {
            Record::Run(_) => {}
            Record::Cell { cell, what } => {
                let measured = Measured {
                    cell: what,
                    order: cell,
                    memory: None,
                    samples: Vec::new(),
                };
                open.insert(cell, measured);
            }
            Record::Sample { cell, sample } => {
                if let Some(measured) = open.get_mut(&cell) {
                    measured.samples.push(*sample);
                }
            }
            Record::CellEnd { cell, memory } => {
                if let Some(mut measured) = open.remove(&cell) {
                    measured.memory = memory;
                    recorded.cells.push(measured);
                }
            }
            Record::CellFailed { cell, reason } => {
                open.remove(&cell);
                recorded.failures.push(reason);
            }
        }
    }
    if runs.is_empty() {
        return Err(BenchError::Usage(format!(
            "{} holds no run ({} lines are no records)",
            path.display(),
            contents.unreadable_lines
        )));
    }
    let whole = runs.into_iter().map(|(mut recorded, open)| {
        let begun = open.into_values().filter(|cell| !cell.samples.is_empty());
        let before = recorded.cells.len();
        recorded.cells.extend(begun);
        recorded.unfinished = recorded.cells.len() - before;
        recorded.cells.sort_by_key(|cell| cell.order);
        recorded
    });
    Ok(whole.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrival::Arrival;
    use crate::workload::Workload;

    #[test]
    fn a_run_that_was_killed_still_tells_what_it_had() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.jsonl");
        let contract = Contract::new("v2", &Workload::study(), 16, "none");
        let mut writer = jsonl::Writer::open(&path).unwrap();
        let mut append = |record: Record| writer.append(&record).unwrap();
        append(Record::Run(Box::new(Run {
            verb: "sweep".into(),
            contract_hash: contract.hash(),
            contract,
            surroundings: Surroundings::now(),
            command: vec!["x".into()],
            arms: BTreeMap::new(),
            seed: 1,
        })));
        let what = Cell {
            arm: "a".into(),
            size: None,
            arrival: Arrival::Closed { concurrency: 1 },
            repeat: 0,
            cold: false,
        };
        let sample = |cell, id| Record::Sample {
            cell,
            sample: Box::new(Sample::begin(id, 0, 0, 1)),
        };
        append(Record::Cell {
            cell: 0,
            what: what.clone(),
        });
        append(sample(0, 0));
        append(sample(0, 1));
        append(Record::CellEnd {
            cell: 0,
            memory: None,
        });
        append(Record::Cell {
            cell: 1,
            what: what.clone(),
        });
        append(Record::CellFailed {
            cell: 1,
            reason: "no".into(),
        });
        append(Record::Cell { cell: 2, what });
        append(sample(2, 0));
        let runs = read(&path).unwrap();
        assert_eq!(runs.len(), 1);
        let lengths: Vec<usize> = runs[0]
            .cells
            .iter()
            .map(|cell| cell.samples.len())
            .collect();
        assert_eq!(lengths, [2, 1]);
        assert_eq!((runs[0].unfinished, runs[0].failures.len()), (1, 1));
        std::fs::write(&path, "nonsense\n").unwrap();
        assert!(read(&path).is_err());
    }
}
