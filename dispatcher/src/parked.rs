//! A dispatcher whose configuration cannot work and whose socket is the service manager's: it stays up and says why.
//!
//! To end would be to be started again by the next connection, and to fail again: a loop. So the same
//! front answers, its liveness with 200 and all else that needs a model with 503 and the cause, until
//! the configuration is read again or an end is asked for.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::MissedTickBehavior;

use crate::clock::Clock;
use crate::gateway::{Command, Gateway};
use crate::handover::LastCall;
use crate::http::{self, Front, FrontConfig};
use crate::input::Input;
use crate::link::RunDirectory;
use crate::machine::action::{Denied, Outcome};
use crate::metrics::Metrics;
use crate::run::{BUILD, FLUSH};
use crate::service::notifier::Notifier;
use crate::state::{State, StateFile};
use crate::view::View;

/// Between two turns of the loop, so that the watchdog is fed and ages move.
const TURN: Duration = Duration::from_millis(250);
/// What a refused client is told to wait. Only a person can end the cause.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// What ended the wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The configuration is to be read again.
    ReadAgain,
    End,
}

/// Why it waits, and what it is known by.
pub(crate) struct Parked<'a> {
    pub(crate) cause: String,
    /// Reloads that were read before.
    pub(crate) reloads: u64,
    /// Where `dispatcher reload` looks for it, where that is known.
    pub(crate) run_dir: Option<&'a Path>,
}

/// Answers on `listener` until a signal says what is next.
pub(crate) async fn wait(
    listener: TcpListener,
    parked: Parked<'_>,
    signals: &mut mpsc::Receiver<Input>,
    notifier: &mut Notifier,
) -> Next {
    let clock = Clock::start();
    tracing::error!(
        "parked, until SIGHUP has the configuration read again: {}",
        parked.cause
    );
    // Without them it serves as well: only `dispatcher reload` does not find it.
    let directory = parked
        .run_dir
        .and_then(|path| RunDirectory::open(path).ok());
    let _state = directory.as_ref().and_then(|directory| {
        let address = listener.local_addr().ok()?.to_string();
        let state = State {
            pid: std::process::id(),
            address,
            version: BUILD.to_owned(),
        };
        StateFile::write(directory.path(), &state).ok()
    });
    let mut view = view_of(&parked);
    let (publish, published) = watch::channel(Arc::new(view.clone()));
    let (gateway, mut commands) = Gateway::new(clock, published);
    let (begin, begun) = oneshot::channel();
    let (settle, mut settled) = oneshot::channel();
    let front = Front {
        gateway,
        metrics: Metrics::new(0, ""),
        config: FrontConfig {
            stop_timeout: FLUSH,
            ..FrontConfig::default()
        },
    };
    let last_call = LastCall {
        begin: begun,
        settled: settle,
    };
    let (stop, stopped) = oneshot::channel::<()>();
    let mut served = tokio::spawn(http::serve(listener, front, Some(last_call), async move {
        // A dropped sender stops it as well as a sent word.
        let _ = stopped.await;
    }));

    let deny = |command| deny(command, &parked.cause);
    let mut turns = tokio::time::interval(TURN);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let next = loop {
        tokio::select! {
            signal = signals.recv() => match signal {
                Some(Input::Reload) => break Next::ReadAgain,
                _ => break Next::End,
            },
            Some(command) = commands.recv() => deny(command),
            _ = turns.tick() => {
                let now = clock.now();
                view.uptime_us = now.as_micros();
                publish.send_replace(Arc::new(view.clone()));
                notifier.observe(&view, now);
            }
        }
    };
    if next == Next::End {
        view.draining = true;
        publish.send_replace(Arc::new(view.clone()));
        notifier.observe(&view, clock.now());
    } else {
        notifier.reload();
    }
    // What was accepted is answered; what was not is the successor's.
    let _ = begin.send(());
    let deadline = tokio::time::sleep(FLUSH);
    tokio::pin!(deadline);
    let mut stop = Some(stop);
    loop {
        tokio::select! {
            _ = &mut settled, if stop.is_some() => drop(stop.take()),
            Some(command) = commands.recv() => deny(command),
            _ = &mut served => return next,
            () = &mut deadline => {
                served.abort();
                return next;
            }
        }
    }
}

fn view_of(parked: &Parked<'_>) -> View {
    View {
        not_ready_reason: Some(format!("parked: {}", parked.cause)),
        parked: Some(parked.cause.clone()),
        reloads: parked.reloads,
        last_reload_error: (parked.reloads > 0).then(|| parked.cause.clone()),
        ..View::default()
    }
}

fn deny(command: Command, cause: &str) {
    if let Command::Submit { relay, .. } = command {
        relay.end(Outcome::Denied(Denied::Parked {
            cause: cause.to_owned(),
            retry_after: RETRY_AFTER,
        }));
    }
}
