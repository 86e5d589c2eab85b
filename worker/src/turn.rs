//! One turn of the engine thread: take commands, step the engine, say what happened.

use proto::generate::Generate;
use proto::span::Micros;
use proto::{Attempt, RequestId};

use crate::batch::{Batch, Event, Step};
use crate::engine::{Emission, Engine, EngineError, Pulse, StepReport};

/// What the reader thread asks of the engine thread.
#[derive(Debug)]
pub enum Command {
    Generate(Box<Generate>),
    Cancel {
        request: RequestId,
        attempt: Attempt,
    },
    Drain,
}

/// An engine and its seats. No clock, no thread, no channel: a function of the commands it is given.
pub struct Turn {
    engine: Box<dyn Engine>,
    batch: Batch,
    pulse: Pulse,
    steps: u64,
    drained: bool,
}

impl std::fmt::Debug for Turn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turn")
            .field("batch", &self.batch)
            .field("drained", &self.drained)
            .finish_non_exhaustive()
    }
}

/// What one step gave, before it is known how long it took.
#[derive(Debug)]
pub struct Stepped {
    pub report: StepReport,
    pub emissions: Vec<Emission>,
}

impl Turn {
    /// Takes a warm engine.
    #[must_use]
    pub fn new(engine: Box<dyn Engine>, pulse: Pulse) -> Self {
        let slots = engine.limits().slots;
        Self {
            engine,
            batch: Batch::new(slots),
            pulse,
            steps: 0,
            drained: false,
        }
    }

    /// Carries out one command; what it led to, if anything.
    ///
    /// # Errors
    ///
    /// `Poisoned`: the process must end.
    pub fn command(&mut self, command: Command) -> Result<Option<Event>, EngineError> {
        let engine = &mut *self.engine;
        match command {
            Command::Generate(generate) => self.batch.open(*generate, engine).map(Some),
            Command::Cancel { request, attempt } => Ok(self.batch.cancel(request, attempt, engine)),
            Command::Drain => {
                self.batch.drain();
                Ok(None)
            }
        }
    }

    /// Frees what the session thread has ended. `true`: there is something to step.
    pub fn has_work(&mut self) -> bool {
        self.batch.sweep(&mut *self.engine);
        self.batch.live() > 0
    }

    /// Steps the engine once. Each stream gets no more than it may have, and its end in the same
    /// emission as its last token.
    ///
    /// # Errors
    ///
    /// `Poisoned`: the process must end.
    pub fn step(&mut self) -> Result<Stepped, EngineError> {
        // The one allocation of a step; the emissions travel to the session thread in it.
        let mut emissions =
            Vec::with_capacity(usize::try_from(self.batch.live()).unwrap_or_default());
        let report = self.engine.step(&self.pulse, &mut emissions)?;
        self.batch.settle(&mut emissions, &mut *self.engine);
        self.pulse.beat();
        self.steps += 1;
        Ok(Stepped { report, emissions })
    }

    /// Dresses a step up for the session thread.
    #[must_use]
    pub fn event(&self, stepped: Stepped, duration: Micros) -> Event {
        Event::Step(Step {
            number: self.steps,
            duration,
            report: stepped.report,
            emissions: stepped.emissions,
        })
    }

    /// The last event: given once, when the turn drains and nothing is live.
    pub fn drained(&mut self) -> Option<Event> {
        let now = !self.drained && self.batch.is_draining() && self.batch.live() == 0;
        self.drained |= now;
        now.then_some(Event::Drained)
    }

    /// Steps since the start.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Slots that hold a live sequence.
    #[must_use]
    pub fn live(&self) -> u32 {
        self.batch.live()
    }
}

#[cfg(test)]
mod tests;
