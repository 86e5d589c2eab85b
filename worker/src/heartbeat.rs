//! Says `Progress` at the protocol's interval, and how load and warm-up advance, whatever the engine does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError};
use proto::PROGRESS_INTERVAL_MS;
use proto::to_dispatcher::ToDispatcher;

use crate::session::ToSession;
use crate::vitals::{Phase, Vitals};

const INTERVAL: Duration = Duration::from_millis(PROGRESS_INTERVAL_MS);

/// Beats until the session is gone or `stop` is closed. It reads the engine's numbers and never
/// waits for the engine; where the session is behind, a beat is left out.
pub fn run(vitals: &Arc<Vitals>, session: &Sender<ToSession>, stop: &Receiver<()>) {
    let mut told = Phase::Loading { permille: 0 };
    let mut next = Instant::now();
    loop {
        let mut messages = vec![ToDispatcher::Progress(vitals.progress())];
        let phase = vitals.phase();
        if phase != told {
            told = phase;
            match phase {
                Phase::Loading { permille } => messages.push(ToDispatcher::Loading { permille }),
                Phase::Warming { done } => messages.push(ToDispatcher::Warming { done, of: 0 }),
                Phase::Serving => {}
            }
        }
        for message in messages {
            if let Err(TrySendError::Disconnected(_)) = session.try_send(ToSession::Say(message)) {
                return;
            }
        }
        next += INTERVAL;
        // After a long sleep of the machine one beat is enough.
        next = next.max(Instant::now());
        match stop.recv_deadline(next) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
