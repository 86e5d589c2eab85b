//! One connection's state, from which its deadlines follow: slow heads, idle waits, stalled writes.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

/// How long a connection may do what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Patience {
    /// From the first byte of a request's head (on a new connection: from its start) to its last.
    pub(crate) head: Duration,
    /// Between two requests.
    pub(crate) idle: Duration,
    /// Without one whole event written.
    pub(crate) stall: Duration,
}

/// Why a connection is ended by us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expired {
    Head,
    Idle,
    Stall,
}

const PHASE_HEAD: u8 = 0;
const PHASE_BUSY: u8 = 1;
const PHASE_IDLE: u8 = 2;

/// Shared by the connection's socket, its request handlers and its deadline; all in one task, so
/// that relaxed atomics do.
#[derive(Debug)]
pub(crate) struct Peer {
    start: Instant,
    phase: AtomicU8,
    /// Microseconds from `start` to the beginning of the phase.
    phase_since: AtomicU64,
    /// Microseconds from `start` to the write that was refused, plus one; 0: none is.
    blocked_since: AtomicU64,
    /// Bytes written since the block began or was last counted as moving.
    written: AtomicU64,
    /// Bytes of the event being written: less than that is no progress.
    event_bytes: AtomicU64,
    stalled: AtomicBool,
    /// Above the cap of connections: health and metrics only.
    pub(crate) reserve: bool,
}

impl Peer {
    #[must_use]
    pub(crate) fn new(reserve: bool) -> Self {
        Self {
            start: Instant::now(),
            phase: AtomicU8::new(PHASE_HEAD),
            phase_since: AtomicU64::new(0),
            blocked_since: AtomicU64::new(0),
            written: AtomicU64::new(0),
            event_bytes: AtomicU64::new(1),
            stalled: AtomicBool::new(false),
            reserve,
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX - 1)
    }

    fn enter(&self, phase: u8) {
        self.phase.store(phase, Ordering::Relaxed);
        self.phase_since.store(self.now(), Ordering::Relaxed);
    }

    /// A request's head is read.
    pub(crate) fn busy(&self) {
        self.enter(PHASE_BUSY);
    }

    /// A response's last byte was handed to the socket's buffer.
    pub(crate) fn idle(&self) {
        self.enter(PHASE_IDLE);
    }

    /// The size of the events being written from now on.
    pub(crate) fn event_bytes(&self, bytes: usize) {
        self.event_bytes.store(
            u64::try_from(bytes).unwrap_or(u64::MAX).max(1),
            Ordering::Relaxed,
        );
    }

    /// The client stopped reading, and its connection is being ended for it.
    #[must_use]
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }

    pub(crate) fn set_stalled(&self) {
        self.stalled.store(true, Ordering::Relaxed);
    }

    fn read(&self, bytes: usize) {
        if bytes > 0 && self.phase.load(Ordering::Relaxed) == PHASE_IDLE {
            self.enter(PHASE_HEAD);
        }
    }

    fn wrote(&self, result: &Poll<std::io::Result<usize>>) {
        match result {
            Poll::Pending if self.blocked_since.load(Ordering::Relaxed) == 0 => {
                self.blocked_since.store(self.now() + 1, Ordering::Relaxed);
                self.written.store(0, Ordering::Relaxed);
            }
            Poll::Ready(Ok(bytes)) if self.blocked_since.load(Ordering::Relaxed) != 0 => {
                let bytes = u64::try_from(*bytes).unwrap_or(u64::MAX);
                let written = self.written.load(Ordering::Relaxed).saturating_add(bytes);
                self.written.store(written, Ordering::Relaxed);
                if written >= self.event_bytes.load(Ordering::Relaxed) {
                    self.blocked_since.store(0, Ordering::Relaxed);
                }
            }
            _ => {}
        }
    }

    /// All that was handed to the socket is out, be it less than one event.
    fn flushed(&self) {
        self.blocked_since.store(0, Ordering::Relaxed);
    }

    /// When this connection has used up its patience, and of which kind; `None`: while it is served.
    #[must_use]
    pub(crate) fn deadline(&self, patience: &Patience) -> Option<(Instant, Expired)> {
        let blocked = self.blocked_since.load(Ordering::Relaxed);
        if blocked != 0 {
            let since = self.start + Duration::from_micros(blocked - 1);
            return Some((since + patience.stall, Expired::Stall));
        }
        let since = self.start + Duration::from_micros(self.phase_since.load(Ordering::Relaxed));
        match self.phase.load(Ordering::Relaxed) {
            PHASE_HEAD => Some((since + patience.head, Expired::Head)),
            PHASE_IDLE => Some((since + patience.idle, Expired::Idle)),
            _ => None,
        }
    }
}

/// A socket that tells its [`Peer`] what passes.
#[derive(Debug)]
pub(crate) struct Watched<S> {
    pub(crate) socket: S,
    pub(crate) peer: std::sync::Arc<Peer>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let result = Pin::new(&mut self.socket).poll_read(cx, buffer);
        self.peer.read(buffer.filled().len() - before);
        result
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.peer.wrote(&result);
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write_vectored(cx, slices);
        self.peer.wrote(&result);
        result
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    // hyper flushes only when its own buffer is empty.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.peer.flushed();
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience = Patience {
        head: Duration::from_secs(10),
        idle: Duration::from_secs(75),
        stall: Duration::from_secs(30),
    };

    fn left(peer: &Peer) -> Option<(u64, Expired)> {
        let (at, kind) = peer.deadline(&PATIENCE)?;
        Some((at.duration_since(Instant::now()).as_secs(), kind))
    }

    #[tokio::test(start_paused = true)]
    async fn each_phase_has_its_own_patience() {
        let peer = Peer::new(false);
        assert_eq!(left(&peer), Some((10, Expired::Head)));
        peer.busy();
        assert_eq!(left(&peer), None);
        peer.idle();
        assert_eq!(left(&peer), Some((75, Expired::Idle)));
        tokio::time::advance(Duration::from_secs(5)).await;
        peer.read(0);
        assert_eq!(left(&peer), Some((70, Expired::Idle)));
        peer.read(1);
        assert_eq!(left(&peer), Some((10, Expired::Head)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_trickle_of_less_than_one_event_is_no_progress() {
        let peer = Peer::new(false);
        peer.busy();
        peer.event_bytes(200);
        peer.wrote(&Poll::Pending);
        tokio::time::advance(Duration::from_secs(20)).await;
        peer.wrote(&Poll::Ready(Ok(150)));
        assert_eq!(left(&peer), Some((10, Expired::Stall)));
        peer.wrote(&Poll::Ready(Ok(50)));
        assert_eq!(left(&peer), None);
        peer.wrote(&Poll::Pending);
        assert_eq!(left(&peer), Some((30, Expired::Stall)));
        // The rest of an event that was written in part is all there is: nothing is owed.
        peer.wrote(&Poll::Ready(Ok(10)));
        assert_eq!(left(&peer), Some((30, Expired::Stall)));
        peer.flushed();
        assert_eq!(left(&peer), None);
    }
}
