//! Runs a matrix of cells, side by side in time, and records each request as it ends.

mod plan;

use std::future::Future;
use std::sync::Arc;

use crate::arrival::Arrival;
use crate::cell::{Cell, Figures, Measured};
use crate::client::Client;
use crate::clock::Clock;
use crate::error::BenchError;
use crate::load::{Plan, drive, warm_up};
use crate::progress::Progress;
use crate::record::{self, Record, Recorded, Run};
use crate::report::jsonl;
use crate::report::rows::load_words;
use crate::sample::Sample;
use crate::status::ServerWord;
use crate::steady::keeping;
use crate::strain::Watch;
use crate::target::Running;
use crate::workload::Workload;

pub use plan::{Arm, Matrix, Order, Place, WarmUp};
use plan::{Session, sessions};

/// Runs all cells of `matrix` that are not measured yet. A cell that cannot be measured is noted, and the
/// others go on. When `stop` ends, so does the run; what was measured is in the file.
///
/// # Errors
/// The result file cannot be written, the run was stopped, or not one cell could be measured.
pub async fn run(
    matrix: &Matrix,
    workload: &Arc<Workload>,
    run: Run,
    stop: impl Future<Output = ()>,
) -> Result<Recorded, BenchError> {
    let mut runner = Runner::begin(matrix, workload, run)?;
    // The server under test is dropped with the future, which kills it.
    tokio::select! {
        biased;
        ended = runner.all() => ended?,
        () = stop => {
            let out = matrix.out.clone();
            return Err(BenchError::Interrupted { out });
        }
    }
    match runner.recorded.cells.is_empty() {
        false => Ok(runner.recorded),
        true => Err(BenchError::Target(runner.recorded.failures.join("; "))),
    }
}

struct Runner<'a> {
    matrix: &'a Matrix,
    workload: &'a Arc<Workload>,
    writer: Option<jsonl::Writer>,
    /// Of this run, earlier sittings included.
    recorded: Recorded,
    progress: Progress,
}

impl<'a> Runner<'a> {
    /// Opens the file, and finds what an earlier sitting left in it.
    fn begin(
        matrix: &'a Matrix,
        workload: &'a Arc<Workload>,
        run: Run,
    ) -> Result<Self, BenchError> {
        let earlier = match &matrix.out {
            Some(path) if matrix.resume && path.exists() => {
                let runs = record::read(path)?;
                let number = runs.iter().rposition(|one| one.run.continues(&run));
                number.map(|number| (number, runs))
            }
            _ => None,
        };
        let mut writer = matrix.out.as_deref().map(jsonl::Writer::open).transpose()?;
        let mut append = |record: &Record| match writer.as_mut() {
            Some(writer) => writer.append(record),
            None => Ok(()),
        };
        let recorded = if let Some((number, mut runs)) = earlier {
            append(&Record::Resumed {
                run: u32::try_from(number).unwrap_or(u32::MAX),
                surroundings: Box::new(run.surroundings),
            })?;
            let mut recorded = runs.swap_remove(number);
            // What was cut off is measured again.
            let cut = std::mem::take(&mut recorded.unfinished);
            recorded.cells.retain(|one| !cut.contains(&one.cell));
            recorded.failures.clear();
            recorded
        } else {
            append(&Record::Run(Box::new(run.clone())))?;
            if let Some(plan) = &matrix.plan {
                append(&Record::Plan { plan: plan.clone() })?;
            }
            Recorded {
                plan: matrix.plan.clone(),
                ..Recorded::new(run)
            }
        };
        let loads = matrix.loads.len() as u64;
        let requests = sessions(matrix).len() as u64 * loads * matrix.requests;
        let progress = Progress::start(requests);
        let measured = recorded.cells.iter().filter(|one| !one.cell.cold);
        progress.advance(measured.count() as u64 * matrix.requests);
        Ok(Self {
            matrix,
            workload,
            writer,
            recorded,
            progress,
        })
    }

    async fn all(&mut self) -> Result<(), BenchError> {
        let sessions = sessions(self.matrix);
        for (number, session) in sessions.iter().enumerate() {
            if self.is_measured(session) {
                continue;
            }
            let words = session.words(self.matrix);
            self.progress
                .now(&format!("{}/{}: {words}", number + 1, sessions.len()));
            if let Err(error) = self.session(session).await {
                if matches!(error, BenchError::File { .. }) {
                    return Err(error);
                }
                let reason = format!("{words}: {error}");
                self.progress.line(&reason);
                self.failed(&reason)?;
            }
            if number + 1 < sessions.len() {
                tokio::time::sleep(self.matrix.cool_down).await;
            }
        }
        Ok(())
    }

    /// Whether nothing of a session is left to be measured.
    fn is_measured(&self, session: &Session) -> bool {
        let matrix = self.matrix;
        let cold = session.cold_cell(matrix);
        let mut saturated = false;
        let warm = matrix.loads.iter().all(|arrival| {
            let cell = session.cell(matrix, *arrival, false);
            let done = saturated || self.recorded.has(&cell);
            saturated |= self.is_saturated(&cell);
            done
        });
        warm && cold.is_none_or(|cell| self.recorded.has(&cell))
    }

