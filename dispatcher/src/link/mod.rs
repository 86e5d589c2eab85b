//! The listening end: the local socket that workers connect to, and a handle for each that did.

use proto::Generate;
use proto::to_worker::PromptInput;
use proto::{Attempt, RequestId};
use tokio::sync::mpsc;

use crate::relay;

/// Commands that may wait for one link's writer. A link that is further behind is wedged.
pub const COMMANDS_MAX: usize = 4096;

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
    #[must_use]
    pub fn send(&self, command: LinkCommand) -> bool {
        self.commands.try_send(command).is_ok()
    }
}
