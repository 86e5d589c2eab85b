//! Takes connections off the listening socket: capped, unharmed by a full file table, one task each.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Request, header};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper_util::rt::TokioIo;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower::ServiceExt;
use tracing::{debug, info, warn};

use super::peer::{Expired, Patience, Peer, Watched};
use crate::handover::LastCall;
use crate::metrics::Metrics;

/// What a slow reader may keep in the kernel, in bytes.
const SEND_BUFFER_BYTES: usize = 64 << 10;
/// Head and unsent bytes that one connection may hold in hyper.
const BUFFER_BYTES_MAX: usize = 64 << 10;
/// The first and the longest pause after an accept that failed for want of descriptors or memory.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// After the last call, how long a connection that has sent no request may still send one: a new one
/// whose request is on its way, and one between two requests.
const LAST_HEAD: Duration = Duration::from_secs(2);
const LAST_IDLE: Duration = Duration::from_millis(100);
/// After the last call, how long requests may take to be handed over before nothing is admitted.
const SETTLE_MAX: Duration = Duration::from_secs(5);

/// How far the end has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Open,
    /// Nothing is accepted any more; what was accepted is answered.
    LastCall,
    /// Connections end as soon as they can.
    Stopping,
}

/// Bounds of the accept loop.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) connections_max: usize,
    /// Connections above the cap that still get answers about health and metrics.
    pub(crate) connections_reserve: usize,
    pub(crate) patience: Patience,
    /// From the stop to the moment when what still runs is cut off.
    pub(crate) stop_timeout: Duration,
}

/// What connections come from; a test's may fail as it likes.
pub(crate) trait Accept {
    fn accept(&self) -> impl Future<Output = io::Result<(TcpStream, SocketAddr)>> + Send;
}

impl Accept for TcpListener {
    fn accept(&self) -> impl Future<Output = io::Result<(TcpStream, SocketAddr)>> + Send {
        Self::accept(self)
    }
}

/// Serves until `stop` resolves and what was running then has ended.
pub(crate) async fn serve(
    listener: impl Accept,
    router: Router,
    metrics: Metrics,
    limits: Limits,
    last_call: Option<LastCall>,
    stop: impl Future<Output = ()>,
) {
    let room = Arc::new(Semaphore::new(
        limits.connections_max + limits.connections_reserve,
    ));
    let (phase, watched) = watch::channel(Phase::Open);
    let (unsettled, mut settling) = mpsc::channel::<std::convert::Infallible>(1);
    let mut connections = JoinSet::new();
    let mut stop = pin!(stop);
    let (begin, settled) = match last_call {
        Some(LastCall { begin, settled }) => (Some(begin), Some(settled)),
        None => (None, None),
    };
    let mut called = pin!(async move {
        // A sender that is gone calls nobody.
        if let Some(begin) = begin
            && begin.await.is_ok()
        {
            return;
        }
        std::future::pending().await
    });
    let mut ending = Phase::Stopping;
    let mut pause = PAUSE_MIN;
    loop {
        // Finished tasks are taken out here, so that the set holds no more than the cap.
        while connections.try_join_next().is_some() {}
        let next = async {
            // The semaphore is never closed.
            let permit = Arc::clone(&room).acquire_owned().await.ok()?;
            Some((permit, listener.accept().await))
        };
        let (permit, accepted) = tokio::select! {
            () = &mut stop => break,
            () = &mut called => {
                ending = Phase::LastCall;
                break;
            }
            Some(next) = next => next,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) if is_of_the_peer(&error) => continue,
            Err(error) => {
                warn!(%error, pause_ms = pause.as_millis(), "failed to accept a connection");
                metrics.accept_failed();
                tokio::select! {
                    () = &mut stop => break,
                    () = &mut called => {
                        ending = Phase::LastCall;
                        break;
                    }
                    () = sleep(pause) => {}
                }
                pause = (pause * 2).min(PAUSE_MAX);
                continue;
            }
        };
        pause = PAUSE_MIN;
        let reserve = room.available_permits() < limits.connections_reserve;
        let (router, metrics) = (router.clone(), metrics.clone());
        let end = End {
            phase: watched.clone(),
            unsettled: Some(unsettled.clone()),
        };
        let patience = limits.patience;
        connections.spawn(async move {
            metrics.connection_opened();
            connection(stream, router, Arc::new(Peer::new(reserve)), patience, end).await;
            metrics.connection_closed();
            drop(permit);
        });
    }
    // The backlog is whoever's who listens next.
    drop(listener);
    drop(unsettled);
    if ending == Phase::LastCall {
        let _ = phase.send(Phase::LastCall);
        tokio::select! {
            // Each connection's sender is gone.
            _ = settling.recv() => {}
            () = sleep(SETTLE_MAX) => warn!("some accepted requests come too late"),
            () = &mut stop => ending = Phase::Stopping,
        }
        if let Some(settled) = settled {
            let _ = settled.send(());
        }
        while ending == Phase::LastCall {
            tokio::select! {
                () = &mut stop => ending = Phase::Stopping,
                Some(_) = connections.join_next() => {}
            }
        }
    }
    let _ = phase.send(Phase::Stopping);
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.stop_timeout, all)
        .await
        .is_err()
    {
        info!(left = connections.len(), "connections are cut off");
        connections.shutdown().await;
    }
}

/// The connection was gone before it was accepted: the next one may be fine.
fn is_of_the_peer(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
    )
}

/// What a connection knows of the end.
struct End {
    phase: watch::Receiver<Phase>,
    /// Held until this connection's request is handed over, or no more will come.
    unsettled: Option<mpsc::Sender<std::convert::Infallible>>,
}

