//! The fast reader counts what the careful one counts.

use std::time::Duration;

use crate::support::{Ending, Script, serve};
use bench::endpoint::Endpoint;
use bench::flood::{Flood, Flooded, run};
use bench::workload::Workload;

fn flood(script: Script, readers: u32, requests: u64, threads: u32) -> Flooded {
    let server = serve(script);
    let endpoint = Endpoint::parse(&server.url, None).unwrap();
    let flood = Flood {
        readers,
        requests,
        threads,
        pace: Duration::from_micros(200),
    };
    run(&endpoint, &Workload::study(), flood).unwrap()
}

#[test]
fn every_event_of_every_stream_is_counted() {
    for (readers, threads) in [(1, 1), (16, 1), (7, 3)] {
        let script = Script {
            tokens: 50,
            ..Script::default()
        };
        let found = flood(script, readers, 40, threads);
        assert_eq!(
            (found.requests, found.completed, found.errors),
            (40, 40, 0),
            "{found}"
        );
        // Each token, the usage and [DONE].
        assert_eq!(
            (found.tokens, found.usage_tokens, found.events),
            (2_000, 2_000, 2_080)
        );
        assert!(found.ttft_ms_max >= found.ttft_ms_p50);
    }
}

#[test]
fn streams_that_end_badly_are_errors_and_their_tokens_count() {
    for (ending, tokens, word) in [
        (Ending::NoDone, 8, "without [DONE]"),
        (Ending::CutAfter(3), 3, "ended inside"),
        (Ending::ErrorAfter(3), 3, "error event"),
        (Ending::Status(503), 0, "status 503: {\"error\""),
    ] {
        let script = Script {
            ending,
            ..Script::default()
        };
        let found = flood(script, 2, 6, 1);
        assert_eq!(
            (found.completed, found.errors),
            (0, 6),
            "{ending:?}: {found}"
        );
        assert_eq!(found.tokens, tokens * 6, "{ending:?}");
        assert!(found.messages[0].contains(word), "{found}");
    }
}

#[test]
fn the_reader_itself_costs_less_than_one_and_a_half_microseconds_an_event() {
    let server = serve(Script {
        tokens: 3_000,
        ..Script::default()
    });
    // In a process of its own, or the server's time would be counted with it.
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_dispatcher-bench"))
        .args([
            "flood",
            "--json",
            "--readers",
            "64",
            "--requests",
            "64",
            "--max-tokens",
            "3000",
        ])
        .args(["--url", &server.url])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |name: &str| found[name].as_f64().unwrap();
    assert_eq!(number("tokens"), 64.0 * 3_000.0);
    let cost_us = number("cpu_s") * 1e6 / number("events");
    println!("{cost_us:.3} us an event, {found}");
    assert!(cost_us < 1.5, "{cost_us:.3} us an event, {found}");
}
