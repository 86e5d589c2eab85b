//! Hello both ways: who connected, whether it is the worker that was spawned, within a deadline.

use std::time::Duration;

use proto::to_dispatcher::Hello;
use proto::{Decoder, FRAME_BYTES_MAX, PROTOCOL_VERSION, ToDispatcher, ToWorker, decode, encode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::Context;
use super::expectation::{Peer, Refusal};

/// From accepting a connection to its whole hello.
pub(super) const DEADLINE: Duration = Duration::from_secs(10);

/// A refusal that is not read within this is not waited for.
const REFUSAL_DEADLINE: Duration = Duration::from_secs(1);

/// The longest hello in bytes: the peer has not yet shown who it is.
const HELLO_BYTES_MAX: usize = 4 << 10;

/// Brings `stream` from accepted to a link, or tells the peer why not.
///
/// The decoder comes back with whatever the worker sent after its hello.
pub(super) async fn run(
    stream: &mut UnixStream,
    context: &Context,
) -> Result<(Hello, Decoder), Refusal> {
    let refusal = match tokio::time::timeout(DEADLINE, meet(stream, context)).await {
        Ok(Ok(met)) => return Ok(met),
        Ok(Err(refusal)) => refusal,
        Err(_) => Refusal::Silent(DEADLINE),
    };
    let words = ToWorker::Refused {
        reason: refusal.to_string(),
    };
    if let Ok(frame) = encode(&words) {
        // The peer may be gone, or never read: it is refused either way.
        let _ = tokio::time::timeout(REFUSAL_DEADLINE, stream.write_all(&frame)).await;
    }
    super::session::shut(stream);
    Err(refusal)
}

async fn meet(stream: &mut UnixStream, context: &Context) -> Result<(Hello, Decoder), Refusal> {
    let peer = peer(stream)?;
    let (hello, decoder) = read_hello(stream).await?;
    let answer = encode(&ToWorker::Hello {
        protocol: PROTOCOL_VERSION,
        build: context.build.clone(),
    })?;
    // Nothing may fail or wait after the claim: whoever has claimed is a link, and ends as one.
    context.expectations.claim(&hello, peer)?;
    if stream.try_write(&answer).ok() != Some(answer.len()) {
        tracing::debug!(instance = %hello.instance, "the worker left during its handshake");
    }
    Ok((hello, decoder))
}

async fn read_hello(stream: &mut UnixStream) -> Result<(Hello, Decoder), Refusal> {
    let mut decoder = Decoder::with_cap(HELLO_BYTES_MAX);
    let mut read = [0; 1 << 10];
    loop {
        let length = stream.read(&mut read).await?;
        if length == 0 {
            return Err(Refusal::Closed);
        }
        let taken = decoder.push(&read[..length]);
        let Some(frame) = decoder.next_frame()? else {
            continue;
        };
        let ToDispatcher::Hello(hello) = decode(frame)? else {
            return Err(Refusal::NotHello);
        };
        decoder.set_cap(FRAME_BYTES_MAX);
        // What did not fit beside the hello is less than one read, and fits under the link's cap.
        let rest = decoder.push(&read[taken..length]);
        debug_assert_eq!(rest, length - taken);
        return Ok((hello, decoder));
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn peer(stream: &UnixStream) -> std::io::Result<Peer> {
    use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
    let credentials = getsockopt(stream, PeerCredentials)?;
    Ok(Peer {
        // 0 where the peer is in a process namespace that we cannot see: no child of ours is.
        pid: u32::try_from(credentials.pid()).unwrap_or(0),
        uid: credentials.uid(),
    })
}

#[cfg(target_vendor = "apple")]
fn peer(stream: &UnixStream) -> std::io::Result<Peer> {
    use nix::sys::socket::{getsockopt, sockopt};
    let pid = getsockopt(stream, sockopt::LocalPeerPid)?;
    let credentials = getsockopt(stream, sockopt::LocalPeerCred)?;
    Ok(Peer {
        pid: u32::try_from(pid).unwrap_or(0),
        uid: credentials.uid(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::clock::Clock;
    use crate::link::{Expectations, NoObserver};
    use tokio::sync::mpsc;

    fn context() -> Context {
        Context {
            clock: Clock::start(),
            inputs: mpsc::channel(1).0,
            expectations: Expectations::new(),
            observer: Arc::new(NoObserver),
            build: "test".into(),
        }
    }

    async fn refused(worker: &mut UnixStream) -> String {
        let mut bytes = Vec::new();
        worker.read_to_end(&mut bytes).await.unwrap();
        let mut decoder = Decoder::new();
        assert_eq!(decoder.push(&bytes), bytes.len());
        match decode(decoder.next_frame().unwrap().unwrap()).unwrap() {
            ToWorker::Refused { reason } => reason,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_peer_is_refused_at_the_deadline() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let start = tokio::time::Instant::now();
        let refusal = run(&mut ours, &context()).await.unwrap_err();
        assert!(matches!(refusal, Refusal::Silent(_)), "{refusal}");
        assert_eq!(start.elapsed(), DEADLINE);
        assert_eq!(refused(&mut theirs).await, "no hello came within 10s");
    }

    #[tokio::test(start_paused = true)]
    async fn half_a_hello_does_not_move_the_deadline() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let start = tokio::time::Instant::now();
        theirs.write_all(&[100, 0, 0, 0, 0]).await.unwrap();
        let refusal = run(&mut ours, &context()).await.unwrap_err();
        assert!(matches!(refusal, Refusal::Silent(_)), "{refusal}");
        assert_eq!(start.elapsed(), DEADLINE);
    }

    #[tokio::test]
    async fn a_peer_that_closes_first_is_no_link() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let refusal = run(&mut ours, &context()).await.unwrap_err();
        assert!(matches!(refusal, Refusal::Closed), "{refusal}");
    }

    #[tokio::test]
    async fn a_first_message_that_is_no_hello_is_refused() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let frame = encode(&ToDispatcher::Drained).unwrap();
        theirs.write_all(&frame).await.unwrap();
        run(&mut ours, &context()).await.unwrap_err();
        let words = refused(&mut theirs).await;
        assert_eq!(words, "the first message was not a hello");
    }

    #[tokio::test]
    async fn a_hello_over_its_own_small_cap_is_refused_by_its_prefix() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&[0, 0, 1, 0]).await.unwrap();
        run(&mut ours, &context()).await.unwrap_err();
        let words = refused(&mut theirs).await;
        assert!(
            words.contains("65536 bytes is over the cap of 4096"),
            "{words}"
        );
    }
}
