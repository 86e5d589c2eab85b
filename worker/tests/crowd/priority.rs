//! Priority classes, and what waiting does to them.

use serde_json::json;

use crate::system::System;
use crate::system::client::{self, Events, chat};

/// Holds the only slot until it is dropped.
fn hold(system: &System) -> Events {
    let mut holder = Events::open(&system.address, "/v1/chat/completions", &chat("hold", 4000));
    holder.next_text();
    holder
}

/// Has each of `classes` wait in this order, lets them go with `release`, and returns the order of
/// their service.
fn order(
    system: &System,
    classes: &[&'static str],
    between: impl Fn(&System),
) -> Vec<&'static str> {
    let holder = hold(system);
    let mut served: Vec<(f64, &'static str)> = std::thread::scope(|scope| {
        let mut asked = Vec::new();
        for (index, class) in classes.iter().copied().enumerate() {
            if index > 0 {
                between(system);
            }
            let begun = std::time::Instant::now();
            let address = &system.address;
            asked.push((
                begun,
                class,
                scope.spawn(move || {
                    let body = json!({
                        // Token ids: nothing is left to be counted, so that it can be chosen at once.
                        "prompt": [3, 5, 7],
                        "max_tokens": 20,
                        "priority": class,
                    });
                    client::post(address, "/v1/completions", &body)
                }),
            ));
            system.await_status("one more waits", |status| {
                status["queue"]["waiting"] == index + 1
            });
        }
        drop(holder);
        let first = asked[0].0;
        asked
            .into_iter()
            .map(|(begun, class, answer)| {
                let answer = answer.join().unwrap();
                assert_eq!(answer.status, 200, "{answer:?}");
                let wait_ms = answer.body["timings"]["queue_ms"].as_f64().unwrap();
                let asked_ms = begun.duration_since(first).as_secs_f64() * 1e3;
                (asked_ms + wait_ms, class)
            })
            .collect()
    });
    served.sort_by(|a, b| a.0.total_cmp(&b.0));
    served.into_iter().map(|(_, class)| class).collect()
}

#[test]
fn classes_are_served_from_high_to_low() {
    let system = System::scripted("step_us=5000", &["--instances", "1", "--slots", "1"]);
    let order = order(&system, &["low", "normal", "high"], |_| {});
    assert_eq!(order, ["high", "normal", "low"]);
}

#[test]
fn a_request_that_waited_long_is_served_before_a_higher_class_that_came_later() {
    let system = System::scripted(
        "step_us=5000",
        &[
            "--instances",
            "1",
            "--slots",
            "1",
            "--priority-aging",
            "300ms",
        ],
    );
    let order = order(&system, &["low", "high"], |system| {
        system.await_status("the first waited for two classes", |status| {
            status["queue"]["oldest_wait_us"].as_u64() > Some(650_000)
        });
    });
    assert_eq!(order, ["low", "high"]);
}