    fn is_saturated(&self, cell: &Cell) -> bool {
        let found = self.recorded.cells.iter().find(|one| one.cell == *cell);
        self.matrix.until_saturated
            && found
                .and_then(|measured| keeping(&measured.samples))
                .is_some_and(|keeping| keeping.saturated)
    }

    fn record(&mut self, record: &Record) -> Result<(), BenchError> {
        self.writer
            .as_mut()
            .map_or(Ok(()), |writer| writer.append(record))
    }

    fn failed(&mut self, reason: &str) -> Result<(), BenchError> {
        self.recorded.failures.push(reason.to_owned());
        let cell = self.recorded.next_cell.saturating_sub(1);
        self.record(&Record::CellFailed {
            cell,
            reason: reason.to_owned(),
        })
    }

    async fn session(&mut self, session: &Session) -> Result<(), BenchError> {
        let arm = &self.matrix.arms[session.arm];
        let running = match (&arm.place, session.size) {
            (Place::Exec(launch), Some(size)) => launch.start(size).await?,
            (Place::Url(endpoint), _) => Running::foreign(endpoint.clone()),
            (Place::Exec(_), None) => return Ok(()),
        };
        let measured = self.cells(session, &running).await;
        let stopped = running.stop().await;
        measured.and(stopped)
    }

    async fn cells(&mut self, session: &Session, running: &Running) -> Result<(), BenchError> {
        let endpoint = running.endpoint.clone();
        let client = Arc::new(Client::new(endpoint, self.matrix.patience, true));
        if let Some(cell) = session.cold_cell(self.matrix)
            && !self.recorded.has(&cell)
        {
            self.cold(cell, running, &client).await?;
        }
        if let WarmUp::EachInstance(each) = self.matrix.warm_up {
            let instances = session.size.map_or(1, |size| size.instances);
            let count = each * u64::from(instances);
            let warm = warm_up(&client, self.workload, count, instances).await;
            require_one(&warm)?;
        }
        for arrival in &self.matrix.loads {
            let cell = session.cell(self.matrix, *arrival, false);
            if !self.recorded.has(&cell) {
                if let WarmUp::EachCell(count) = self.matrix.warm_up {
                    let warm = warm_up(&client, self.workload, count, 1).await;
                    require_one(&warm)?;
                }
                self.warm(cell.clone(), *arrival, running, &client).await?;
            }
            if self.is_saturated(&cell) {
                self.progress.line(&format!(
                    "  saturated at {}: higher rates are left out",
                    load_words(arrival)
                ));
                break;
            }
        }
        Ok(())
    }

    /// The very first request.
    async fn cold(
        &mut self,
        what: Cell,
        running: &Running,
        client: &Arc<Client>,
    ) -> Result<(), BenchError> {
        let watch = Watch::start();
        let first = warm_up(client, self.workload, 1, 1).await;
        require_one(&first)?;
        let cell = self.begin_cell(&what)?;
        for sample in &first {
            self.record(&Record::Sample {
                cell,
                sample: Box::new(sample.clone()),
            })?;
        }
        self.end_cell(cell, what, running, client, watch, first)
            .await
    }

    async fn warm(
        &mut self,
        what: Cell,
        arrival: Arrival,
        running: &Running,
        client: &Arc<Client>,
    ) -> Result<(), BenchError> {
        let cell = self.begin_cell(&what)?;
        let seed = self.matrix.seed.wrapping_add(u64::from(what.repeat));
        let plan = Plan {
            arrival,
            requests: self.matrix.requests,
            seed,
        };
        let watch = Watch::start();
        let mut written = Ok(());
        let (writer, progress) = (&mut self.writer, &self.progress);
        let samples = drive(client, self.workload, plan, Clock::start(), |sample| {
            progress.advance(1);
            if let (Some(writer), Ok(())) = (writer.as_mut(), &written) {
                written = writer.append(&Record::Sample {
                    cell,
                    sample: Box::new(sample.clone()),
                });
            }
        })
        .await?;
        written?;
        let figures = Figures::of(&samples);
        self.end_cell(cell, what, running, client, watch, samples)
            .await?;
        // Said when it is in the file, and not before.
        self.progress.line(&format!(
            "  {}: {:.1} tok/s, {} of {} done",
            load_words(&arrival),
            figures.aggregate_tokens_per_s,
            figures.done,
            figures.requests
        ));
        Ok(())
    }

    fn begin_cell(&mut self, what: &Cell) -> Result<u32, BenchError> {
        let cell = self.recorded.next_cell;
        self.recorded.next_cell += 1;
        self.record(&Record::Cell {
            cell,
            what: what.clone(),
        })?;
        Ok(cell)
    }

    async fn end_cell(
        &mut self,
        cell: u32,
        what: Cell,
        running: &Running,
        client: &Client,
        watch: Watch,
        samples: Vec<Sample>,
    ) -> Result<(), BenchError> {
        let strain = Some(watch.end());
        let server = ServerWord::ask(client).await;
        let memory = running.memory();
        self.record(&Record::CellEnd {
            cell,
            memory,
            strain,
            server: server.clone().map(Box::new),
        })?;
        self.recorded.cells.push(Measured {
            memory,
            strain,
            server,
            ..Measured::new(what, cell, samples)
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
