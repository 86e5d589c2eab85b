//! Five times more requests than the queue holds: refused at once, bounded, nothing lost.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::system::System;
use crate::system::client::get_blocking;
use crate::system::crowd::{self, Ask, Connection, Reply};

const OFFERED: usize = 50_000;
const QUEUE: usize = 10_000;
/// Requests under way at a time while most of them are refused.
const AT_ONCE: usize = 32;
/// An answer that takes longer is one from a slot: its client waits on beside the others.
const REFUSED_WITHIN: Duration = Duration::from_millis(20);
const PROMISE_MS: f64 = 5.0;
/// What the dispatcher's memory may grow by while the queue is full.
const GROWTH: f64 = 1.1;

type Answer = JoinHandle<(Option<Connection>, Result<Reply, String>)>;

fn send(mut connection: Connection, ask: Ask) -> Answer {
    tokio::spawn(async move {
        let reply = connection.ask(&ask).await;
        (Some(connection), reply)
    })
}

#[derive(Debug, Default)]
struct Count {
    accepted: usize,
    refused: usize,
}

impl Count {
    fn take(&mut self, reply: &Result<Reply, String>) {
        let reply = reply.as_ref().unwrap();
        match reply.status {
            200 => {
                let body = reply.json();
                assert_eq!(body["choices"][0]["finish_reason"], "length", "{body}");
                self.accepted += 1;
            }
            429 => {
                assert!(reply.retry_after, "{reply:?}");
                self.refused += 1;
            }
            _ => panic!("{reply:?}"),
        }
    }
}

/// Fills the queue, a connection for each request, until the first is refused.
async fn fill(address: SocketAddr, ask: &Ask) -> Vec<Answer> {
    let opening = Arc::new(Semaphore::new(128));
    let refused = Arc::new(AtomicUsize::new(0));
    let mut answers = Vec::new();
    while answers.len() < OFFERED && refused.load(Ordering::Relaxed) == 0 {
        let permit = Arc::clone(&opening).acquire_owned().await.unwrap();
        let (ask, refused) = (ask.clone(), Arc::clone(&refused));
        answers.push(tokio::spawn(async move {
            let connection = Connection::open(address).await;
            drop(permit);
            let mut connection = match connection {
                Ok(connection) => connection,
                Err(words) => return (None, Err(words)),
            };
            let reply = connection.ask(&ask).await;
            if reply.as_ref().is_ok_and(|reply| reply.status == 429) {
                refused.fetch_add(1, Ordering::Relaxed);
            }
            (None, reply)
        }));
    }
    answers
}

/// Offers requests until `left` is used up; returns those that wait for a slot, and the refusals.
async fn press(address: SocketAddr, ask: Ask, left: Arc<AtomicUsize>) -> (Vec<Answer>, Count) {
    let mut waiting = Vec::new();
    let mut count = Count::default();
    let mut idle = None;
    while left
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
            left.checked_sub(1)
        })
        .is_ok()
    {
        let connection = match idle.take() {
            Some(connection) => connection,
            None => Connection::open(address).await.unwrap(),
        };
        let mut answer = send(connection, ask.clone());
        match tokio::time::timeout(REFUSED_WITHIN, &mut answer).await {
            Ok(answer) => {
                let (connection, reply) = answer.unwrap();
                count.take(&reply);
                idle = connection;
            }
            Err(_) => waiting.push(answer),
        }
    }
    (waiting, count)
}

/// Share of refusals within `bound_s`, the least bucket that holds 99 of 100, and their number.
fn refusals(system: &System, bound_s: f64) -> (f64, f64, f64) {
    let (_, text) = get_blocking(&system.address, "/metrics");
    let buckets: Vec<(f64, f64)> = text
        .lines()
        .filter(|line| line.starts_with("dispatcher_refusal_seconds_bucket{"))
        .map(|line| {
            let (series, count) = line.rsplit_once(' ').unwrap();
            let le = series.split("le=\"").nth(1).unwrap();
            let le = le.trim_end_matches("\"}").replace("+Inf", "inf");
            (le.parse().unwrap(), count.parse().unwrap())
        })
        .collect();
    let count = buckets.last().unwrap().1;
    let within = buckets.iter().rfind(|(le, _)| *le <= bound_s).unwrap().1;
    let p99 = buckets
        .iter()
        .find(|(_, below)| *below >= count * 0.99)
        .unwrap()
        .0;
    (within / count, p99, count)
}

#[test]
fn fifty_thousand_requests_to_a_queue_of_ten_thousand_are_served_or_refused_at_once() {
    let queue = QUEUE.to_string();
    let system = System::scripted(
        "step_us=20000",
        &["--instances", "1", "--slots", "64", "--queue", &queue],
    );
    let address = system.address.parse().unwrap();
    let (count, full, peak) = crowd::run(async {
        let ask = Ask::whole("one of many", 4);
        let mut answers = fill(address, &ask).await;
        let offered = answers.len();
        assert!(
            offered > QUEUE,
            "refused after {offered}: {:#}",
            system.status()
        );
        let full = crowd::resident_bytes(system.pid());
        let left = Arc::new(AtomicUsize::new(OFFERED - offered));
        let pressing: Vec<_> = (0..AT_ONCE)
            .map(|_| tokio::spawn(press(address, ask.clone(), Arc::clone(&left))))
            .collect();
        let mut peak = full;
        let mut count = Count::default();
        for one in pressing {
            let (waiting, refused) = one.await.unwrap();
            peak = peak.max(crowd::resident_bytes(system.pid()));
            answers.extend(waiting);
            count.refused += refused.refused;
            count.accepted += refused.accepted;
        }
        for answer in answers {
            count.take(&answer.await.unwrap().1);
        }
        peak = peak.max(crowd::resident_bytes(system.pid()));
        (count, full, peak)
    });
    let bound_s = PROMISE_MS * crowd::slack() / 1e3;
    let (within, p99, timed) = refusals(&system, bound_s);
    crowd::figure("requests accepted", count.accepted, format!("> {QUEUE}"));
    crowd::figure("requests refused", count.refused, "the rest of 50000");
    crowd::figure(
        "refusal p99 in the server, ms, at most",
        p99 * 1e3,
        bound_s * 1e3,
    );
    crowd::figure("share of refusals within the bound", within, 0.99);
    let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
    crowd::figure("resident MiB when the queue was full", mib(full), "-");
    crowd::figure(
        "resident MiB at most after that",
        mib(peak),
        format!("{GROWTH} x"),
    );
    assert_eq!(count.accepted + count.refused, OFFERED, "{count:?}");
    assert!(count.accepted > QUEUE, "{count:?}");
    let status = system.await_status("an empty queue", |status| {
        status["queue"]["running"] == 0 && status["queue"]["waiting"] == 0
    });
    assert_eq!(status["counters"]["accepted"], count.accepted);
    assert_eq!(status["counters"]["completed"], count.accepted);
    assert_eq!(status["counters"]["denied"], count.refused);
    assert_eq!(timed, count.refused as f64);
    assert!(within >= 0.99, "{within} of refusals within {bound_s} s");
    assert!(peak as f64 <= full as f64 * GROWTH, "{full} grew to {peak}");
}
