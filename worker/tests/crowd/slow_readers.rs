//! Readers that do not keep up are let go, and the others do not notice.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;

use crate::system::System;
use crate::system::crowd::{self, Ask, Connection};

const SLOW: usize = 100;
const OTHERS: usize = 900;
const PROMISE_MS: f64 = 10.0;
/// How long the others run without slow ones.
const WITHOUT: Duration = Duration::from_secs(10);
/// From the first slow reader to the end of the last: buffers fill, then 30 s pass without an event.
const ENDED_WITHIN: Duration = Duration::from_secs(110);
/// At 210 bytes an event and more, 2 MiB and more.
const SLOW_TOKENS: u32 = 12_000;

/// Streams of a few seconds one after another, until told to stop; the gaps between events in ms.
async fn others(address: SocketAddr, over: Arc<AtomicBool>) -> (usize, Vec<f64>) {
    let loops: Vec<_> = (0..OTHERS)
        .map(|index| {
            let over = Arc::clone(&over);
            tokio::spawn(async move {
                let ask = Ask::stream(&format!("reader {index}"), 150);
                let mut connection = Connection::open(address).await.unwrap();
                let (mut streams, mut gaps) = (0, Vec::new());
                while !over.load(Ordering::Relaxed) {
                    let reply = connection.ask(&ask).await.unwrap();
                    assert!(reply.status == 200 && reply.done, "a stream broke off");
                    streams += 1;
                    gaps.extend(reply.gaps_ms.into_iter().map(f64::from));
                }
                (streams, gaps)
            })
        })
        .collect();
    let (mut streams, mut gaps) = (0, Vec::new());
    for one in loops {
        let (more, of_one) = one.await.unwrap();
        streams += more;
        gaps.extend(of_one);
    }
    (streams, gaps)
}

/// Reads one byte a second for ever.
async fn slow(address: SocketAddr, index: usize) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    let mut body = json!({
        "messages": [{ "role": "user", "content": format!("slow {index}") }],
        "max_tokens": SLOW_TOKENS,
        "stream": true,
    });
    // Half of them owe so much that the bound on bytes ends them, the others stall.
    if index.is_multiple_of(2) {
        body["logprobs"] = json!(true);
        body["top_logprobs"] = json!(20);
    }
    stream
        .write_all(&Ask::of(&body).bytes(address))
        .await
        .unwrap();
    while stream.read_u8().await.is_ok() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

#[test]
fn a_hundred_readers_of_a_byte_a_second_are_let_go_and_nine_hundred_others_do_not_notice() {
    let system = System::scripted(
        "step_us=20000",
        &["--instances", "4", "--slots", "250", "--ctx-size", "16384"],
    );
    let address = system.address.parse().unwrap();
    let let_go = || {
        let name = "dispatcher_requests_cancelled_total";
        crowd::metric_with(&system, name, "reason=\"slow_reader\"")
    };
    crowd::run(async {
        let over = Arc::new(AtomicBool::new(false));
        let running = tokio::spawn(others(address, Arc::clone(&over)));
        tokio::time::sleep(WITHOUT).await;
        over.store(true, Ordering::Relaxed);
        let (_, mut without) = running.await.unwrap();

        let over = Arc::new(AtomicBool::new(false));
        let running = tokio::spawn(others(address, Arc::clone(&over)));
        let begun = Instant::now();
        let slow: Vec<_> = (0..SLOW)
            .map(|index| tokio::spawn(slow(address, index)))
            .collect();
        while let_go() < SLOW as f64 {
            assert!(
                begun.elapsed() < ENDED_WITHIN,
                "{} of {SLOW} were let go: {:#}",
                let_go(),
                system.status()
            );
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        crowd::figure(
            "seconds until the last slow reader was let go",
            begun.elapsed().as_secs(),
            ENDED_WITHIN.as_secs(),
        );
        over.store(true, Ordering::Relaxed);
        let (streams, mut with) = running.await.unwrap();
        for one in slow {
            one.abort();
        }
        let without = crowd::quantile(&mut without, 0.99);
        let with = crowd::quantile(&mut with, 0.99);
        let bound = without + PROMISE_MS * crowd::slack();
        crowd::figure(
            "p99 gap without slow readers, ms",
            format!("{without:.1}"),
            "-",
        );
        crowd::figure(
            "p99 gap of the others beside them, ms",
            format!("{with:.1}"),
            format!("{bound:.1}"),
        );
        crowd::figure(
            "streams of the others that completed meanwhile",
            streams,
            "all",
        );
        assert!(with <= bound, "{with} ms > {bound} ms");
    });
    let status = system.await_status("all slots free", |status| {
        status["queue"]["running"] == 0
            && status["instances"]
                .as_array()
                .unwrap()
                .iter()
                .all(|one| one["live_slots"] == 0)
    });
    assert_eq!(let_go(), SLOW as f64);
    assert_eq!(status["counters"]["cancelled"], SLOW);
    assert_eq!(status["counters"]["failed"], 0);
    assert_eq!(status["counters"]["worker_exits"], 0);
}
