//! The reading end of the link: the handshake, then the dispatcher's commands to those they are for.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::{Sender, TrySendError};
use proto::to_dispatcher::{Hello, PromptError, ToDispatcher};
use proto::version::accepts;
use proto::{Decoder, ProtoError, ToWorker, decode, encode};

use crate::exit;
use crate::prompt_queue::Job;
use crate::session::{Ending, Flags, ToSession};
use crate::turn::Command;

/// From `Hello` to its answer.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

const READ_BYTES: usize = 64 << 10;

/// Commands that may wait for the engine. The dispatcher has at most one request a slot under way,
/// so more is a fault of its own.
pub const COMMANDS_MAX: usize = 8192;

/// Takes messages out of a stream.
#[derive(Debug)]
pub struct Incoming {
    stream: UnixStream,
    decoder: Decoder,
    buffer: Vec<u8>,
    /// Bytes of `buffer` that the decoder has not taken.
    unread: std::ops::Range<usize>,
}

impl Incoming {
    #[must_use]
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            decoder: Decoder::new(),
            buffer: vec![0; READ_BYTES],
            unread: 0..0,
        }
    }

    /// The next message; `None` at the end of file.
    fn next(&mut self) -> Result<Option<ToWorker>, Ending> {
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(|e| malformed(&e))? {
                return decode(frame).map(Some).map_err(|e| malformed(&e));
            }
            if self.unread.is_empty() {
                match self.stream.read(&mut self.buffer) {
                    Ok(0) => return Ok(None),
                    Ok(read) => self.unread = 0..read,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Err(Ending::orphaned(&error.to_string())),
                }
            }
            self.unread.start += self.decoder.push(&self.buffer[self.unread.clone()]);
        }
    }
}

/// Introduces this process and waits for the answer.
///
/// # Errors
///
/// Refused, unreachable, or no answer in time.
pub fn shake_hands(hello: Hello, incoming: &mut Incoming) -> Result<(), Ending> {
    let unreachable = |error: io::Error| {
        Ending::new(
            exit::UNREACHABLE,
            format!("cannot speak with the dispatcher: {error}"),
        )
    };
    let frame = encode(&ToDispatcher::Hello(hello)).map_err(|e| malformed(&e))?;
    incoming.stream.write_all(&frame).map_err(unreachable)?;
    incoming
        .stream
        .set_read_timeout(Some(HANDSHAKE_MAX))
        .map_err(unreachable)?;
    let answer = incoming.next()?;
    incoming
        .stream
        .set_read_timeout(None)
        .map_err(unreachable)?;
    match answer {
        Some(ToWorker::Hello { protocol, .. }) if accepts(protocol) => Ok(()),
        Some(ToWorker::Hello { protocol, build }) => Err(Ending::new(
            exit::CONFIGURATION,
            format!(
                "the dispatcher (build {build}) speaks version {protocol} of the protocol, \
                 this worker version {}",
                proto::PROTOCOL_VERSION
            ),
        )),
        Some(ToWorker::Refused { reason }) => Err(Ending::new(
            exit::CONFIGURATION,
            format!("the dispatcher refuses this worker: {reason}"),
        )),
        Some(_) => Err(Ending::new(
            exit::PROTOCOL,
            "the dispatcher did not answer the handshake".to_string(),
        )),
        None => Err(Ending::orphaned("end of file before the handshake")),
    }
}

/// Where commands go.
#[derive(Debug)]
pub struct Routes {
    pub engine: Sender<Command>,
    pub prompts: Sender<Job>,
    pub session: Sender<ToSession>,
}

/// Reads until the dispatcher is gone or at fault. Never waits for any other thread, so that an end
/// of file is seen whatever they do.
pub fn read(incoming: &mut Incoming, routes: &Routes, flags: &Flags) -> Ending {
    loop {
        let message = match incoming.next() {
            Ok(Some(message)) => message,
            Ok(None) if flags.drained.load(Ordering::Acquire) => return Ending::orderly(),
            Ok(None) => return Ending::orphaned("end of file"),
            Err(_) if flags.drained.load(Ordering::Acquire) => return Ending::orderly(),
            Err(ending) => return ending,
        };
        let routed = match message {
            ToWorker::Generate(generate) => to_engine(routes, Command::Generate(generate)),
            ToWorker::Cancel { request, attempt } => {
                to_engine(routes, Command::Cancel { request, attempt })
            }
            ToWorker::Drain => to_engine(routes, Command::Drain)
                .and_then(|()| to_session(routes, ToSession::Drain)),
            ToWorker::Tokenise { request, input } => {
                match routes.prompts.try_send(Job { request, input }) {
                    Ok(()) => Ok(()),
                    Err(_) => to_session(
                        routes,
                        ToSession::Say(ToDispatcher::Tokenised {
                            request,
                            outcome: Err(PromptError::Busy),
                        }),
                    ),
                }
            }
            ToWorker::Hello { .. } | ToWorker::Refused { .. } => Err("it shakes hands again"),
        };
        if let Err(words) = routed {
            return Ending::new(
                exit::PROTOCOL,
                format!("the dispatcher broke the protocol: {words}"),
            );
        }
    }
}

fn to_engine(routes: &Routes, command: Command) -> Result<(), &'static str> {
    match routes.engine.try_send(command) {
        // After a drain the engine thread takes nothing more; the process is about to end.
        Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
        Err(TrySendError::Full(_)) => Err("it sends more than the slots can need"),
    }
}

fn to_session(routes: &Routes, told: ToSession) -> Result<(), &'static str> {
    match routes.session.try_send(told) {
        Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
        Err(TrySendError::Full(_)) => Err("it does not read what it asks for"),
    }
}

fn malformed(error: &ProtoError) -> Ending {
    Ending::new(
        exit::PROTOCOL,
        format!("the dispatcher broke the protocol: {error}"),
    )
}
