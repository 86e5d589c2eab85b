//! A listening socket that whoever started us hands over: systemd (`LISTEN_FDS`) or launchd.

#[cfg(target_os = "macos")]
mod launchd;

use std::io;
use std::net::TcpListener;

use listenfd::ListenFd;
use nix::sys::socket::{getsockopt, sockopt};
use thiserror::Error;

/// Why what was handed over cannot be listened on.
#[derive(Debug, Error)]
pub enum SocketError {
    #[error(
        "{0} sockets were handed over, and one is served: name one address in the service manager"
    )]
    Several(usize),
    #[error("the socket that was handed over is not a listening one (systemd: `Accept=no`)")]
    NotListening,
    #[error("the socket that was handed over cannot be used: {0}")]
    Unusable(#[from] io::Error),
}

/// Takes the socket that this process was started with, if there is one. It does not block, and no
/// child gets it.
///
/// To be called once, before other threads run and before any child is started: it reads the
/// environment and clears what is for us alone.
///
/// # Errors
/// Where there is one and it cannot be used: all of these are the service definition's fault.
pub fn inherited() -> Result<Option<TcpListener>, SocketError> {
    let mut handed = ListenFd::from_env();
    let listener = match handed.len() {
        0 => from_launchd()?,
        1 => handed.take_tcp_listener(0)?,
        several => return Err(SocketError::Several(several)),
    };
    let Some(listener) = listener else {
        return Ok(None);
    };
    if !getsockopt(&listener, sockopt::AcceptConn).map_err(io::Error::from)? {
        return Err(SocketError::NotListening);
    }
    listener.set_nonblocking(true)?;
    Ok(Some(listener))
}

#[cfg(target_os = "macos")]
fn from_launchd() -> Result<Option<TcpListener>, SocketError> {
    let mut sockets = launchd::activate()?;
    if sockets.len() > 1 {
        return Err(SocketError::Several(sockets.len()));
    }
    Ok(sockets.pop().map(TcpListener::from))
}

#[cfg(not(target_os = "macos"))]
fn from_launchd() -> Result<Option<TcpListener>, SocketError> {
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_was_handed_nothing_has_nothing() {
        assert!(inherited().unwrap().is_none());
    }
}
