//! One worker's frames to events and relays, and commands to frames, until the link ends.
//!
//! One task holds both directions. It never waits for a relay: a relay takes a row or says that
//! its reader is slow. It waits for the driver's input queue, which the driver drains without
//! waiting for links.

use std::collections::HashMap;
use std::future::pending;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use proto::to_dispatcher::{End, PromptError, RequestError, Row, StepTokens};
use proto::{Attempt, Decoder, Generation, InstanceId, RequestId, ToDispatcher, ToWorker, decode};
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::output::{Output, WAITING_BYTES_MAX};
use super::tally::Tally;
use super::{Context, LinkCommand};
use crate::input::{Input, LinkEnd};
use crate::machine::Tick;
use crate::machine::event::{Accepted, AttemptError};
use crate::relay::{self, Accept};

/// Bytes taken from the socket at once: more than a socket's buffer holds by default.
const READ_BYTES: usize = 256 << 10;

/// Reads before commands are looked at again: a `Close` must not wait behind a flood.
const READS_PER_TURN: usize = 4;

/// Shuts both directions down. What was not read yet is lost when the stream is dropped.
pub(super) fn shut(stream: &UnixStream) {
    // It fails only where the peer has shut it already.
    let _ = nix::sys::socket::shutdown(stream.as_raw_fd(), nix::sys::socket::Shutdown::Both);
}

/// An attempt that this link's worker was asked for and has not ended.
#[derive(Debug)]
struct Live {
    relay: relay::Sender,
    last_row: Option<Tick>,
    slow_reader_told: bool,
    /// In tokens: what each of its rows has in the KV cache before its own output.
    prompt_tokens: u64,
}

type Key = (RequestId, Attempt);

/// A link after its handshake.
#[derive(Debug)]
pub(super) struct Session {
    stream: UnixStream,
    decoder: Decoder,
    commands: mpsc::Receiver<LinkCommand>,
    state: State,
}

/// All but the ends that are borrowed while waiting.
#[derive(Debug)]
struct State {
    instance: InstanceId,
    generation: Generation,
    context: Context,
    live: HashMap<Key, Live>,
    output: Output,
    tally: Tally,
}

impl Session {
    pub(super) fn new(
        stream: UnixStream,
        decoder: Decoder,
        (instance, generation): (InstanceId, Generation),
        commands: mpsc::Receiver<LinkCommand>,
        context: Context,
    ) -> Self {
        Self {
            stream,
            decoder,
            commands,
            state: State {
                instance,
                generation,
                context,
                live: HashMap::new(),
                output: Output::default(),
                tally: Tally::default(),
            },
        }
    }

    /// Runs until the link ends, fences it and says so once.
    pub(super) async fn run(mut self) {
        let Err(cause) = self.exchange().await;
        let Self {
            stream,
            decoder,
            mut commands,
            mut state,
        } = self;
        tracing::info!(
            instance = %state.instance,
            generation = %state.generation,
            ?cause,
            "a link ended"
        );
        shut(&stream);
        // Unread bytes go with the socket and the decoder.
        drop((stream, decoder));
        // From here a command is refused to its sender; those that were taken end here.
        commands.close();
        while let Ok(command) = commands.try_recv() {
            if let LinkCommand::Generate { generate, relay } = command {
                let prompt_tokens = generate.prompt.len() as u64;
                state.begin((generate.request, generate.attempt), prompt_tokens, relay);
            }
        }
        let accepted = state.fence();
        let ended = Input::AttemptEnded {
            instance: state.instance,
            generation: state.generation,
            accepted,
            cause,
        };
        // A driver that is gone needs no telling.
        let _ = state.report().await;
        let _ = state.tell(ended).await;
    }

    async fn exchange(&mut self) -> Result<std::convert::Infallible, LinkEnd> {
        let mut read = vec![0; READ_BYTES];
        // What came in one read with the hello.
        self.state.frames(&mut self.decoder, &[]).await?;
        let mut commands_open = true;
        loop {
            let report_in = self.state.tally.due_in(self.state.context.clock.now());
            tokio::select! {
                biased;
                command = self.commands.recv(), if commands_open => match command {
                    Some(command) => self.state.command(command).await?,
                    // Nobody can ask for more; what the worker still says counts.
                    None => commands_open = false,
                },
                _ = self.stream.writable(), if self.state.output.waiting() > 0 => {
                    self.state.output.write(&self.stream);
                }
                () = wait(report_in) => self.state.report().await?,
                _ = self.stream.readable() => {
                    for _ in 0..READS_PER_TURN {
                        match self.stream.try_read(&mut read) {
                            Ok(0) => return Err(LinkEnd::Eof),
                            Ok(length) => {
                                self.state.frames(&mut self.decoder, &read[..length]).await?;
                            }
                            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                            // A reset comes after the last byte, as an end of file does.
                            Err(_) => return Err(LinkEnd::Eof),
                        }
                    }
                }
            }
        }
    }
}

