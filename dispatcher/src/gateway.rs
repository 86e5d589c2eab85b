//! What the HTTP front can ask of the rest: take this request, and tell me how things stand.

use std::sync::Arc;
use std::time::Duration;

use proto::RequestId;
use proto::generate::Sampling;
use proto::to_worker::PromptInput;
use tokio::sync::{mpsc, watch};

use crate::clock::Clock;
use crate::machine::event::{CancelCause, KeyId, Priority};
use crate::relay;
use crate::view::View;

/// Commands that may wait for the driver loop.
const COMMANDS_MAX: usize = 4096;

/// A checked request, with all that a worker will need. The driver keeps it until the outcome.
#[derive(Clone, Debug)]
pub struct Submission {
    pub prompt: PromptInput,
    pub max_tokens: Option<u32>,
    pub sampling: Sampling,
    pub stop: Vec<String>,
    pub stop_ids: Vec<u32>,
    pub ignore_eos: bool,
    pub logprobs: Option<u32>,
    pub batch_invariant: bool,
    pub cache_prompt: bool,
    /// The client wants the ids of prompt and output.
    pub return_token_ids: bool,
    pub key: KeyId,
    pub priority: Priority,
    pub deadline: Option<Duration>,
}

/// What the front tells the driver.
#[derive(Debug)]
pub enum Command {
    Submit {
        request: RequestId,
        submission: Box<Submission>,
        relay: relay::Sender,
    },
    Cancel {
        request: RequestId,
        cause: CancelCause,
    },
    Reload,
    /// As the signal's, but behind all requests that were submitted before.
    Drain,
}

/// The front's handle. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Gateway {
    commands: mpsc::Sender<Command>,
    view: watch::Receiver<Arc<View>>,
    next_id: Arc<std::sync::atomic::AtomicU64>,
    clock: Clock,
}

/// A request under way. Dropping it before its end was read cancels the request.
#[derive(Debug)]
pub struct Ticket {
    pub request: RequestId,
    pub relay: relay::Receiver,
    commands: mpsc::Sender<Command>,
    cause_on_drop: Option<CancelCause>,
}

impl Gateway {
    /// A gateway, and the driver's ends of it.
    #[must_use]
    pub fn new(clock: Clock, view: watch::Receiver<Arc<View>>) -> (Self, mpsc::Receiver<Command>) {
        let (commands, receiver) = mpsc::channel(COMMANDS_MAX);
        let next_id = Arc::new(std::sync::atomic::AtomicU64::new(1));
        (
            Self {
                commands,
                view,
                next_id,
                clock,
            },
            receiver,
        )
    }

    /// Hands the request over. Every outcome, refusals included, comes through the ticket's relay.
    pub async fn submit(&self, submission: Submission) -> Ticket {
        let id = self
            .next_id
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let request = RequestId(id);
        let (sender, relay) = relay::channel(self.clock.now());
        let command = Command::Submit {
            request,
            submission: Box::new(submission),
            relay: sender.clone(),
        };
        if self.commands.send(command).await.is_err() {
            let retry_after = Duration::from_secs(1);
            sender.end(crate::machine::Outcome::Denied(
                crate::machine::Denied::Draining { retry_after },
            ));
        }
        Ticket {
            request,
            relay,
            commands: self.commands.clone(),
            cause_on_drop: Some(CancelCause::ClientDisconnect),
        }
    }

    /// How things stood after the driver's last turn.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.view.borrow())
    }

    /// Asks for a rolling replacement of the workers.
    pub async fn reload(&self) {
        // A driver that is gone has no workers to replace.
        let _ = self.commands.send(Command::Reload).await;
    }

    /// Asks for an end once what was submitted before has ended.
    pub(crate) async fn drain(&self) {
        // A driver that is gone has ended.
        let _ = self.commands.send(Command::Drain).await;
    }

    #[must_use]
    pub fn clock(&self) -> Clock {
        self.clock
    }
}

impl Ticket {
    /// The end was read: dropping the ticket says nothing any more.
    pub fn finished(&mut self) {
        self.cause_on_drop = None;
    }

    /// The client does not read: dropping the ticket cancels for this cause.
    pub fn slow_reader(&mut self) {
        self.cause_on_drop = Some(CancelCause::SlowReader);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(cause) = self.cause_on_drop else {
            return;
        };
        let command = Command::Cancel {
            request: self.request,
            cause,
        };
        if let Err(mpsc::error::TrySendError::Full(command)) = self.commands.try_send(command) {
            // Dropping cannot wait, and a lost cancel would leave a slot busy.
            let commands = self.commands.clone();
            if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                runtime.spawn(async move { commands.send(command).await });
            }
        }
    }
}
