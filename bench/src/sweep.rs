//! Runs a matrix of cells, side by side in time, and records each request as it ends.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::arrival::Arrival;
use crate::cell::{Cell, Measured};
use crate::client::{Client, Patience};
use crate::clock::Clock;
use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::load::{Plan, drive, warm_up};
use crate::random::Random;
use crate::record::{Record, Run};
use crate::report::jsonl;
use crate::sample::Sample;
use crate::target::{Launch, Running, Size};
use crate::workload::Workload;

/// A server under test.
#[derive(Clone, Debug, PartialEq)]
pub struct Arm {
    pub name: String,
    pub place: Place,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Place {
    /// It runs already, in whatever size.
    Url(Endpoint),
    /// It is started for each size and repeat.
    Exec(Launch),
}

/// Generations that are not measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WarmUp {
    /// So many before each cell, one after another.
    EachCell(u64),
    /// So many for each instance once after the start, as many at a time as there are instances.
    EachInstance(u64),
}

impl WarmUp {
    /// For the contract.
    #[must_use]
    pub fn words(self) -> String {
        match self {
            Self::EachCell(count) => format!("{count} before each cell"),
            Self::EachInstance(count) => format!("{count} per instance after its start"),
        }
    }
}

/// In which order sessions (an arm in one size, one repeat) run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    AsGiven,
    /// Each repeat in an order of its own, drawn from the seed.
    Shuffled,
    /// A B, B A, A B, …: what drifts over time troubles both alike.
    Alternating,
}

/// All that is to be measured.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub arms: Vec<Arm>,
    /// Of the arms that are started.
    pub sizes: Vec<Size>,
    pub loads: Vec<Arrival>,
    pub repeats: u32,
    pub requests: u64,
    pub warm_up: WarmUp,
    /// The very first request after a start is a cell of its own.
    pub cold: bool,
    pub order: Order,
    pub cool_down: Duration,
    pub patience: Patience,
    pub seed: u64,
    pub out: Option<PathBuf>,
}

/// What a matrix gave.
#[derive(Clone, Debug, Default)]
pub struct Results {
    pub cells: Vec<Measured>,
    /// Cells that could not be measured, and why.
    pub failures: Vec<String>,
}

/// Runs all cells of `matrix`. A cell that cannot be measured is noted, and the others go on.
///
/// # Errors
/// The result file cannot be written, or not one cell could be measured.
pub async fn run(
    matrix: &Matrix,
    workload: &Arc<Workload>,
    run: Run,
    mut tell: impl FnMut(&str),
) -> Result<Results, BenchError> {
    let mut runner = Runner {
        matrix,
        workload,
        writer: matrix.out.as_deref().map(jsonl::Writer::open).transpose()?,
        results: Results::default(),
        next_cell: 0,
    };
    runner.record(&Record::Run(Box::new(run)))?;
    let sessions = sessions(matrix);
    for (number, session) in sessions.iter().enumerate() {
        tell(&format!(
            "{}/{}: {}",
            number + 1,
            sessions.len(),
            session.words(matrix)
        ));
        if let Err(error) = runner.session(session, &mut tell).await {
            if matches!(error, BenchError::File { .. }) {
                return Err(error);
            }
            let reason = format!("{}: {error}", session.words(matrix));
            tell(&reason);
            runner.failed(&reason)?;
        }
        if number + 1 < sessions.len() {
            tokio::time::sleep(matrix.cool_down).await;
        }
    }
    match runner.results.cells.is_empty() {
        false => Ok(runner.results),
        true => Err(BenchError::Target(runner.results.failures.join("; "))),
    }
}

/// One server from its start to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Session {
    arm: usize,
    size: Option<Size>,
    repeat: u32,
}

impl Session {
    fn words(&self, matrix: &Matrix) -> String {
        let name = &matrix.arms[self.arm].name;
        let size = self.size.map_or_else(String::new, |size| {
            format!(", {} instances × {} slots", size.instances, size.slots)
        });
        format!("{name}{size}, run {}", self.repeat + 1)
    }
}