async fn wait(duration: Option<Duration>) {
    match duration {
        Some(duration) if duration.is_zero() => {}
        Some(duration) => tokio::time::sleep(duration).await,
        None => pending().await,
    }
}

impl State {
    /// Feeds bytes to the decoder and handles every frame that they complete.
    async fn frames(&mut self, decoder: &mut Decoder, mut bytes: &[u8]) -> Result<(), LinkEnd> {
        loop {
            let taken = decoder.push(bytes);
            bytes = &bytes[taken..];
            while let Some(frame) = decoder.next_frame().map_err(broken)? {
                let message = decode(frame).map_err(broken)?;
                let now = self.context.clock.now();
                self.message(message, now).await?;
            }
            if bytes.is_empty() {
                return Ok(());
            }
        }
    }

    async fn message(&mut self, message: ToDispatcher, now: Tick) -> Result<(), LinkEnd> {
        let (instance, generation) = (self.instance, self.generation);
        let input = match message {
            ToDispatcher::Tokens(step) => return self.step(step, now).await,
            ToDispatcher::Progress(progress) => {
                self.tally.progress(&progress);
                return Ok(());
            }
            ToDispatcher::Hello(_) => return Err(protocol("a second hello")),
            ToDispatcher::Loading { permille } => Input::Loading {
                instance,
                generation,
                permille,
            },
            ToDispatcher::Warming { done, of } => Input::Warming {
                instance,
                generation,
                done,
                of,
            },
            ToDispatcher::Ready(ready) => Input::Ready {
                instance,
                generation,
                ready,
            },
            ToDispatcher::Tokenised { request, outcome } => Input::Tokenised {
                request,
                instance,
                generation,
                outcome,
            },
            ToDispatcher::Started {
                request,
                attempt,
                cached_tokens,
            } => {
                let Some(live) = self.live.get(&(request, attempt)) else {
                    self.tally.stale();
                    return Ok(());
                };
                live.relay.started(attempt, cached_tokens);
                Input::Started {
                    request,
                    attempt,
                    cached_tokens,
                }
            }
            ToDispatcher::Failed {
                request,
                attempt,
                error,
            } => {
                if self.live.remove(&(request, attempt)).is_none() {
                    self.tally.stale();
                    return Ok(());
                }
                Input::RequestFailed {
                    request,
                    attempt,
                    error: attempt_error(error),
                }
            }
            ToDispatcher::Drained => Input::Drained {
                instance,
                generation,
            },
        };
        self.tell(input).await
    }

    async fn step(&mut self, step: StepTokens, now: Tick) -> Result<(), LinkEnd> {
        self.tally.step(&step);
        self.context.observer.step(
            self.instance,
            step.batch,
            step.prefill_tokens,
            step.duration.into(),
        );
        for row in step.rows {
            self.row(row, step.batch, now).await?;
        }
        Ok(())
    }

    async fn row(&mut self, mut row: Row, batch: u32, now: Tick) -> Result<(), LinkEnd> {
        let (request, attempt) = (row.request, row.attempt);
        let first_index = row.first_index;
        let tokens = row.tokens.len();
        let Some(live) = self.live.get_mut(&(request, attempt)) else {
            self.tally.stale();
            return Ok(());
        };
        if tokens > 0 {
            self.tally
                .kv_read(live.prompt_tokens + u64::from(first_index));
        }
        // The relay ends with what completes a stream; the other ends are the machine's to judge.
        let mut end = row.end.take();
        let finishes = matches!(end, Some(End::Finished(_)));
        if finishes {
            row.end = end.take();
        }
        match live.relay.accept(row, batch, now) {
            Accept::Taken { first, finished } => {
                live.observe(&self.context, tokens, now);
                self.tally.tokens(tokens);
                let total = finished.map(|reason| (reason, live.relay.tokens()));
                if first {
                    self.tell(Input::FirstToken { request, attempt }).await?;
                }
                if let Some((reason, tokens)) = total {
                    self.live.remove(&(request, attempt));
                    self.tell(Input::Finished {
                        request,
                        attempt,
                        reason,
                        tokens,
                    })
                    .await?;
                }
            }
            Accept::Overflow => {
                live.observe(&self.context, tokens, now);
                self.tally.tokens(tokens);
                if !std::mem::replace(&mut live.slow_reader_told, true) {
                    self.tell(Input::SlowReader { request }).await?;
                }
            }
            Accept::Stale => {
                self.tally.stale();
                // The stream had its end from elsewhere (a cancel), and the worker's own end
                // crossed it. The worker will not answer the cancel: this is the answer.
                if finishes {
                    end = Some(End::Cancelled);
                }
            }
            Accept::Gap { expected } => {
                return Err(protocol(format!(
                    "request {request}, attempt {attempt}: a row begins at token {first_index}, not at {expected}"
                )));
            }
        }
        let input = match end {
            None | Some(End::Finished(_)) => return Ok(()),
            Some(End::Cancelled) => Input::CancelDone { request, attempt },
            Some(End::Failed(error)) => Input::RequestFailed {
                request,
                attempt,
                error: attempt_error(error),
            },
        };
        self.live.remove(&(request, attempt));
        self.tell(input).await
    }

