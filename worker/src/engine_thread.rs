//! The engine's own thread: loads, warms up, then turns until it is drained.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use proto::span::Micros;
use proto::to_dispatcher::{Ready, ToDispatcher};

use crate::engine::select::{self, Selection};
use crate::engine::{EngineError, LoadError, LoadOptions, TextModel};
use crate::exit;
use crate::session::{Ending, ToSession};
use crate::stopwatch::Stopwatch;
use crate::turn::{Command, Turn};
use crate::vitals::Vitals;

/// Commands taken between two steps at most, so that a flood of them cannot stop the steps.
const COMMANDS_PER_TURN: usize = 256;

/// What the thread is given.
#[derive(Debug)]
pub struct Setup {
    pub selection: Selection,
    pub options: LoadOptions,
    pub commands: Receiver<Command>,
    pub session: Sender<ToSession>,
    pub vitals: Arc<Vitals>,
    /// Filled when the model is loaded, for the prompt thread.
    pub text: Arc<OnceLock<Arc<dyn TextModel>>>,
}

impl std::fmt::Debug for dyn TextModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TextModel of {} tokens", self.vocabulary())
    }
}

/// Runs the engine; `None` where it was drained or the session is gone.
pub fn run(setup: Setup) -> Option<Ending> {
    serve(setup).err()
}

fn serve(setup: Setup) -> Result<(), Ending> {
    let Setup {
        selection,
        options,
        commands,
        session,
        vitals,
        text,
    } = setup;
    let name = match &selection {
        Selection::Llama => "llama",
        Selection::Mlx => "mlx",
        Selection::Scripted(_) => "scripted",
    };
    let began = Instant::now();
    let progress = {
        let vitals = Arc::clone(&vitals);
        Box::new(move |permille| vitals.loaded(permille))
    };
    let mut loaded = select::load(selection, &options, progress).map_err(|error| match error {
        LoadError::Permanent(_) => Ending::new(
            exit::CONFIGURATION,
            format!("cannot load the model: {error}"),
        ),
        LoadError::Transient(_) => Ending::new(
            exit::LOAD_FAILED,
            format!("cannot load the model for now: {error}"),
        ),
    })?;
    let load = Micros::from(began.elapsed());

    let began = Instant::now();
    vitals.warming();
    let warming = ToDispatcher::Warming { done: 0, of: 0 };
    if session.send(ToSession::Say(warming)).is_err() {
        return Ok(());
    }
    loaded
        .engine
        .warm(vitals.pulse())
        .map_err(|error| fatal(&error))?;
    let warm_up = Micros::from(began.elapsed());

    let limits = loaded.engine.limits();
    let ready = Ready {
        engine: name.to_string(),
        model: loaded.identity,
        device: limits.device,
        slots: limits.slots,
        context_tokens: limits.context_tokens,
        vocabulary: limits.vocabulary,
        longest_token_bytes: loaded.text.longest_token_bytes(),
        weight_bytes_per_step: limits.weight_bytes_per_step,
        kv_bytes_per_token: limits.kv_bytes_per_token,
        load,
        warm_up,
    };
    let _ = text.set(Arc::clone(&loaded.text));
    vitals.serving();
    let ready = ToSession::Ready {
        ready: Box::new(ready),
        text: loaded.text,
    };
    if session.send(ready).is_err() {
        return Ok(());
    }
    turns(
        Turn::new(loaded.engine, vitals.pulse().clone()),
        &commands,
        &session,
        &vitals,
    )
}

/// Turns until drained. Waits for commands only while no slot is live.
fn turns(
    mut turn: Turn,
    commands: &Receiver<Command>,
    session: &Sender<ToSession>,
    vitals: &Vitals,
) -> Result<(), Ending> {
    let mut stopwatch = Stopwatch::default();
    loop {
        let has_work = turn.has_work();
        vitals.live(turn.live());
        let waited = if has_work {
            None
        } else {
            match commands.recv() {
                Ok(command) => Some(command),
                Err(_) => return Ok(()),
            }
        };
        for command in waited
            .into_iter()
            .chain(commands.try_iter())
            .take(COMMANDS_PER_TURN)
        {
            let event = turn.command(command).map_err(|error| fatal(&error))?;
            if let Some(event) = event
                && session.send(ToSession::Engine(event)).is_err()
            {
                return Ok(());
            }
        }
        if let Some(drained) = turn.drained() {
            let _ = session.send(ToSession::Engine(drained));
            return Ok(());
        }
        vitals.live(turn.live());
        if turn.live() == 0 {
            continue;
        }
        let began = Instant::now();
        let stepped = turn.step().map_err(|error| fatal(&error))?;
        let duration = began.elapsed();
        vitals.stepped(turn.steps(), stopwatch.lap(duration));
        vitals.live(turn.live());
        let event = turn.event(stepped, duration.into());
        if session.send(ToSession::Engine(event)).is_err() {
            return Ok(());
        }
        if let Some(drained) = turn.drained() {
            let _ = session.send(ToSession::Engine(drained));
            return Ok(());
        }
    }
}

fn fatal(error: &EngineError) -> Ending {
    Ending::new(exit::POISONED, error.to_string())
}