fn sessions(matrix: &Matrix) -> Vec<Session> {
    let mut random = Random::new(matrix.seed, "order");
    let mut all = Vec::new();
    for repeat in 0..matrix.repeats {
        let mut some = Vec::new();
        for (arm, what) in matrix.arms.iter().enumerate() {
            let session = |size| Session { arm, size, repeat };
            match what.place {
                Place::Url(_) => some.push(session(None)),
                Place::Exec(_) => some.extend(matrix.sizes.iter().map(|size| session(Some(*size)))),
            }
        }
        match matrix.order {
            Order::AsGiven => {}
            Order::Shuffled => random.shuffle(&mut some),
            Order::Alternating if repeat % 2 == 1 => some.reverse(),
            Order::Alternating => {}
        }
        all.extend(some);
    }
    all
}

struct Runner<'a> {
    matrix: &'a Matrix,
    workload: &'a Arc<Workload>,
    writer: Option<jsonl::Writer>,
    results: Results,
    next_cell: u32,
}

impl Runner<'_> {
    fn record(&mut self, record: &Record) -> Result<(), BenchError> {
        self.writer
            .as_mut()
            .map_or(Ok(()), |writer| writer.append(record))
    }

    fn failed(&mut self, reason: &str) -> Result<(), BenchError> {
        self.results.failures.push(reason.to_owned());
        let cell = self.next_cell.saturating_sub(1);
        self.record(&Record::CellFailed {
            cell,
            reason: reason.to_owned(),
        })
    }

    async fn session(
        &mut self,
        session: &Session,
        tell: &mut impl FnMut(&str),
    ) -> Result<(), BenchError> {
        let arm = &self.matrix.arms[session.arm];
        let running = match (&arm.place, session.size) {
            (Place::Exec(launch), Some(size)) => launch.start(size).await?,
            (Place::Url(endpoint), _) => Running::foreign(endpoint.clone()),
            (Place::Exec(_), None) => return Ok(()),
        };
        let measured = self.cells(session, &running, tell).await;
        let stopped = running.stop().await;
        measured.and(stopped)
    }

    async fn cells(
        &mut self,
        session: &Session,
        running: &Running,
        tell: &mut impl FnMut(&str),
    ) -> Result<(), BenchError> {
        let client = Arc::new(Client::new(
            running.endpoint.clone(),
            self.matrix.patience,
            true,
        ));
        if self.matrix.cold && session.size.is_some() {
            let mut first = warm_up(&client, self.workload, 1, 1).await;
            require_one(&first)?;
            let cell = self.begin(session, Arrival::Closed { concurrency: 1 }, true)?;
            for sample in &mut first {
                self.record(&Record::Sample {
                    cell,
                    sample: Box::new(sample.clone()),
                })?;
            }
            self.end(
                cell,
                session,
                Arrival::Closed { concurrency: 1 },
                true,
                running,
                first,
            )?;
        }
        if let WarmUp::EachInstance(each) = self.matrix.warm_up {
            let instances = session.size.map_or(1, |size| size.instances);
            let warm = warm_up(
                &client,
                self.workload,
                each * u64::from(instances),
                instances,
            )
            .await;
            require_one(&warm)?;
        }
        for arrival in &self.matrix.loads {
            if let WarmUp::EachCell(count) = self.matrix.warm_up {
                let warm = warm_up(&client, self.workload, count, 1).await;
                if count > 0 {
                    require_one(&warm)?;
                }
            }
            let cell = self.begin(session, *arrival, false)?;
            let plan = Plan {
                arrival: *arrival,
                requests: self.matrix.requests,
                seed: self.matrix.seed.wrapping_add(u64::from(session.repeat)),
            };
            let mut written = Ok(());
            let writer = &mut self.writer;
            let samples = drive(&client, self.workload, plan, Clock::start(), |sample| {
                if let (Some(writer), Ok(())) = (writer.as_mut(), &written) {
                    written = writer.append(&Record::Sample {
                        cell,
                        sample: Box::new(sample.clone()),
                    });
                }
            })
            .await?;
            written?;
            let figures = crate::cell::Figures::of(&samples);
            tell(&format!(
                "  {}: {:.1} tok/s, {} of {} done",
                crate::report::markdown::load_words(arrival),
                figures.aggregate_tokens_per_s,
                figures.done,
                figures.requests
            ));
            self.end(cell, session, *arrival, false, running, samples)?;
        }
        Ok(())
    }

    fn cell(&self, session: &Session, arrival: Arrival, cold: bool) -> Cell {
        Cell {
            arm: self.matrix.arms[session.arm].name.clone(),
            size: session.size,
            arrival,
            repeat: session.repeat,
            cold,
        }
    }

    fn begin(
        &mut self,
        session: &Session,
        arrival: Arrival,
        cold: bool,
    ) -> Result<u32, BenchError> {
        let cell = self.next_cell;
        self.next_cell += 1;
        let what = self.cell(session, arrival, cold);
        self.record(&Record::Cell { cell, what })?;
        Ok(cell)
    }

    fn end(
        &mut self,
        cell: u32,
        session: &Session,
        arrival: Arrival,
        cold: bool,
        running: &Running,
        samples: Vec<Sample>,
    ) -> Result<(), BenchError> {
        let memory = running.memory();
        self.record(&Record::CellEnd { cell, memory })?;
        self.results.cells.push(Measured {
            cell: self.cell(session, arrival, cold),
            order: cell,
            memory,
            samples,
        });
        Ok(())
    }
}

