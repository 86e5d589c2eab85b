//! A hundred reloads under load: whoever asks meanwhile is answered.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::Signal;

use crate::system::System;
use crate::system::crowd::{self, Ask};

const RELOADS: usize = 100;
const CLIENTS: usize = 6;
const SHORT_TOKENS: u32 = 20;
/// Some 2 s of tokens: far longer than a replaced worker's requests may run.
const LONG_TOKENS: u32 = 1000;

#[derive(Debug, Default)]
struct Count {
    complete: usize,
    resumed: usize,
    /// Ended in one error event; only a stream longer than the drain may.
    cut: usize,
}

/// The same stream again and again, a new connection each.
async fn client(
    address: SocketAddr,
    ask: Ask,
    expected: String,
    may_be_cut: bool,
    over: Arc<AtomicBool>,
) -> Count {
    let mut count = Count::default();
    while !over.load(Ordering::Relaxed) {
        // A refused or reset connection is an error here.
        let reply = crowd::ask(address, &ask).await.unwrap();
        let whole = reply.events();
        assert_eq!(
            whole.status,
            200,
            "{:?}",
            String::from_utf8_lossy(&reply.body)
        );
        if may_be_cut && !whole.errors.is_empty() {
            assert_eq!(whole.errors.len(), 1, "{whole:?}");
            assert!(
                whole.finish_reasons.is_empty() && whole.done == 0,
                "{whole:?}"
            );
            count.cut += 1;
            continue;
        }
        whole.assert_complete();
        assert!(
            whole.text == expected,
            "{} instead of {expected}",
            whole.text
        );
        count.complete += 1;
        let attempts = whole.timings.unwrap()["attempts"].as_u64().unwrap();
        count.resumed += usize::from(attempts > 1);
    }
    count
}

fn generations(status: &serde_json::Value) -> Vec<u64> {
    let instances = status["instances"].as_array().unwrap();
    instances
        .iter()
        .map(|one| one["generation"].as_u64().unwrap())
        .collect()
}

fn reload_under_load(instances: &str) {
    let system = System::scripted(
        "step_us=2000",
        &[
            "--instances",
            instances,
            "--slots",
            "8",
            "--replace-timeout",
            "100ms",
        ],
    );
    let address = system.address.parse().unwrap();
    let (short, long) = crowd::run(async {
        let over = Arc::new(AtomicBool::new(false));
        let mut clients = Vec::new();
        for index in 0..=CLIENTS {
            let is_long = index == CLIENTS;
            let tokens = if is_long { LONG_TOKENS } else { SHORT_TOKENS };
            let ask = Ask::stream(&format!("client {index}"), tokens).keep();
            let expected = crowd::ask(address, &ask).await.unwrap().events();
            let expected = expected.assert_complete().text.clone();
            let over = Arc::clone(&over);
            clients.push(tokio::spawn(client(address, ask, expected, is_long, over)));
        }
        let mut before = generations(&system.status());
        for _ in 0..RELOADS {
            system.signal(Signal::SIGHUP);
            let status = system.await_status("all replaced", |status| {
                let instances = status["instances"].as_array().unwrap();
                instances.iter().all(|one| one["state"] == "ready")
                    && generations(status)
                        .iter()
                        .zip(&before)
                        .all(|(now, then)| now > then)
            });
            before = generations(&status);
        }
        over.store(true, Ordering::Relaxed);
        let mut counts = Vec::new();
        for client in clients {
            counts.push(client.await.unwrap());
        }
        let long = counts.pop().unwrap();
        let short = counts.into_iter().fold(Count::default(), |sum, one| Count {
            complete: sum.complete + one.complete,
            resumed: sum.resumed + one.resumed,
            cut: sum.cut + one.cut,
        });
        (short, long)
    });
    let name = |what: &str| format!("K={instances}, {RELOADS} reloads: {what}");
    crowd::figure(
        &name("short streams begun and completed"),
        short.complete,
        "all",
    );
    crowd::figure(&name("of them resumed"), short.resumed, "-");
    crowd::figure(&name("refused, reset or failed"), short.cut, 0);
    crowd::figure(&name("long streams completed"), long.complete, "-");
    crowd::figure(&name("of them resumed"), long.resumed, "-");
    crowd::figure(
        &name("long streams that ended in one error event"),
        long.cut,
        "-",
    );
    assert!(short.complete >= RELOADS, "{short:?}");
    assert_eq!(short.cut, 0);
    assert!(long.resumed + long.cut > 0, "{long:?}");
    let status = system.await_status("all requests counted", |status| {
        status["queue"]["running"] == 0 && status["queue"]["waiting"] == 0
    });
    let counters = &status["counters"];
    assert_eq!(counters["denied"], 0, "{counters}");
    assert_eq!(
        counters["failed"].as_u64().unwrap(),
        long.cut as u64,
        "{counters}"
    );
}

#[test]
fn a_hundred_reloads_of_one_instance_refuse_nobody() {
    reload_under_load("1");
}

#[test]
fn a_hundred_reloads_of_two_instances_refuse_nobody() {
    reload_under_load("2");
}
