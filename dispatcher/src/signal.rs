//! Signals to the dispatcher: SIGTERM or SIGINT once is drain, twice is stop; SIGHUP is reload.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::input::Input;

/// Turns signals into inputs until the driver is gone. From the return of this function on, none of
/// the three kills the process.
///
/// # Errors
/// Where the system refuses a signal handler.
pub fn listen(inputs: mpsc::Sender<Input>) -> io::Result<JoinHandle<()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(tokio::spawn(async move {
        let mut asked_to_end = false;
        loop {
            let input = tokio::select! {
                Some(()) = terminate.recv() => end(&mut asked_to_end),
                Some(()) = interrupt.recv() => end(&mut asked_to_end),
                Some(()) = hangup.recv() => Input::Reload,
                else => return,
            };
            if inputs.send(input).await.is_err() {
                return;
            }
        }
    }))
}

fn end(asked_before: &mut bool) -> Input {
    if std::mem::replace(asked_before, true) {
        Input::Stop
    } else {
        Input::Drain
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::*;

    // One test, because signals are the whole process's.
    #[tokio::test]
    async fn one_signal_drains_a_second_stops_and_a_hangup_reloads() {
        let (sender, mut inputs) = mpsc::channel(8);
        listen(sender).unwrap();
        let mut after = async |signal| {
            kill(Pid::this(), signal).unwrap();
            inputs.recv().await.unwrap()
        };
        assert!(matches!(after(Signal::SIGHUP).await, Input::Reload));
        assert!(matches!(after(Signal::SIGTERM).await, Input::Drain));
        assert!(matches!(after(Signal::SIGHUP).await, Input::Reload));
        assert!(matches!(after(Signal::SIGINT).await, Input::Stop));
        assert!(matches!(after(Signal::SIGTERM).await, Input::Stop));
    }
}