/// A server that fails every warm-up request would fail every other too.
fn require_one(samples: &[Sample]) -> Result<(), BenchError> {
    match samples.iter().find(|sample| !sample.outcome.is_done()) {
        Some(bad) if samples.iter().all(|sample| !sample.outcome.is_done()) => {
            Err(BenchError::Target(format!(
                "every warm-up request was {}: {}",
                bad.outcome.word(),
                bad.outcome.reason()
            )))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(order: Order) -> Matrix {
        let arm = |name: &str| Arm {
            name: name.into(),
            place: Place::Exec(Launch {
                command: "x {port}".into(),
                ready_within: Duration::ZERO,
                log: None,
                api_key: None,
            }),
        };
        Matrix {
            arms: vec![arm("a"), arm("b")],
            sizes: vec![Size {
                instances: 1,
                slots: 1,
            }],
            loads: Vec::new(),
            repeats: 4,
            requests: 0,
            warm_up: WarmUp::EachCell(0),
            cold: false,
            order,
            cool_down: Duration::ZERO,
            patience: Patience::default(),
            seed: 1,
            out: None,
        }
    }

    #[test]
    fn two_arms_alternate_as_abba() {
        let arms =
            |order| -> Vec<usize> { sessions(&matrix(order)).iter().map(|s| s.arm).collect() };
        assert_eq!(arms(Order::Alternating), [0, 1, 1, 0, 0, 1, 1, 0]);
        assert_eq!(arms(Order::AsGiven), [0, 1, 0, 1, 0, 1, 0, 1]);
        let shuffled = arms(Order::Shuffled);
        assert!(
            shuffled
                .chunks(2)
                .all(|pair| pair.contains(&0) && pair.contains(&1))
        );
        assert_eq!(shuffled, arms(Order::Shuffled));
    }

    #[test]
    fn a_server_that_is_only_known_by_url_has_no_sizes() {
        let mut matrix = matrix(Order::AsGiven);
        matrix.arms[0].place = Place::Url(Endpoint::parse("http://x", None).unwrap());
        matrix.sizes.push(Size {
            instances: 2,
            slots: 1,
        });
        let sizes: Vec<Option<u32>> = sessions(&matrix)
            .iter()
            .take(3)
            .map(|session| session.size.map(|size| size.instances))
            .collect();
        assert_eq!(sizes, [None, Some(1), Some(2)]);
    }
}
