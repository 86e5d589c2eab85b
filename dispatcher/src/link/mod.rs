//! The listening end: the local socket that workers connect to, and a handle for each that did.
//!
//! A link lives through three files: `listener` accepts a connection, `handshake` decides
//! whether it is the worker that was spawned, `session` carries frames until the link ends.

mod directory;
mod expectation;
mod handshake;
mod listener;
mod output;
mod session;
mod tally;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use proto::to_worker::PromptInput;
use proto::{Attempt, RequestId};
use proto::{Generate, InstanceId};
use tokio::sync::mpsc;

use crate::clock::Clock;
use crate::input::Input;
use crate::relay;

pub use directory::{DirectoryError, RunDirectory, SOCKET_PATH_BYTES_MAX};
pub use expectation::{Expectations, Refusal, Token};
pub use listener::{ListenError, Listener};

/// Commands that may wait for one link's session. A link that is further behind is wedged.
pub const COMMANDS_MAX: usize = 4096;

/// Places of the command queue that only `Close` may take, so that a wedged link can be closed.
const COMMANDS_RESERVED: usize = 8;

/// What the effects ask of one link.
#[derive(Debug)]
pub enum LinkCommand {
    /// Send it, and let rows of this attempt into `relay` from now on.
    Generate {
        generate: Box<Generate>,
        relay: relay::Sender,
    },
    Cancel {
        request: RequestId,
        attempt: Attempt,
    },
    Tokenise {
        request: RequestId,
        input: PromptInput,
    },
    Drain,
    /// Fence now: shut down both directions, discard unread bytes, advance each relay's attempt,
    /// then send `Input::AttemptEnded`.
    Close,
}

/// Reaches one worker of one generation. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Handle {
    commands: mpsc::Sender<LinkCommand>,
}

impl Handle {
    #[must_use]
    pub fn new(commands: mpsc::Sender<LinkCommand>) -> Self {
        Self { commands }
    }

    /// Never waits. `false`: the link is gone or wedged; its `AttemptEnded` comes or has come.
    ///
    /// A wedged link still takes `Close`.
    #[must_use]
    pub fn send(&self, command: LinkCommand) -> bool {
        let reserved = COMMANDS_RESERVED.min(self.commands.max_capacity() / 2);
        if self.commands.capacity() <= reserved && !matches!(command, LinkCommand::Close) {
            return false;
        }
        self.commands.try_send(command).is_ok()
    }
}

/// What a link tells the metrics, on the path of every token: implementations only count.
pub trait LinkObserver: Debug + Send + Sync {
    /// One engine step: slots that decoded, prompt tokens prefilled beside them, how long it took.
    fn step(&self, instance: InstanceId, batch: u32, prefill_tokens: u32, duration: Duration);

    /// From one token of a stream to its next, as they reached the dispatcher. Tokens of one row
    /// arrive together: all but the first have a gap of zero.
    fn gap(&self, gap: Duration);

    /// Rows of older attempts that were dropped. The same number reaches the driver as
    /// `Input::Stale`: count it in one of the two places.
    fn stale(&self, count: u64);
}

/// Observes nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl LinkObserver for NoObserver {
    fn step(&self, _: InstanceId, _: u32, _: u32, _: Duration) {}
    fn gap(&self, _: Duration) {}
    fn stale(&self, _: u64) {}
}

/// What all links of a dispatcher share.
#[derive(Clone, Debug)]
pub struct Context {
    pub clock: Clock,
    pub inputs: mpsc::Sender<Input>,
    pub expectations: Expectations,
    pub observer: Arc<dyn LinkObserver>,
    /// Version and commit of this build, for the worker's log.
    pub build: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_takes_no_more_commands_still_takes_close() {
        let (sender, _receiver) = mpsc::channel(COMMANDS_MAX);
        let handle = Handle::new(sender);
        while handle.send(LinkCommand::Drain) {}
        assert!(handle.send(LinkCommand::Close));
    }

    #[test]
    fn a_command_for_a_link_that_is_gone_is_not_taken() {
        let (sender, receiver) = mpsc::channel(COMMANDS_MAX);
        drop(receiver);
        assert!(!Handle::new(sender).send(LinkCommand::Close));
    }
}
