//! Clients that leave at any moment: their slots are free again, and nobody else's text changes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::system::crowd::{self, Ask, Connection, Random};
use crate::system::{PATIENCE, System};

const CLIENTS: usize = 10_000;
/// More than there are slots, so that some leave the queue.
const AT_ONCE: usize = 160;
const MATES: usize = 8;
const MATE_TOKENS: u32 = 300;
/// No client stays for so many.
const TOKENS: u32 = 3000;

#[derive(Clone, Copy, Debug)]
enum Leaves {
    /// With the request half sent.
    Sending,
    /// So long after it was sent: queued, prefilling or decoding.
    After { pause: Duration, stream: bool },
    /// When it has read so many events of its stream.
    Reading { events: usize },
}

/// What a client does, and the length of its prompt.
fn draw(random: &mut Random) -> (Leaves, usize) {
    let leaves = match random.below(8) {
        0 => Leaves::Sending,
        1..=4 => Leaves::After {
            pause: Duration::from_micros(random.below(60_000)),
            stream: random.below(2) == 0,
        },
        _ => Leaves::Reading {
            events: 1 + usize::try_from(random.below(20)).unwrap(),
        },
    };
    let long = random.below(4) == 0;
    (leaves, if long { 1500 } else { 20 })
}

async fn client(address: SocketAddr, index: usize, leaves: Leaves, prompt: usize) {
    let content = format!("{index}{}", "x".repeat(prompt));
    let ask = match leaves {
        Leaves::After { stream: false, .. } => Ask::whole(&content, TOKENS),
        _ => Ask::stream(&content, TOKENS),
    };
    let bytes = ask.bytes(address);
    let mut stream = TcpStream::connect(address).await.unwrap();
    match leaves {
        Leaves::Sending => stream.write_all(&bytes[..bytes.len() / 2]).await.unwrap(),
        Leaves::After { pause, .. } => {
            stream.write_all(&bytes).await.unwrap();
            tokio::time::sleep(pause).await;
        }
        Leaves::Reading { events } => {
            stream.write_all(&bytes).await.unwrap();
            let mut buffer = vec![0; 16 << 10];
            let mut seen = Vec::new();
            // The head, the role and the events' own ends.
            while seen.windows(6).filter(|part| part == b"data: ").count() < events + 1 {
                let read = stream.read(&mut buffer).await.unwrap();
                assert!(read > 0, "closed: {:?}", String::from_utf8_lossy(&seen));
                seen.extend_from_slice(&buffer[..read]);
                assert!(
                    seen.starts_with(b"HTTP/1.1 200"),
                    "{:?}",
                    String::from_utf8_lossy(&seen)
                );
            }
        }
    }
}

/// The same stream again and again; each must say what it said when nobody else was there.
async fn mate(address: SocketAddr, index: usize, expected: String, over: Arc<AtomicBool>) -> usize {
    let ask = Ask::stream(&format!("mate {index}"), MATE_TOKENS).keep();
    let mut connection = Connection::open(address).await.unwrap();
    let mut streams = 0;
    while !over.load(Ordering::Relaxed) || streams == 0 {
        let whole = connection.ask(&ask).await.unwrap().events();
        whole.assert_complete();
        assert!(
            whole.text == expected,
            "mate {index}: {} instead of {expected}",
            whole.text
        );
        streams += 1;
    }
    streams
}

#[test]
fn ten_thousand_clients_leave_at_any_moment_and_leave_nothing_behind() {
    let mut random = Random::seeded();
    let system = System::scripted(
        "step_us=2000,prefill_us=4,chunk=512",
        &["--instances", "2", "--slots", "64"],
    );
    let address = system.address.parse().unwrap();
    let (streams, read) = crowd::run(async {
        let over = Arc::new(AtomicBool::new(false));
        let mut mates = Vec::new();
        for index in 0..MATES {
            let ask = Ask::stream(&format!("mate {index}"), MATE_TOKENS).keep();
            let expected = crowd::ask(address, &ask).await.unwrap().events();
            let expected = expected.assert_complete().text.clone();
            mates.push((index, expected));
        }
        let mates: Vec<_> = mates
            .into_iter()
            .map(|(index, expected)| {
                tokio::spawn(mate(address, index, expected, Arc::clone(&over)))
            })
            .collect();
        let room = Arc::new(Semaphore::new(AT_ONCE));
        let read = Arc::new(AtomicUsize::new(0));
        let mut clients = Vec::with_capacity(CLIENTS);
        for index in 0..CLIENTS {
            let (leaves, prompt) = draw(&mut random);
            let permit = Arc::clone(&room).acquire_owned().await.unwrap();
            let read = Arc::clone(&read);
            clients.push(tokio::spawn(async move {
                let leaving = client(address, index, leaves, prompt);
                tokio::time::timeout(PATIENCE, leaving).await.unwrap();
                if matches!(leaves, Leaves::Reading { .. }) {
                    read.fetch_add(1, Ordering::Relaxed);
                }
                drop(permit);
            }));
        }
        for client in clients {
            client.await.unwrap();
        }
        over.store(true, Ordering::Relaxed);
        let mut streams = MATES;
        for mate in mates {
            streams += mate.await.unwrap();
        }
        (streams, read.load(Ordering::Relaxed))
    });
    let status = system.await_status("every slot is free", |status| {
        let instances = status["instances"].as_array().unwrap();
        status["queue"]["running"] == 0
            && status["queue"]["waiting"] == 0
            && instances
                .iter()
                .all(|one| one["running"] == 0 && one["live_slots"] == 0)
    });
    let counters = &status["counters"];
    let left = crowd::metric_with(
        &system,
        "dispatcher_requests_cancelled_total",
        "reason=\"client_disconnect\"",
    );
    crowd::figure("clients that left", CLIENTS, "-");
    crowd::figure("of them while they read a stream", read, "-");
    crowd::figure(
        "requests cancelled as client_disconnect",
        left,
        format!(">= {read}"),
    );
    crowd::figure("batch-mates' streams, all of the same text", streams, "-");
    assert_eq!(counters["worker_exits"], 0, "{counters}");
    assert_eq!(counters["failed"], 0, "{counters}");
    assert_eq!(counters["denied"], 0, "{counters}");
    assert_eq!(counters["completed"], streams, "{counters}");
    assert_eq!(counters["cancelled"].as_f64().unwrap(), left, "{counters}");
    let ended = counters["completed"].as_u64().unwrap() + counters["cancelled"].as_u64().unwrap();
    assert_eq!(counters["accepted"], ended, "{counters}");
    assert!(left >= read as f64, "{left} of {read}");
}
