//! Clients that leave, and clients that do not read.

use std::time::Duration;

use crate::world::{CHAT, COMPLETIONS, World, chat, config, post, within};
use dispatcher::http::FrontConfig;
use dispatcher::machine::Outcome;
use dispatcher::machine::event::CancelCause;
use dispatcher::relay::Accept;
use http_body_util::BodyExt;
use proto::FinishReason;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

fn body(path: &str, stream: bool) -> String {
    if path == CHAT {
        chat(&format!(r#","stream":{stream}"#))
    } else {
        format!(r#"{{"prompt":"a","stream":{stream}}}"#)
    }
}

#[tokio::test]
async fn leaving_before_the_first_token_cancels_on_every_route_and_in_both_modes() {
    let mut world = World::start(config()).await;
    for path in [CHAT, COMPLETIONS] {
        for stream in [false, true] {
            let mut client = world.client().await;
            let (leave, left) = tokio::sync::oneshot::channel::<()>();
            let asking = tokio::spawn(async move {
                tokio::select! {
                    _ = client.send(post(path, body(path, stream))) => panic!("answered"),
                    _ = left => client.leave().await,
                }
            });
            let arrived = world.arrived().await;
            leave.send(()).unwrap();
            asking.await.unwrap();
            let cancelled = world.cancelled().await;
            assert_eq!(cancelled, (arrived.request, CancelCause::ClientDisconnect));
            assert!(arrived.relay.is_closed());
        }
    }
}

#[tokio::test]
async fn leaving_mid_stream_cancels() {
    let mut world = World::start(config()).await;
    for path in [CHAT, COMPLETIONS] {
        let mut client = world.client().await;
        let opening =
            tokio::spawn(async move { (client.open(post(path, body(path, true))).await, client) });
        let mut arrived = world.arrived().await;
        arrived.tokens(&["a"]);
        let (mut reply, client) = opening.await.unwrap();
        within(reply.frame()).await.unwrap().unwrap();
        client.leave().await;
        let cancelled = world.cancelled().await;
        assert_eq!(cancelled, (arrived.request, CancelCause::ClientDisconnect));
    }
}

#[tokio::test]
async fn leaving_after_the_end_cancels_nothing() {
    let mut world = World::start(config()).await;
    let mut client = world.client().await;
    let asking = tokio::spawn(async move {
        let reply = client.send(post(CHAT, body(CHAT, true))).await;
        client.leave().await;
        reply
    });
    let mut arrived = world.arrived().await;
    arrived.finish(&["a"], FinishReason::Stop);
    assert_eq!(asking.await.unwrap().status, 200);
    world.stop();
    let mut commands = std::mem::replace(&mut world.commands, tokio::sync::mpsc::channel(1).1);
    world.stopped().await;
    assert!(commands.try_recv().is_err());
}

/// Asks for a stream and reads nothing of it.
async fn stare(world: &World) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    // A small window, so that the sender meets it soon.
    socket.set_recv_buffer_size(4096).unwrap();
    let mut socket = socket.connect(world.address).await.unwrap();
    let body = body(CHAT, true);
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all((head + &body).as_bytes()).await.unwrap();
    socket
}

#[tokio::test]
async fn what_a_slow_reader_does_not_take_stays_in_the_relay_until_its_bound() {
    let mut world = World::start(config()).await;
    let socket = stare(&world).await;
    let mut arrived = world.arrived().await;
    let word = "x".repeat(100);
    let mut sent = 0;
    let tokens = loop {
        match arrived.tokens(&[word.as_str(); 10]) {
            Accept::Taken { .. } => sent += 10,
            Accept::Overflow => break sent,
            other => panic!("{other:?}"),
        }
        assert!(sent < 8_000, "nothing bounds the stream");
        // The front gets its turn at each step.
        tokio::task::yield_now().await;
    };
    // The kernel's two buffers, hyper's, a batch being rendered, and the relay's bound: events are
    // some 300 bytes, text 100 of them.
    assert!(tokens > 1000, "{tokens}");
    // The driver ends it; the connection's own patience ends the rest.
    arrived
        .relay
        .end(Outcome::Cancelled(CancelCause::SlowReader));
    drop(socket);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_takes_no_event_for_thirty_seconds_is_cut_off_as_a_slow_reader() {
    let mut world = World::start(config()).await;
    let mut socket = stare(&world).await;
    let mut arrived = world.arrived().await;
    let word = "x".repeat(1000);
    // More than the kernel and hyper hold, less than the relay's bound.
    for _ in 0..12 {
        let mut step = 0;
        while step < 200 && matches!(arrived.tokens(&[&word]), Accept::Taken { .. }) {
            step += 1;
            tokio::task::yield_now().await;
        }
    }
    let start = tokio::time::Instant::now();
    let cancelled = world.cancelled().await;
    assert_eq!(cancelled, (arrived.request, CancelCause::SlowReader));
    let waited = start.elapsed().as_secs();
    assert!((29..=31).contains(&waited), "{waited}");
    // What was sent before can still be read; then the connection is at its end, without a last chunk.
    let mut rest = Vec::new();
    let _ = socket.read_to_end(&mut rest).await;
    assert!(rest.starts_with(b"HTTP/1.1 200"));
    assert!(!rest.ends_with(b"0\r\n\r\n"));
}

#[tokio::test(start_paused = true)]
async fn a_head_that_never_ends_is_cut_off_after_ten_seconds() {
    let world = World::start(config()).await;
    let mut socket = TcpStream::connect(world.address).await.unwrap();
    socket
        .write_all(b"GET /health HTTP/1.1\r\nx: ")
        .await
        .unwrap();
    let start = tokio::time::Instant::now();
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer).await;
    assert!(answer.is_empty());
    assert_eq!(start.elapsed().as_secs(), 10);
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_is_kept_for_seventy_five_seconds() {
    let world = World::start(config()).await;
    let mut socket = TcpStream::connect(world.address).await.unwrap();
    let ask = b"GET /health HTTP/1.1\r\n\r\n";
    let mut answer = vec![0; 1024];
    for _ in 0..2 {
        socket.write_all(ask).await.unwrap();
        let length = within(socket.read(&mut answer)).await.unwrap();
        assert!(answer[..length].starts_with(b"HTTP/1.1 200"));
        tokio::time::sleep(Duration::from_secs(70)).await;
    }
    let start = tokio::time::Instant::now();
    assert_eq!(within(socket.read(&mut answer)).await.unwrap(), 0);
    assert_eq!(start.elapsed().as_secs(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_never_ends_is_refused_after_thirty_seconds() {
    let world = World::start(config()).await;
    let mut socket = TcpStream::connect(world.address).await.unwrap();
    let head = format!("POST {CHAT} HTTP/1.1\r\ncontent-length: 100\r\n\r\n{{");
    socket.write_all(head.as_bytes()).await.unwrap();
    let start = tokio::time::Instant::now();
    let mut answer = String::new();
    within(socket.read_to_string(&mut answer)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!(answer.contains("body_timeout"), "{answer}");
    assert_eq!(start.elapsed().as_secs(), 30);
}

#[tokio::test]
async fn a_stream_ends_where_the_client_leaves_while_nothing_is_said() {
    let mut world = World::start(FrontConfig {
        first_token_wait: Duration::ZERO,
        ..config()
    })
    .await;
    let mut client = world.client().await;
    let opening =
        tokio::spawn(async move { (client.open(post(CHAT, body(CHAT, true))).await, client) });
    let arrived = world.arrived().await;
    let (reply, client) = opening.await.unwrap();
    assert_eq!(reply.status(), 200);
    client.leave().await;
    let cancelled = world.cancelled().await;
    assert_eq!(cancelled, (arrived.request, CancelCause::ClientDisconnect));
    assert_eq!(arrived.relay.progress().emitted, [0; 0]);
}
