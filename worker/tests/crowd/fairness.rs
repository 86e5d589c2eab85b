//! One key floods; the others do not notice.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::system::System;
use crate::system::crowd::{self, Ask, Connection};

const POLITE: usize = 20;
const EACH: usize = 4;
const FLOOD: usize = 200;
/// How long each phase is watched.
const WATCHED: Duration = Duration::from_secs(8);
/// The flooder does not wait as long as it was told to.
const IMPATIENCE: Duration = Duration::from_millis(50);

/// One answered request.
#[derive(Clone, Copy, Debug)]
struct Served {
    key: usize,
    wait_ms: f64,
    service_ms: f64,
    tokens: f64,
}

/// Every polite key keeps its requests under way for the watched time; all are answered, none refused.
async fn polite(address: SocketAddr) -> Vec<Served> {
    let until = Instant::now() + WATCHED;
    let loops: Vec<_> = (0..POLITE * EACH)
        .map(|index| {
            let key = index / EACH;
            // Half of them ask for little at a time, half for much.
            let ask = Ask::whole(
                &format!("polite {index}"),
                if key.is_multiple_of(2) { 16 } else { 48 },
            )
            .key(&format!("polite-{key}"));
            tokio::spawn(async move {
                let mut connection = Connection::open(address).await.unwrap();
                let mut served = Vec::new();
                while Instant::now() < until {
                    let reply = connection.ask(&ask).await.unwrap();
                    assert_eq!(reply.status, 200, "a polite key was refused: {reply:?}");
                    let body = reply.json();
                    let number = |value: &serde_json::Value| value.as_f64().unwrap();
                    let wait_ms = number(&body["timings"]["queue_ms"]);
                    served.push(Served {
                        key,
                        wait_ms,
                        service_ms: number(&body["timings"]["total_ms"]) - wait_ms,
                        tokens: number(&body["usage"]["total_tokens"]),
                    });
                }
                served
            })
        })
        .collect();
    let mut all = Vec::new();
    for one in loops {
        all.extend(one.await.unwrap());
    }
    all
}

/// Floods until told to stop; returns how many were served and refused.
async fn flood(address: SocketAddr, over: Arc<AtomicBool>) -> (usize, usize) {
    let loops: Vec<_> = (0..FLOOD)
        .map(|index| {
            let over = Arc::clone(&over);
            let ask = Ask::whole(&format!("flood {index}"), 48).key("flood");
            tokio::spawn(async move {
                let mut connection = Connection::open(address).await.unwrap();
                let (mut served, mut refused) = (0, 0);
                while !over.load(Ordering::Relaxed) {
                    match connection.ask(&ask).await.unwrap().status {
                        200 => served += 1,
                        429 => {
                            refused += 1;
                            tokio::time::sleep(IMPATIENCE).await;
                        }
                        status => panic!("the flood got {status}"),
                    }
                }
                (served, refused)
            })
        })
        .collect();
    let mut sum = (0, 0);
    for one in loops {
        let (served, refused) = one.await.unwrap();
        sum = (sum.0 + served, sum.1 + refused);
    }
    sum
}

fn p99(served: &[Served], of: impl Fn(&Served) -> f64) -> f64 {
    let mut values: Vec<f64> = served.iter().map(of).collect();
    crowd::quantile(&mut values, 0.99)
}

/// Jain's index of the tokens that the keys were served: 1 where all had the same.
fn jain(served: &[Served]) -> f64 {
    let mut tokens = [0.0; POLITE];
    for one in served {
        tokens[one.key] += one.tokens;
    }
    let sum: f64 = tokens.iter().sum();
    let squares: f64 = tokens.iter().map(|tokens| tokens * tokens).sum();
    sum * sum / (POLITE as f64 * squares)
}

struct Run {
    alone: Vec<Served>,
    flooded: Vec<Served>,
    flood: (usize, usize),
}

/// The polite keys alone, then beside the flood.
fn run(slots: &str, queue: &str) -> Run {
    let system = System::scripted(
        "step_us=2000",
        &["--instances", "1", "--slots", slots, "--queue", queue],
    );
    let address = system.address.parse().unwrap();
    crowd::run(async {
        let alone = polite(address).await;
        let over = Arc::new(AtomicBool::new(false));
        // The polite are there before the flood: a key that is alone may fill the whole queue, and
        // what is in it is not thrown out for those who come later.
        let watched = tokio::spawn(polite(address));
        system.await_status("all of the polite ask", |status| {
            let queue = &status["queue"];
            let asked = queue["waiting"].as_u64().zip(queue["running"].as_u64());
            asked.is_some_and(|(waiting, running)| waiting + running >= (POLITE * EACH / 2) as u64)
        });
        let flooding = tokio::spawn(flood(address, Arc::clone(&over)));
        let flooded = watched.await.unwrap();
        over.store(true, Ordering::Relaxed);
        let flood = flooding.await.unwrap();
        Run {
            alone,
            flooded,
            flood,
        }
    })
}

fn assert_wait(name: &str, run: &Run, factor: f64) {
    let service = p99(&run.alone, |one| one.service_ms);
    let before = p99(&run.alone, |one| one.wait_ms);
    let after = p99(&run.flooded, |one| one.wait_ms);
    let bound = factor * before + crowd::slack() * service;
    crowd::figure(
        &format!("{name}: polite p99 service alone, ms"),
        format!("{service:.1}"),
        "-",
    );
    crowd::figure(
        &format!("{name}: polite p99 wait alone, ms"),
        format!("{before:.1}"),
        "-",
    );
    crowd::figure(
        &format!("{name}: polite p99 wait beside the flood, ms"),
        format!("{after:.1}"),
        format!("{bound:.1}"),
    );
    crowd::figure(
        &format!("{name}: polite requests beside the flood"),
        run.flooded.len(),
        "-",
    );
    crowd::figure(
        &format!("{name}: flood served, refused"),
        format!("{:?}", run.flood),
        "-",
    );
    assert!(after <= bound, "{after} ms > {bound} ms");
}

#[test]
fn a_flood_beside_polite_keys_that_fill_the_slots_costs_them_a_fifth_of_their_wait_at_most() {
    let run = run("16", "256");
    let (alone, flooded) = (jain(&run.alone), jain(&run.flooded));
    crowd::figure("saturated: Jain's index alone", format!("{alone:.4}"), "-");
    crowd::figure(
        "saturated: Jain's index beside the flood",
        format!("{flooded:.4}"),
        0.95,
    );
    assert_wait("saturated", &run, 1.2);
    assert!(
        run.flood.1 > 0,
        "the flood never met the bound: {:?}",
        run.flood
    );
    assert!(flooded >= 0.95, "{flooded}");
}

#[test]
fn a_flood_beside_polite_keys_that_leave_slots_free_costs_them_one_service_at_most() {
    let run = run("128", "256");
    assert_wait("unsaturated", &run, 1.0);
}