async fn connection(
    stream: TcpStream,
    router: Router,
    peer: Arc<Peer>,
    patience: Patience,
    end: End,
) {
    // Tokens go out as they come. Neither option failing is worth refusing a client.
    let _ = stream.set_nodelay(true);
    let _ = setsockopt(&stream, sockopt::SndBuf, &SEND_BUFFER_BYTES);
    let service = {
        let peer = Arc::clone(&peer);
        hyper::service::service_fn(move |mut request: Request<Incoming>| {
            peer.busy();
            request.extensions_mut().insert(Arc::clone(&peer));
            let router = router.clone();
            let peer = Arc::clone(&peer);
            async move {
                let mut response = router.oneshot(request).await?;
                if peer.reserve {
                    response
                        .headers_mut()
                        .insert(header::CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, std::convert::Infallible>(response.map(|body| Tracked { body, peer }))
            }
        })
    };
    let socket = TokioIo::new(Watched {
        socket: stream,
        peer: Arc::clone(&peer),
    });
    // Heads and idle waits have their own deadlines here: hyper's would count an idle connection's
    // wait as a slow head.
    let mut http = pin!(
        hyper::server::conn::http1::Builder::new()
            .half_close(false)
            .header_read_timeout(None)
            .max_buf_size(BUFFER_BYTES_MAX)
            .serve_connection(socket, service)
    );
    let End {
        mut phase,
        mut unsettled,
    } = end;
    let mut watched = phase.clone();
    let mut called = pin!(async move {
        // A sender that is gone means the same as a stop.
        let _ = watched.wait_for(|phase| *phase >= Phase::LastCall).await;
    });
    let mut stop = pin!(async move {
        let _ = phase.wait_for(|phase| *phase >= Phase::Stopping).await;
    });
    let mut last_call = false;
    let mut stopping = false;
    let mut last_chance = pin!(sleep(Duration::ZERO));
    let mut timer = pin!(sleep(patience.head));
    let expired = std::future::poll_fn(|cx| {
        if !last_call && called.as_mut().poll(cx).is_ready() {
            last_call = true;
            let more = if peer.is_idle() { LAST_IDLE } else { LAST_HEAD };
            last_chance
                .as_mut()
                .reset(tokio::time::Instant::now() + more);
        }
        loop {
            if !stopping && stop.as_mut().poll(cx).is_ready() {
                stopping = true;
                http.as_mut().graceful_shutdown();
            }
            if let Poll::Ready(result) = http.as_mut().poll(cx) {
                if let Err(error) = result {
                    debug!(%error, "a connection ended");
                }
                return Poll::Ready(None);
            }
            if last_call && peer.is_submitted() {
                unsettled = None;
            }
            // The request that is being served is the last one. A connection without one is closed,
            // but not before what is on its way has been read: closing then would reset it.
            let last = peer.is_busy() || last_chance.as_mut().poll(cx).is_ready();
            if !last_call || stopping || !last {
                break;
            }
            stopping = true;
            http.as_mut().graceful_shutdown();
        }
        let Some((at, kind)) = peer.deadline(&patience) else {
            return Poll::Pending;
        };
        if timer.deadline() != at {
            timer.as_mut().reset(at);
        }
        timer.as_mut().poll(cx).map(|()| Some(kind))
    })
    .await;
    if expired == Some(Expired::Stall) {
        peer.set_stalled();
    }
    // What the connection still holds goes with it, and each open request is cancelled.
}

/// A response's body, whose end makes the connection idle.
struct Tracked {
    body: Body,
    peer: Arc<Peer>,
}

impl hyper::body::Body for Tracked {
    type Data = bytes::Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.peer.idle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use tokio::time::Instant;

    /// Fails `failures` times for want of descriptors, then hands out what `inner` accepts.
    struct Scarce {
        inner: TcpListener,
        failures: u32,
        calls: Arc<AtomicU32>,
    }

    impl Accept for Scarce {
        async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
            if self.calls.fetch_add(1, Ordering::Relaxed) < self.failures {
                return Err(io::Error::from_raw_os_error(nix::libc::EMFILE));
            }
            TcpListener::accept(&self.inner).await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_file_table_is_waited_out_without_spinning_and_then_serving_goes_on() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let inner = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = inner.local_addr().unwrap();
        let calls = Arc::new(AtomicU32::new(0));
        let listener = Scarce {
            inner,
            failures: 10,
            calls: Arc::clone(&calls),
        };
        let limits = Limits {
            connections_max: 1,
            connections_reserve: 1,
            patience: Patience {
                head: Duration::from_secs(10),
                idle: Duration::from_secs(75),
                stall: Duration::from_secs(30),
            },
            stop_timeout: Duration::from_secs(1),
        };
        let router = Router::new().route("/", axum::routing::get(|| async { "here" }));
        let metrics = Metrics::new(1, "m");
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let start = Instant::now();
        let server = tokio::spawn(serve(listener, router, metrics, limits, None, async {
            let _ = stopped.await;
        }));
        let mut client = TcpStream::connect(address).await.unwrap();
        client
            .write_all(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("here"), "{answer}");
        // 20, 40, … 640 ms, then four times 1 s.
        let waited = start.elapsed();
        assert!(waited >= Duration::from_millis(5260), "{waited:?}");
        assert!(waited <= Duration::from_secs(10), "{waited:?}");
        assert_eq!(calls.load(Ordering::Relaxed), 12);
        stop.send(()).unwrap();
        server.await.unwrap();
    }
}
