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
use crate::status::ServerWord;
use crate::strain::Strain;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub enum Record {
    /// The first of a run; cells below it belong to it.
    Run(Box<Run>),
    /// A run that was interrupted goes on: cells below belong to the `run`th of this file, counted from 0.
    Resumed {
        run: u32,
        surroundings: Box<Surroundings>,
    },
    /// What the server's own planner predicted for the run.
    Plan { plan: serde_json::Value },
    /// A cell begins.
    Cell { cell: u32, what: Cell },
    /// A request of a cell has ended.
    Sample { cell: u32, sample: Box<Sample> },
    /// A cell has ended.
    CellEnd {
        cell: u32,
        memory: Option<Memory>,
        #[serde(default)]
        strain: Option<Strain>,
        #[serde(default)]
        server: Option<Box<ServerWord>>,
    },
    /// A cell could not be measured.
    CellFailed { cell: u32, reason: String },
}

/// What a run was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    pub verb: String,
    /// The verb that it was a part of.
    #[serde(default)]
    pub suite: Option<String>,
    pub contract: Contract,
    pub contract_hash: String,
    pub surroundings: Surroundings,
    /// As typed.
    pub command: Vec<String>,
    /// Of each arm: its URL or its command.
    pub arms: BTreeMap<String, String>,
    pub seed: u64,
}

impl Run {
    /// Whether a run that was interrupted may go on as this one: same question, same rules, same servers.
    #[must_use]
    pub fn continues(&self, other: &Self) -> bool {
        self.verb == other.verb
            && self.suite == other.suite
            && self.contract_hash == other.contract_hash
            && self.arms == other.arms
            && self.seed == other.seed
    }
}

/// A run as its file tells it.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    pub run: Run,
    pub cells: Vec<Measured>,
    pub failures: Vec<String>,
    /// Cells that began and did not end: what they have is shown, and that they lack the rest is told.
    pub unfinished: Vec<Cell>,
    /// The next number that a cell of it may have.
    pub next_cell: u32,
    /// What was predicted.
    pub plan: Option<serde_json::Value>,
}

impl Recorded {
    /// A run of which nothing is measured yet.
    #[must_use]
    pub fn new(run: Run) -> Self {
        Self {
            run,
            cells: Vec::new(),
            failures: Vec::new(),
            unfinished: Vec::new(),
            next_cell: 0,
            plan: None,
        }
    }

    /// Whether `cell` was measured to its end.
    #[must_use]
    pub fn has(&self, cell: &Cell) -> bool {
        !self.unfinished.contains(cell) && self.cells.iter().any(|one| one.cell == *cell)
    }
}

/// All runs of a file.
///
/// # Errors
/// It can't be read, holds no run, or one of rules that this bench does not know.
pub fn read(path: &Path) -> Result<Vec<Recorded>, BenchError> {
    let contents = jsonl::read::<Record>(path)?;
    let mut runs: Vec<(Recorded, BTreeMap<u32, Measured>)> = Vec::new();
    let mut current = 0;
    for record in contents.records {
        match record {
            Record::Run(run) => {
                run.contract.require_known().map_err(|error| {
                    BenchError::Contract(format!("{}: {error}", path.display()))
                })?;
                current = runs.len();
                runs.push((Recorded::new(*run), BTreeMap::new()));
            }
            Record::Resumed { run, .. } => {
                current = run as usize;
                // What failed in the earlier sitting is tried again in this one.
                if let Some((recorded, _)) = runs.get_mut(current) {
                    recorded.failures.clear();
                }
            }
            other => {
                if let Some((recorded, open)) = runs.get_mut(current) {
                    take(recorded, open, other);
                }
            }
        }
    }
    if contents.unreadable_lines > 0 || (runs.is_empty() && contents.cut) {
        let lines = contents.unreadable_lines;
        if runs.is_empty() {
            return Err(BenchError::File {
                path: path.to_owned(),
                source: std::io::Error::other("no line of it is a record of a run"),
            });
        }
        if let Some((recorded, _)) = runs.last_mut() {
            recorded
                .failures
                .push(format!("{lines} lines cannot be read and are left out"));
        }
    }
    Ok(runs.into_iter().map(close).collect())
}

fn take(recorded: &mut Recorded, open: &mut BTreeMap<u32, Measured>, record: Record) {
    match record {
        Record::Run(_) | Record::Resumed { .. } => {}
        Record::Plan { plan } => recorded.plan = Some(plan),
        Record::Cell { cell, what } => {
            recorded.next_cell = recorded.next_cell.max(cell.saturating_add(1));
            open.insert(cell, Measured::new(what, cell, Vec::new()));
        }
        Record::Sample { cell, sample } => {
            if let Some(measured) = open.get_mut(&cell) {
                measured.samples.push(*sample);
            }
        }
        Record::CellEnd {
            cell,
            memory,
            strain,
            server,
        } => {
            if let Some(mut measured) = open.remove(&cell) {
                measured.memory = memory;
                measured.strain = strain;
                measured.server = server.map(|server| *server);
                recorded.cells.push(measured);
            }
        }
        Record::CellFailed { cell, reason } => {
            open.remove(&cell);
            recorded.failures.push(reason);
        }
    }
}

