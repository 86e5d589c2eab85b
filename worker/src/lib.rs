//! Holds one warmed engine and turns prompts into tokens.
//!
//! # Threads
//!
//! One process has one engine, and each of its threads one job; nothing but channels and a few
//! atomics is shared.
//!
//! | thread | job | waits for |
//! |---|---|---|
//! | main | starts the others, ends the process ([`run`]) | the first reason to end |
//! | reader ([`link`]) | frames to commands | the socket, and nothing else |
//! | engine ([`engine_thread`], [`turn`], [`batch`]) | owns the engine | commands, while idle |
//! | session ([`session`], [`rows`], [`stream`]) | tokens to text to frames | events |
//! | prompts ([`prompt_queue`]) | bounds on what the next one does | prompts, its clock |
//! | prompt ([`prompt`]) | templates and tokenising | prompts |
//! | heartbeat ([`heartbeat`]) | `Progress` | its clock |
//! | stdin, signals ([`parent`]) | see the dispatcher go, SIGTERM come | the kernel |
//!
//! Data flows one way: reader → engine → session. The one thing that goes back is a stop string's
//! match, as a flag that the engine thread looks at between steps ([`batch::StopFlag`]).

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select};
use proto::to_dispatcher::{Hello, ToDispatcher};
use proto::{Generation, InstanceId, PROTOCOL_VERSION};

use crate::engine::select::Selection;
use crate::engine::{LoadOptions, TextModel};
use crate::link::{Incoming, Routes};
use crate::prompt_queue::Renderer;
use crate::session::{Ending, Flags, ToSession};
use crate::vitals::Vitals;

pub mod batch;
pub mod cli;
pub mod detokenize;
pub mod engine;
pub mod engine_thread;
pub mod exit;
pub mod heartbeat;
pub mod link;
pub mod parent;
pub mod prompt;
pub mod prompt_queue;
pub mod rows;
pub mod sampler;
pub mod session;
pub mod stop;
pub mod stopwatch;
pub mod stream;
pub mod turn;
pub mod vitals;

/// How long a frame under way may take to leave after SIGTERM.
const LEAVE_MAX: Duration = Duration::from_millis(500);

/// Everything a worker is told at its start.
#[derive(Debug)]
pub struct Setup {
    pub instance: InstanceId,
    pub generation: Generation,
    /// The one-time token that proves this is the child that was spawned.
    pub token: [u8; 32],
    pub selection: Selection,
    pub options: LoadOptions,
}

/// Why [`run`] came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Ended(Ending),
    /// SIGTERM: the process is to die of it.
    Terminated,
}

/// Serves the dispatcher at the other end of `stream` until there is a reason to end the process.
///
/// `terminate` and `orphaned` are reasons from outside. Threads, the engine's among them, may still
/// run when this returns: the caller ends the process.
#[must_use]
pub fn run(
    setup: Setup,
    stream: UnixStream,
    terminate: &Receiver<()>,
    orphaned: &Receiver<()>,
) -> Outcome {
    let flags = Arc::new(Flags::default());
    let (session, inbox) = bounded(session::WAITING_MAX);
    let (end, endings) = bounded(8);
    let started = {
        let (flags, session) = (Arc::clone(&flags), session.clone());
        spawn("reader", 0, &end.clone(), move || {
            Some(serve(setup, stream, (session, inbox), &flags, &end))
        })
    };
    if let Err(error) = started {
        return Outcome::Ended(no_thread(&error));
    }
    select! {
        recv(endings) -> ending => Outcome::Ended(ending.unwrap_or_else(|_| Ending::orderly())),
        recv(orphaned) -> _ => Outcome::Ended(Ending::orphaned("standard input ended")),
        recv(terminate) -> _ => {
            flags.leaving.store(true, Ordering::Release);
            let _ = session.try_send(ToSession::Wake);
            // The session thread says so when the frame under way is out.
            let _ = endings.recv_timeout(LEAVE_MAX);
            Outcome::Terminated
        }
    }
}

/// The reader thread: handshake, the other threads, then commands.
fn serve(
    setup: Setup,
    stream: UnixStream,
    (session, inbox): (Sender<ToSession>, Receiver<ToSession>),
    flags: &Arc<Flags>,
    end: &Sender<Ending>,
) -> Ending {
    let writer = match stream.try_clone() {
        Ok(writer) => writer,
        Err(error) => return Ending::new(exit::UNREACHABLE, error.to_string()),
    };
    let mut incoming = Incoming::new(stream);
    let hello = Hello {
        protocol: PROTOCOL_VERSION,
        build: build(),
        instance: setup.instance,
        generation: setup.generation,
        pid: std::process::id(),
        token: setup.token,
    };
    if let Err(ending) = link::shake_hands(hello, &mut incoming) {
        return ending;
    }
    let (engine, commands) = bounded(link::COMMANDS_MAX);
    let (prompts, jobs) = bounded(prompt_queue::WAITING_MAX);
    let vitals = Arc::new(Vitals::default());
    let text: Arc<OnceLock<Arc<dyn TextModel>>> = Arc::default();
    let loading = ToDispatcher::Loading { permille: 0 };
    let _ = session.try_send(ToSession::Say(loading));

    let threads = || -> io::Result<()> {
        let writer_flags = Arc::clone(flags);
        spawn("session", 0, end, move || {
            let mut writer = writer;
            // Told to leave, it still says that it has left.
            Some(session::run(&inbox, &writer_flags, &mut writer).unwrap_or_else(Ending::orderly))
        })?;
        let heart = (Arc::clone(&vitals), session.clone());
        spawn("heartbeat", 0, end, move || {
            heartbeat::run(&heart.0, &heart.1, &crossbeam_channel::never());
            None
        })?;
        let (prompt_session, prompt_text) = (session.clone(), Arc::clone(&text));
        spawn("prompts", 0, end, move || {
            let mut renderer = Renderer::new(prompt_text);
            prompt_queue::run(
                &jobs,
                &prompt_session,
                prompt_queue::TIME_MAX,
                move |input| renderer.answer(input),
            )
            .err()
            .map(|error| no_thread(&error))
        })?;
        let engine_setup = engine_thread::Setup {
            selection: setup.selection,
            options: setup.options,
            commands,
            session: session.clone(),
            vitals,
            text,
        };
        spawn("engine", 16 << 20, end, move || {
            engine_thread::run(engine_setup)
        })
    };
    if let Err(error) = threads() {
        return no_thread(&error);
    }
    let routes = Routes {
        engine,
        prompts,
        session,
    };
    link::read(&mut incoming, &routes, flags)
}

/// Starts a thread whose reason to end the process, if it has one, goes to `end`.
fn spawn(
    name: &str,
    stack_bytes: usize,
    end: &Sender<Ending>,
    body: impl FnOnce() -> Option<Ending> + Send + 'static,
) -> io::Result<()> {
    let end = end.clone();
    let mut builder = std::thread::Builder::new().name(name.to_string());
    if stack_bytes > 0 {
        builder = builder.stack_size(stack_bytes);
    }
    builder.spawn(move || {
        if let Some(ending) = body() {
            let _ = end.try_send(ending);
        }
    })?;
    Ok(())
}

fn no_thread(error: &io::Error) -> Ending {
    Ending::new(exit::LOAD_FAILED, format!("cannot start a thread: {error}"))
}

/// Version and, where the build knows it, commit.
#[must_use]
pub fn build() -> String {
    match option_env!("DISPATCHER_COMMIT") {
        Some(commit) => format!("{} ({commit})", env!("CARGO_PKG_VERSION")),
        None => env!("CARGO_PKG_VERSION").to_string(),
    }
}
