//! Health, readiness, metrics and status answer while a thousand streams run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::system::System;
use crate::system::client::get_blocking;
use crate::system::crowd::{self, Ask, Connection};

const STREAMS: usize = 1000;
const PROBES: usize = 400;
const PROMISE_MS: f64 = 50.0;

#[test]
fn health_ready_metrics_and_status_answer_at_once_while_a_thousand_streams_run() {
    let system = System::scripted("step_us=20000", &["--instances", "4", "--slots", "250"]);
    let address = system.address.parse().unwrap();
    crowd::run(async {
        let over = Arc::new(AtomicBool::new(false));
        let streams: Vec<_> = (0..STREAMS)
            .map(|index| {
                let over = Arc::clone(&over);
                tokio::spawn(async move {
                    let mut connection = Connection::open(address).await.unwrap();
                    let ask = Ask::stream(&format!("stream {index}"), 150);
                    while !over.load(Ordering::Relaxed) {
                        let reply = connection.ask(&ask).await.unwrap();
                        assert_eq!(reply.status, 200, "{reply:?}");
                        assert!(reply.done, "a stream broke off");
                    }
                })
            })
            .collect();
        system.await_status("all of them running", |status| {
            status["queue"]["running"] == STREAMS
        });
        // Each probe is a thread of its own: it must not wait for this crowd's own readers.
        let probes = ["/health", "/ready", "/metrics", "/status"].map(|path| {
            let address = system.address.clone();
            std::thread::spawn(move || {
                let mut took = Vec::with_capacity(PROBES);
                for _ in 0..PROBES {
                    let begun = std::time::Instant::now();
                    let (status, body) = get_blocking(&address, path);
                    took.push(begun.elapsed().as_secs_f64() * 1e3);
                    assert_eq!(status, 200, "{path}: {body}");
                    // A probe's pace, not a flood.
                    std::thread::sleep(Duration::from_millis(10));
                }
                (path, took)
            })
        });
        let bound = PROMISE_MS * crowd::slack();
        let mut late = Vec::new();
        for probe in probes {
            let (path, mut took) = probe.join().unwrap();
            let p99 = crowd::quantile(&mut took, 0.99);
            let name = format!("{path} p99 while {STREAMS} streams run, ms");
            crowd::figure(&name, format!("{p99:.1}"), bound);
            if p99 > bound {
                late.push((path, p99));
            }
        }
        over.store(true, Ordering::Relaxed);
        for stream in streams {
            stream.await.unwrap();
        }
        assert!(late.is_empty(), "{late:?}");
    });
    system.await_status("all streams counted as completed", |status| {
        let counters = &status["counters"];
        status["queue"]["running"] == 0 && counters["completed"] == counters["accepted"]
    });
}
