//! Ties the worker's life to the dispatcher's: parent death, the inherited pipe, signals.

use std::io::{self, Read};

use crossbeam_channel::{Receiver, bounded};
#[cfg(target_os = "linux")]
use nix::sys::signal::Signal;
use nix::unistd::getppid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Bytes of the one-time token.
const TOKEN_BYTES: usize = 32;

/// On Linux, asks the kernel for SIGKILL when the thread that spawned this process ends. `false`:
/// the parent is already another than `parent_pid`, so it may have died before the request.
#[must_use]
pub fn tie(parent_pid: i32) -> bool {
    #[cfg(target_os = "linux")]
    if nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).is_err() {
        return false;
    }
    getppid().as_raw() == parent_pid
}

/// Reads the one-time token from standard input.
///
/// # Errors
///
/// The pipe ended before all of it was there.
pub fn read_token() -> io::Result<[u8; TOKEN_BYTES]> {
    let mut token = [0; TOKEN_BYTES];
    io::stdin().lock().read_exact(&mut token)?;
    Ok(token)
}

/// Tells when standard input ends: the dispatcher holds its other end for as long as it lives.
///
/// # Errors
///
/// No thread could be started.
pub fn watch_standard_input() -> io::Result<Receiver<()>> {
    let (orphaned, receiver) = bounded(1);
    std::thread::Builder::new()
        .name("stdin".to_string())
        .spawn(move || {
            let mut scratch = [0; 64];
            // Whatever comes after the token means nothing.
            loop {
                match io::stdin().lock().read(&mut scratch) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            let _ = orphaned.send(());
        })?;
    Ok(receiver)
}

/// Tells when SIGTERM comes. SIGINT and SIGHUP, which a terminal sends to everyone, are swallowed:
/// the dispatcher decides what they mean.
///
/// By handlers, not by blocking: a BLAS starts threads as it is linked, before `main`, and a signal
/// that one thread does not block ends the process.
///
/// # Errors
///
/// No thread could be started, or the handlers could not be set.
pub fn watch_signals() -> io::Result<Receiver<()>> {
    let mut watched = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let (terminate, receiver) = bounded(1);
    std::thread::Builder::new()
        .name("signals".to_string())
        .spawn(move || {
            for signal in watched.forever() {
                if signal == SIGTERM {
                    let _ = terminate.try_send(());
                }
            }
        })?;
    Ok(receiver)
}

/// Dies of SIGTERM, so that the wait status says so.
pub fn die_of_sigterm() {
    let _ = signal_hook::low_level::emulate_default_handler(SIGTERM);
}
