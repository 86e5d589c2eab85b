//! What the client measures against a server whose times are known, and what it makes of servers that misbehave.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{Ending, Script, Served, serve};
use bench::arrival::Arrival;
use bench::client::{Client, Patience};
use bench::clock::Clock;
use bench::endpoint::Endpoint;
use bench::load::{Plan, drive};
use bench::sample::{CountedBy, Outcome, Sample};
use bench::statistics::{interpolated, median, weighted};
use bench::workload::Workload;

fn measure(url: &str, arrival: Arrival, requests: u64) -> Vec<Sample> {
    let endpoint = Endpoint::parse(url, None).unwrap();
    let patience = Patience {
        idle: Duration::from_secs(5),
        ..Patience::default()
    };
    let client = Arc::new(Client::new(endpoint, patience, true));
    let workload = Arc::new(Workload::study());
    let plan = Plan {
        arrival,
        requests,
        seed: 3,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let mut told = 0;
    let samples = runtime
        .block_on(drive(&client, &workload, plan, Clock::start(), |_| {
            told += 1
        }))
        .unwrap();
    assert_eq!(told, samples.len());
    assert_eq!(samples.len() as u64, requests);
    samples
}

const ONE: Arrival = Arrival::Closed { concurrency: 1 };

fn near(measured_ms: f64, true_ms: f64) -> bool {
    (measured_ms - true_ms).abs() <= f64::max(1.0, true_ms * 0.01)
}

#[test]
fn known_latencies_are_measured_within_a_millisecond_or_a_hundredth() {
    let server = serve(Script {
        first: Duration::from_millis(40),
        gap: Duration::from_millis(7),
        tokens: 20,
        ..Script::default()
    });
    let samples = measure(&server.url, ONE, 15);
    let served = server.served.lock().unwrap();
    let ms = |from: std::time::Instant, to: std::time::Instant| (to - from).as_secs_f64() * 1e3;
    let gaps = |tokens: &[std::time::Instant]| -> Vec<f64> {
        tokens.windows(2).map(|two| ms(two[0], two[1])).collect()
    };
    let true_gap = |served: &Served| median(&gaps(&served.tokens)).unwrap();
    let found_gap = |sample: &Sample| {
        let gaps: Vec<(f64, f64)> = sample.weighted_gaps().collect();
        weighted(&gaps, 0.5)
    };
    let largest = |gaps: &[f64]| gaps.iter().copied().fold(0.0, f64::max);
    let found_stall = |sample: &Sample| {
        let gaps: Vec<f64> = sample.weighted_gaps().map(|(gap, _)| gap).collect();
        Some(largest(&gaps))
    };
    let agree =
        |what: &str, found: &dyn Fn(&Sample) -> Option<f64>, truth: &dyn Fn(&Served) -> f64| {
            let mut off: Vec<(bool, f64, f64)> = samples
                .iter()
                .zip(served.iter())
                .map(|(sample, served)| {
                    let (found, truth) = (found(sample).unwrap(), truth(served));
                    (near(found, truth), found, truth)
                })
                .collect();
            off.retain(|(near, ..)| !near);
            // What the client gets wrong it gets wrong in every request; what a busy machine's scheduler takes, it
            // takes from some.
            assert!(off.len() < samples.len() * 2 / 3, "{what}: {off:?}");
        };
    agree("TTFT", &Sample::ttft_ms, &|s| ms(s.received, s.tokens[0]));
    agree("TPOT", &Sample::tpot_ms, &|s| {
        ms(s.tokens[0], s.tokens[19]) / 19.0
    });
    agree("total", &|sample| Some(sample.total_ms()), &|s| {
        ms(s.received, s.tokens[19])
    });
    agree("gap", &found_gap, &true_gap);
    agree("stall", &found_stall, &|s| largest(&gaps(&s.tokens)));
    for sample in &samples {
        assert_eq!(sample.outcome, Outcome::Done);
        assert_eq!(
            (sample.output_tokens, sample.counted_by),
            (20, CountedBy::Usage)
        );
        assert_eq!(sample.finish_reason.as_deref(), Some("stop"));
        assert_eq!(sample.timings.as_ref().unwrap().attempts, Some(1));
    }
    // Twelve prompts in turn: the thirteenth answer is the first again.
    assert_eq!(samples[12].text_hash, samples[0].text_hash);
    assert_ne!(samples[1].text_hash, samples[0].text_hash);
}

#[test]
fn a_stall_of_200_ms_shows_in_the_open_loops_p99_for_every_request_that_it_held_up() {
    let server = serve(Script {
        tokens: 1,
        stall: Some((100, Duration::from_millis(200))),
        ..Script::default()
    });
    let samples = measure(&server.url, Arrival::Constant { per_s: 200.0 }, 400);
    let ttft: Vec<f64> = samples.iter().filter_map(Sample::ttft_ms).collect();
    let p99 = interpolated(&ttft, 0.99).unwrap();
    assert!(p99 >= 170.0, "p99 {p99} ms");
    // 200 ms at 200 a second: 40 requests came meanwhile, and half of them waited 100 ms or more.
    let held = ttft.iter().filter(|ms| **ms >= 100.0).count();
    assert!(held >= 15, "{held} held up");
}

#[test]
fn a_closed_loop_hides_the_same_stall_in_a_single_request() {
    let server = serve(Script {
        tokens: 1,
        stall: Some((100, Duration::from_millis(200))),
        ..Script::default()
    });
    let samples = measure(&server.url, ONE, 400);
    let ttft: Vec<f64> = samples.iter().filter_map(Sample::ttft_ms).collect();
    let held = ttft.iter().filter(|ms| **ms >= 100.0).count();
    // One; a busy machine may add a stall or two of its own.
    assert!((1..=4).contains(&held), "{held} held up");
}

#[test]
fn a_late_request_says_so_and_its_latency_counts_from_the_intended_start() {
    let server = serve(Script::default());
    let samples = measure(&server.url, Arrival::Poisson { per_s: 5_000.0 }, 2_000);
    for sample in &samples {
        assert!(sample.sent_us >= sample.intended_us);
        assert!(sample.ttft_ms().unwrap() >= sample.late_ms());
    }
    let intended: Vec<u64> = samples.iter().map(|sample| sample.intended_us).collect();
    assert!(intended.is_sorted());
    // 2,000 at 5,000 a second are meant to take 0.4 s, whatever the server makes of them.
    let span_s = (intended[1_999] - intended[0]) as f64 / 1e6;
    assert!((0.36..0.44).contains(&span_s), "{span_s}");
}

#[test]
fn a_cut_stream_keeps_what_was_measured_before_the_cut() {
    let server = serve(Script {
        ending: Ending::CutAfter(5),
        gap: Duration::from_millis(1),
        ..Script::default()
    });
    for sample in measure(&server.url, Arrival::Closed { concurrency: 3 }, 9) {
        let Outcome::Truncated { message } = &sample.outcome else {
            panic!("{:?}", sample.outcome)
        };
        assert!(message.contains("connection lost"), "{message}");
        assert_eq!((sample.events, sample.gaps_us.len()), (5, 4));
        assert!(sample.ttft_ms().is_some());
    }
}

#[test]
fn each_bad_ending_has_its_outcome() {
    let ask = |ending, usage| {
        let server = serve(Script {
            ending,
            usage,
            ..Script::default()
        });
        measure(&server.url, ONE, 2).remove(1)
    };
    let no_done = ask(Ending::NoDone, true);
    assert!(
        matches!(&no_done.outcome, Outcome::Truncated { message } if message.contains("without [DONE]"))
    );
    assert_eq!(no_done.output_tokens, 8);

    let failed = ask(Ending::ErrorAfter(3), true);
    assert_eq!(failed.outcome.reason(), "worker_died: it died");
    assert_eq!((failed.outcome.word(), failed.events), ("failed", 3));

    let refused = ask(Ending::Status(429), true);
    let Outcome::Refused {
        status: 429,
        retry_after_s: Some(3),
        message,
    } = &refused.outcome
    else {
        panic!("{:?}", refused.outcome)
    };
    assert_eq!(message, "queue_full: the queue is full");
    assert_eq!(ask(Ending::Status(500), true).outcome.word(), "failed");
    assert_eq!(ask(Ending::Garbage, true).outcome.word(), "malformed");

    let no_usage = ask(Ending::Done, false);
    assert_eq!(no_usage.outcome, Outcome::Done);
    assert_eq!(
        (no_usage.output_tokens, no_usage.counted_by),
        (8, CountedBy::Events)
    );
}

#[test]
fn an_address_where_nobody_listens_is_told_for_each_request() {
    // Bound and dropped: nobody is there, and nobody else will soon be.
    let address = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    for sample in measure(&format!("http://{address}"), ONE, 3) {
        assert!(
            matches!(&sample.outcome, Outcome::Unreachable { message } if message.contains("refused")),
            "{:?}",
            sample.outcome
        );
    }
}

#[test]
fn a_silent_server_is_given_up_after_the_patience() {
    let server = serve(Script {
        first: Duration::from_secs(60),
        ..Script::default()
    });
    let endpoint = Endpoint::parse(&server.url, None).unwrap();
    let patience = Patience {
        idle: Duration::from_millis(50),
        ..Patience::default()
    };
    let client = Client::new(endpoint, patience, false);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let ask = Workload::study().ask(0, true);
    let sample = runtime.block_on(client.ask(&ask, Clock::start(), 0, |_| {}));
    assert_eq!(sample.outcome, Outcome::TimedOut { waited_ms: 50 });
}
