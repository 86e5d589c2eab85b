//! What waits to be written to a worker: whole frames, in order, bounded.

use std::io;

use proto::{ProtoError, ToWorker, encode_into};
use tokio::net::UnixStream;

/// Bytes that may wait. A worker reads at all times, so that only a stopped one comes to this.
pub(super) const WAITING_BYTES_MAX: usize = 64 << 20;

/// Room that is kept for the next frames once all is written.
const KEPT_BYTES: usize = 1 << 20;

/// Frames on their way out.
#[derive(Debug, Default)]
pub(super) struct Output {
    buffer: Vec<u8>,
    written: usize,
    /// The worker reads no more. It may still have frames for us.
    broken: bool,
}

impl Output {
    /// Appends a message. On a worker that reads no more it has no effect.
    pub(super) fn push(&mut self, message: &ToWorker) -> Result<(), ProtoError> {
        if self.broken {
            return Ok(());
        }
        encode_into(message, &mut self.buffer)
    }

    /// Bytes that wait.
    pub(super) fn waiting(&self) -> usize {
        self.buffer.len() - self.written
    }

    /// Writes what the socket takes now.
    pub(super) fn write(&mut self, stream: &UnixStream) {
        while self.waiting() > 0 {
            match stream.try_write(&self.buffer[self.written..]) {
                Ok(length) => self.written += length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // What the worker had said before is still to be read: the link ends at the end
                // of that, not here.
                Err(_) => {
                    self.broken = true;
                    self.written = self.buffer.len();
                }
            }
        }
        if self.waiting() == 0 {
            self.buffer.clear();
            self.buffer.shrink_to(KEPT_BYTES);
            self.written = 0;
        } else if self.written > self.buffer.len() / 2 {
            self.buffer.drain(..self.written);
            self.written = 0;
        }
    }
}