/// A cell that was cut off is shown with what it has, unless it was measured again.
fn close((mut recorded, open): (Recorded, BTreeMap<u32, Measured>)) -> Recorded {
    let again = |cut: &Measured| recorded.cells.iter().any(|one| one.cell == cut.cell);
    let cut: Vec<Measured> = open
        .into_values()
        .filter(|cut| !cut.samples.is_empty() && !again(cut))
        .collect();
    recorded.unfinished = cut.iter().map(|measured| measured.cell.clone()).collect();
    recorded.cells.extend(cut);
    recorded.cells.sort_by_key(|cell| cell.order);
    recorded
}

/// Test data: a run of these cells.
#[cfg(test)]
pub(crate) fn made(cells: Vec<Measured>) -> Recorded {
    let workload = crate::workload::Workload::study();
    let contract = Contract::new("v2", &workload, 16, "none");
    let run = Run {
        verb: "compare".into(),
        suite: None,
        contract_hash: contract.hash(),
        contract,
        surroundings: Surroundings::now(),
        command: vec!["x".into()],
        arms: BTreeMap::new(),
        seed: 1,
    };
    Recorded {
        cells,
        ..Recorded::new(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrival::Arrival;

    fn run() -> Record {
        Record::Run(Box::new(made(Vec::new()).run))
    }

    fn what(repeat: u32) -> Cell {
        Cell {
            arm: "a".into(),
            size: None,
            arrival: Arrival::Closed { concurrency: 1 },
            repeat,
            cold: false,
        }
    }

    fn sample(cell: u32, id: u64) -> Record {
        Record::Sample {
            cell,
            sample: Box::new(Sample::begin(id, 0, 0, 1)),
        }
    }

    fn begin(cell: u32, repeat: u32) -> Record {
        Record::Cell {
            cell,
            what: what(repeat),
        }
    }

    fn end(cell: u32) -> Record {
        Record::CellEnd {
            cell,
            memory: None,
            strain: None,
            server: None,
        }
    }

    fn written(records: Vec<Record>) -> Result<Vec<Recorded>, BenchError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.jsonl");
        let mut writer = jsonl::Writer::open(&path).unwrap();
        for record in records {
            writer.append(&record).unwrap();
        }
        read(&path)
    }

    #[test]
    fn a_run_that_was_killed_still_tells_what_it_had() {
        let failed = Record::CellFailed {
            cell: 1,
            reason: "no".into(),
        };
        let runs = written(vec![
            run(),
            begin(0, 0),
            sample(0, 0),
            sample(0, 1),
            end(0),
            begin(1, 1),
            failed,
            begin(2, 2),
            sample(2, 0),
        ])
        .unwrap();
        assert_eq!(runs.len(), 1);
        let lengths: Vec<usize> = runs[0]
            .cells
            .iter()
            .map(|cell| cell.samples.len())
            .collect();
        assert_eq!(lengths, [2, 1]);
        assert_eq!((runs[0].unfinished.len(), runs[0].failures.len()), (1, 1));
        assert!(runs[0].has(&what(0)) && !runs[0].has(&what(1)) && !runs[0].has(&what(2)));
    }

    #[test]
    fn a_resumed_runs_cells_are_its_own_and_a_cut_cell_gives_way_to_its_repetition() {
        let resumed = Record::Resumed {
            run: 0,
            surroundings: Box::new(Surroundings::now()),
        };
        let runs = written(vec![
            run(),
            begin(0, 0),
            sample(0, 0),
            run(),
            begin(0, 0),
            sample(0, 0),
            end(0),
            resumed,
            begin(1, 0),
            sample(1, 0),
            sample(1, 1),
            end(1),
        ])
        .unwrap();
        assert_eq!(runs.len(), 2);
        assert_eq!(
            (runs[0].cells.len(), runs[0].cells[0].samples.len()),
            (1, 2)
        );
        assert!(runs[0].unfinished.is_empty() && runs[0].next_cell == 2);
        assert_eq!(runs[1].cells.len(), 1);
    }

    #[test]
    fn a_file_without_a_run_or_with_rules_of_a_later_bench_is_refused_with_words() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.jsonl");
        std::fs::write(&path, "nonsense\n").unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("no line of it"), "{error}");
        let Record::Run(mut later) = run() else {
            unreachable!()
        };
        later.contract.methodology = 99;
        let error = written(vec![Record::Run(later)]).unwrap_err().to_string();
        assert!(error.contains("methodology 99"), "{error}");
    }
}
