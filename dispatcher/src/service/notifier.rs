//! Sends what a service manager is to be told to the socket that it named (`NOTIFY_SOCKET`).

use std::io;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use super::notify::Teller;
use crate::machine::Tick;
use crate::view::View;

/// Unsent text of more bytes is dropped: a manager that does not read does not miss it.
const PENDING_BYTES_MAX: usize = 4096;

/// The way to the service manager; one that says nothing where there is none.
#[derive(Debug)]
pub struct Notifier {
    socket: Option<UnixDatagram>,
    teller: Teller,
    pending: String,
    reloads: u64,
}

impl Notifier {
    /// Reads `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`. To be called before other threads run.
    #[must_use]
    pub fn from_environment() -> Self {
        let variable = |name| std::env::var(name).ok();
        let socket = variable("NOTIFY_SOCKET").and_then(|name| match connect(&name) {
            Ok(socket) => Some(socket),
            Err(error) => {
                // The log is not there yet, and a manager that cannot be reached says so itself.
                tracing::warn!(%error, "the service manager cannot be told how things stand");
                None
            }
        });
        let ours = variable("WATCHDOG_PID")
            .and_then(|pid| pid.parse().ok())
            .is_none_or(|pid: u32| pid == std::process::id());
        let watchdog = variable("WATCHDOG_USEC")
            .and_then(|text| text.parse().ok())
            .filter(|us| ours && *us > 0)
            .map(Duration::from_micros);
        Self {
            socket,
            teller: Teller::new(watchdog),
            pending: String::new(),
            reloads: 0,
        }
    }

    /// Tells what is new in `view`. Called by the driver loop alone: the watchdog watches it.
    pub fn observe(&mut self, view: &View, now: Tick) {
        if self.socket.is_some() {
            self.reloads = view.reloads;
            let text = self.teller.observe(view, now);
            self.send(&text);
        }
    }

    /// Tells that a reload begins.
    pub fn reload(&mut self) {
        // Only systemd has this clock in its protocol; a failure means the text without it is enough.
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
        let now_us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        let text = self.teller.reload(self.reloads, now_us);
        self.send(&text);
    }

    fn send(&mut self, text: &str) {
        let Some(socket) = &self.socket else { return };
        if self.pending.len() < PENDING_BYTES_MAX {
            self.pending.push_str(text);
        }
        if self.pending.is_empty() {
            return;
        }
        match socket.send(self.pending.as_bytes()) {
            Ok(_) => self.pending.clear(),
            // It is tried again with the next turn.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::warn!(%error, "the service manager cannot be told how things stand");
                self.pending.clear();
            }
        }
    }
}

fn connect(name: &str) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    match name.strip_prefix('@') {
        #[cfg(target_os = "linux")]
        Some(name) => {
            use std::os::linux::net::SocketAddrExt;
            let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
            socket.connect_addr(&address)?;
        }
        _ => socket.connect(name)?,
    }
    Ok(socket)
}