    async fn command(&mut self, command: LinkCommand) -> Result<(), LinkEnd> {
        let refused = match command {
            LinkCommand::Close => return Err(LinkEnd::Closed),
            LinkCommand::Drain => {
                self.output.push(&ToWorker::Drain).map_err(broken)?;
                None
            }
            LinkCommand::Cancel { request, attempt } => {
                // An attempt that has ended here has said so to the driver already.
                if self.live.contains_key(&(request, attempt)) {
                    let cancel = ToWorker::Cancel { request, attempt };
                    self.output.push(&cancel).map_err(broken)?;
                }
                None
            }
            LinkCommand::Tokenise { request, input } => self
                .output
                .push(&ToWorker::Tokenise { request, input })
                .err()
                .map(|error| Input::Tokenised {
                    request,
                    instance: self.instance,
                    generation: self.generation,
                    outcome: Err(PromptError::Template(error.to_string())),
                }),
            LinkCommand::Generate { generate, relay } => {
                let (request, attempt) = (generate.request, generate.attempt);
                let prompt_tokens = generate.prompt.len() as u64;
                match self.output.push(&ToWorker::Generate(generate)) {
                    Ok(()) => {
                        self.begin((request, attempt), prompt_tokens, relay);
                        None
                    }
                    Err(error) => Some(Input::RequestFailed {
                        request,
                        attempt,
                        error: AttemptError::Rejected(error.to_string()),
                    }),
                }
            }
        };
        if let Some(input) = refused {
            self.tell(input).await?;
        }
        match self.output.waiting() {
            0..=WAITING_BYTES_MAX => Ok(()),
            waiting => Err(protocol(format!(
                "the worker does not read: {waiting} bytes wait for it"
            ))),
        }
    }

    fn begin(&mut self, key: Key, prompt_tokens: u64, relay: relay::Sender) {
        let live = Live {
            relay,
            last_row: None,
            slow_reader_told: false,
            prompt_tokens,
        };
        self.live.insert(key, live);
    }

    /// Ends every attempt of the link in its relay and says what each had accepted, in the order
    /// of the requests.
    fn fence(&mut self) -> Vec<Accepted> {
        let mut accepted: Vec<Accepted> = self
            .live
            .drain()
            .map(|((request, attempt), live)| Accepted {
                request,
                attempt,
                tokens: u32::try_from(live.relay.fence(attempt).emitted.len()).unwrap_or(u32::MAX),
            })
            .collect();
        accepted.sort_unstable_by_key(|accepted| (accepted.request, accepted.attempt));
        accepted
    }

    async fn report(&mut self) -> Result<(), LinkEnd> {
        let now = self.context.clock.now();
        if self.tally.due_in(now).is_none() {
            return Ok(());
        }
        let (progress, stale) = self.tally.report(self.instance, self.generation, now);
        self.tell(progress).await?;
        if stale > 0 {
            self.context.observer.stale(stale);
            self.tell(Input::Stale { count: stale }).await?;
        }
        Ok(())
    }

    async fn tell(&self, input: Input) -> Result<(), LinkEnd> {
        // Without a driver there is nobody to serve: the link ends as if it had been closed.
        self.context
            .inputs
            .send(input)
            .await
            .map_err(|_| LinkEnd::Closed)
    }
}

impl Live {
    /// Tells the observer the gaps that these tokens end.
    fn observe(&mut self, context: &Context, tokens: usize, now: Tick) {
        if tokens == 0 {
            return;
        }
        if let Some(last) = self.last_row.replace(now) {
            context.observer.gap(now.since(last));
        }
        for _ in 1..tokens {
            context.observer.gap(Duration::ZERO);
        }
    }
}

fn attempt_error(error: RequestError) -> AttemptError {
    match error {
        RequestError::Rejected(words) => AttemptError::Rejected(words),
        RequestError::Engine(words) => AttemptError::Engine(words),
        RequestError::NoSlot | RequestError::Draining => AttemptError::NotTaken,
    }
}

fn protocol(words: impl Into<String>) -> LinkEnd {
    LinkEnd::Protocol(words.into())
}

fn broken(error: proto::ProtoError) -> LinkEnd {
    protocol(error.to_string())
}
