//! The chaos driver against a fleet of real processes that resumes well, and against fleets that do not.

use std::io::{BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bench::chaos::{Found, Phase, Plan, Verify, run};
use bench::endpoint::Endpoint;
use bench::workload::{OutputLength, Shape, Workload};

use crate::support::request;

/// What happens to a stream whose worker was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnDeath {
    Resume,
    RepeatTwo,
    SkipOne,
    OtherText,
    ErrorEvent,
    Cut,
}

struct Worker {
    child: Child,
    generation: u64,
}

struct Fleet {
    workers: Mutex<Vec<Worker>>,
    on_death: OnDeath,
}

fn start() -> Child {
    Command::new("sleep").arg("600").spawn().unwrap()
}

impl Fleet {
    /// Replaces the dead, as a supervisor does, and returns (generation, pid) of all.
    fn refresh(&self) -> Vec<(u64, u32)> {
        let mut workers = self.workers.lock().unwrap();
        for worker in workers.iter_mut() {
            if worker.child.try_wait().unwrap().is_some() {
                worker.child = start();
                worker.generation += 1;
            }
        }
        workers
            .iter()
            .map(|w| (w.generation, w.child.id()))
            .collect()
    }

    fn status(&self) -> String {
        let instances: Vec<serde_json::Value> = (0..)
            .zip(self.refresh())
            .map(|(instance, (generation, pid))| {
                serde_json::json!({"instance": instance, "generation": generation, "pid": pid, "state": "ready", "running": 1, "slots": 4})
            })
            .collect();
        serde_json::json!({"instances": instances, "queue": {"waiting": 0}, "counters": {"failovers": 3}}).to_string()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for worker in self.workers.get_mut().unwrap() {
            worker.child.kill().unwrap();
            worker.child.wait().unwrap();
        }
    }
}

fn connection(mut stream: &TcpStream, fleet: &Fleet) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let Some((path, body)) = request(&mut reader)? else {
        return Ok(());
    };
    if path == "/status" {
        let text = fleet.status();
        let length = text.len();
        return write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{text}"
        );
    }
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    )?;
    let prompt = body["messages"][0]["content"].as_str().unwrap();
    let tokens = body["max_tokens"].as_u64().unwrap();
    let start: String = prompt.chars().take(8).collect();
    let mine = prompt.len() % 2;
    let (mut generation, mut attempts, mut token) = (fleet.refresh()[mine].0, 1, 0);
    let mut other = "";
    while token < tokens {
        std::thread::sleep(Duration::from_millis(2));
        let now = fleet.refresh()[mine].0;
        if now != generation {
            generation = now;
            attempts += 1;
            // The gap that a real failover has.
            std::thread::sleep(Duration::from_millis(30));
            match fleet.on_death {
                OnDeath::Resume => {}
                OnDeath::RepeatTwo => token = token.saturating_sub(2),
                OnDeath::SkipOne => token = (token + 1).min(tokens - 1),
                OnDeath::OtherText => other = "x",
                OnDeath::ErrorEvent => {
                    return write!(
                        stream,
                        "data: {{\"error\":{{\"message\":\"gone\",\"code\":\"worker_died\"}}}}\n\n"
                    );
                }
                OnDeath::Cut => return Ok(()),
            }
        }
        token += 1;
        let last = token == tokens;
        let end = if last {
            format!(
                ",\"finish_reason\":\"length\"}}],\"timings\":{{\"queue_ms\":1,\"attempts\":{attempts}}}}}"
            )
        } else {
            "}]}".to_owned()
        };
        write!(
            stream,
            "data: {{\"choices\":[{{\"delta\":{{\"content\":\"{other}{start} {token};\"}}{end}\n\n"
        )?;
    }
    write!(stream, "data: [DONE]\n\n")
}

fn chaos(on_death: OnDeath, verify: Verify, seed: u64) -> Found {
    let workers = (0..2).map(|_| Worker {
        child: start(),
        generation: 1,
    });
    let fleet = Arc::new(Fleet {
        workers: Mutex::new(workers.collect()),
        on_death,
    });
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serving = Arc::downgrade(&fleet);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let Some(fleet) = serving.upgrade() else {
                return;
            };
            std::thread::spawn(move || connection(&stream, &fleet).unwrap_or_default());
        }
    });
    let shape = Shape {
        output: OutputLength::Fixed { tokens: 40 },
        ..Shape::study()
    };
    let plan = Plan {
        streams: 6,
        requests: 40,
        kills: 12,
        abort: false,
        verify,
        learn_alone: false,
        seed,
        dispatcher_pid: Some(std::process::id()),
        stop: false,
        silence: Duration::from_secs(20),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let endpoint = Endpoint::parse(&url, None).unwrap();
    let workload = Workload::random(10, (3, 9), shape, seed);
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("chaos.jsonl");
    let found = runtime
        .block_on(run(endpoint, workload, plan, Some(&out)))
        .unwrap();
    let records = bench::report::jsonl::read::<serde_json::Value>(&out)
        .unwrap()
        .records;
    let of = |kind: &str| records.iter().filter(|r| r["record"] == kind).count() as u64;
    assert_eq!(
        (of("sample"), of("kill"), of("found")),
        (found.requests, found.kills, 1)
    );
    found
}

#[test]
fn a_fleet_that_resumes_keeps_every_promise() {
    let found = chaos(OnDeath::Resume, Verify::Exact, 1);
    found.verdict().unwrap();
    assert_eq!((found.kills, found.orphans.len()), (12, 0), "{found}");
    assert_eq!(found.equal, found.completed, "{found}");
    assert!(found.completed >= 40 && found.resumed > 0, "{found}");
    assert!(found.workers_seen >= 12, "{found}");
    let hits: u64 = found.phases.values().map(|tally| tally.hit).sum();
    assert!(hits >= found.resumed, "{found}");
    assert!(found.phases[&Phase::Decoding].hit > 0, "{found}");
    assert!(found.silence_ms_max >= 30.0);
    assert_eq!(found.counters["failovers"], 3);
}

#[test]
fn each_way_to_break_a_stream_is_found_and_named() {
    let seed = 2;
    for (on_death, word) in [
        (OnDeath::RepeatTwo, "tokens duplicated"),
        (OnDeath::SkipOne, "tokens missing"),
        (OnDeath::OtherText, "differing"),
        (OnDeath::ErrorEvent, "failed"),
        (OnDeath::Cut, "lost"),
    ] {
        let found = chaos(on_death, Verify::Exact, seed);
        let verdict = found.verdict().unwrap_err();
        assert!(
            verdict.contains(word),
            "seed {seed}, {on_death:?}: {verdict}\n{found}"
        );
        let listed =
            matches!(on_death, OnDeath::ErrorEvent | OnDeath::Cut) || !found.oddities.is_empty();
        assert!(listed, "{found}");
    }
}

#[test]
fn a_real_models_parting_is_listed_and_no_fault() {
    let found = chaos(OnDeath::OtherText, Verify::NearTie, 3);
    found.verdict().unwrap();
    assert!(found.differing > 0 && !found.oddities.is_empty(), "{found}");
}
