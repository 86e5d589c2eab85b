//! `dispatcher status`: how the running dispatcher stands, in one glance.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::percentile::Histogram;
use super::{VerbError, is_coloured};
use crate::ask;
use crate::crash::{CrashLog, unix_seconds};
use crate::state::State;

/// Between two pictures of `--watch`.
const REFRESH: Duration = Duration::from_secs(1);
/// Events shown.
const EVENTS_SHOWN: usize = 8;
/// What is summed up, and under which name the metrics have it.
const LATENCIES: [(&str, &str); 4] = [
    ("queue", "vllm:request_queue_time_seconds"),
    ("first token", "vllm:time_to_first_token_seconds"),
    ("per token", "vllm:inter_token_latency_seconds"),
    ("whole", "vllm:e2e_request_latency_seconds"),
];
const PERMILLES: [(&str, u64); 3] = [("p50", 500), ("p90", 900), ("p99", 990)];

#[derive(Clone, Copy, Debug, Default, Args)]
pub struct StatusArgs {
    /// Again every second, until Ctrl-C.
    #[arg(long, conflicts_with = "crashes")]
    pub watch: bool,
    /// As JSON.
    #[arg(long)]
    pub json: bool,
    /// The records of workers that died, the newest first; also where no dispatcher runs now.
    #[arg(long)]
    pub crashes: bool,
}

/// Says how the dispatcher of `run_directory` stands.
///
/// # Errors
/// Where none runs there, or it does not answer.
pub fn run(arguments: StatusArgs, run_directory: &Path) -> Result<(), VerbError> {
    let mut out = io::stdout();
    // A reader that went away wants no more.
    let mut say = |text: &str| out.write_all(text.as_bytes()).and_then(|()| out.flush());
    if arguments.crashes {
        let _ = say(&crashes(run_directory, arguments.json)?);
        return Ok(());
    }
    let clear = if io::stdout().is_terminal() && !arguments.json {
        "\x1b[H\x1b[2J"
    } else {
        ""
    };
    loop {
        let picture = picture(run_directory, arguments.json)?;
        if !arguments.watch {
            let _ = say(&picture);
            return Ok(());
        }
        if say(&format!("{clear}{picture}")).is_err() {
            return Ok(());
        }
        std::thread::sleep(REFRESH);
    }
}

fn picture(run_directory: &Path, as_json: bool) -> Result<String, VerbError> {
    let state = ask::running(run_directory)
        .ok_or_else(|| VerbError::NotRunning(run_directory.to_owned()))?;
    let silent = |cause| VerbError::Silent {
        address: state.address.clone(),
        cause,
    };
    let mut status = ask::status(&state.address).map_err(silent)?;
    let metrics = ask::get(&state.address, "/metrics").map_err(silent)?;
    let metrics = String::from_utf8_lossy(&metrics);
    if as_json {
        status["pid"] = json!(state.pid);
        status["address"] = json!(state.address);
        status["latency"] = latency(&metrics);
        return Ok(format!("{status:#}\n"));
    }
    Ok(text(
        &state,
        &status,
        &metrics,
        unix_seconds(),
        is_coloured(),
    ))
}

fn latency(metrics: &str) -> Value {
    let mut all = serde_json::Map::new();
    for (name, metric) in LATENCIES {
        let histogram = Histogram::parse(metrics, metric);
        let mut one = serde_json::Map::new();
        one.insert("count".to_owned(), json!(histogram.count()));
        for (word, permille) in PERMILLES {
            one.insert(format!("{word}_s"), json!(histogram.permille(permille)));
        }
        all.insert(name.replace(' ', "_"), Value::Object(one));
    }
    Value::Object(all)
}

/// The picture as text. Pure: what it shows is what it was given.
fn text(state: &State, status: &Value, metrics: &str, now_unix_s: u64, coloured: bool) -> String {
    let mut out = String::new();
    let uptime_s = status["uptime_us"].as_u64().unwrap_or_default() / 1_000_000;
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "dispatcher {}, {} on http://{}, pid {}, up {}",
        state.version,
        status["served_model"].as_str().unwrap_or_default(),
        state.address,
        state.pid,
        ask::duration(uptime_s)
    );
    let paint = |words: &str, good: bool| match (coloured, good) {
        (false, _) => words.to_owned(),
        (true, true) => format!("\x1b[32m{words}\x1b[0m"),
        (true, false) => format!("\x1b[33m{words}\x1b[0m"),
    };
    match status["not_ready_reason"].as_str() {
        None => out.push_str(&paint("ready", true)),
        Some(reason) => out.push_str(&paint(&format!("not ready: {reason}"), false)),
    }
    out.push_str("\n\n");
    instances(&mut out, status, &paint);
    queue(&mut out, status);
    latencies(&mut out, metrics);
    if let Some(problem) = status["last_reload_error"].as_str() {
        let _ = writeln!(out, "last reload refused: {problem}");
    }
    events(&mut out, status, now_unix_s);
    advice(&mut out, status);
    out
}

/// What would make it faster, one line for each memory that instances read from.
fn advice(out: &mut String, status: &Value) {
    let buses = status["bus"].as_array().map_or(&[][..], Vec::as_slice);
    for bus in buses {
        let words = bus["advice"].as_str().unwrap_or_default();
        if words.is_empty() {
            continue;
        }
        let whose = match bus["device"].as_str() {
            Some(device) if buses.len() > 1 => format!(" ({device})"),
            _ => String::new(),
        };
        let _ = writeln!(out, "\nadvice{whose}: {words}");
    }
}

fn instances(out: &mut String, status: &Value, paint: &dyn Fn(&str, bool) -> String) {
    let none = Vec::new();
    let all = status["instances"].as_array().unwrap_or(&none);
    if all.is_empty() {
        return;
    }
    out.push_str(
        "instance  state        gen  running  batch   tok/s     memory  bus  restarts  crashes  device\n",
    );
    for one in all {
        let number = |key: &str| one[key].as_u64().unwrap_or_default();
        let float = |key: &str| one[key].as_f64().unwrap_or_default();
        let state = one["state"].as_str().unwrap_or("?");
        let progress = number("progress_permille") / 10;
        let shown = match state {
            "loading" | "warming" => format!("{state} {progress}%"),
            _ => state.to_owned(),
        };
        let memory = one["footprint_bytes"].as_u64();
        let memory = memory.map_or("-".to_owned(), bytes);
        let bus = one["bus_usage"].as_f64();
        let bus = bus.map_or("-".to_owned(), |part| format!("{:.0}%", part * 100.0));
        let _ = writeln!(
            out,
            "{:<8}  {}  {:>3}  {:>7}  {:>5.1}  {:>6.1}  {:>9}  {:>3}  {:>8}  {:>7}  {}",
            number("instance"),
            paint(&format!("{shown:<11}"), state == "ready"),
            number("generation"),
            format!("{}/{}", number("running"), number("slots")),
            float("batch_mean"),
            float("tokens_per_s"),
            memory,
            bus,
            number("restarts"),
            number("crashes"),
            one["device"].as_str().unwrap_or("-"),
        );
        if let Some(reason) = one["reason"].as_str() {
            let _ = writeln!(out, "          {reason}");
        }
    }
    out.push('\n');
}

fn queue(out: &mut String, status: &Value) {
    let queue = &status["queue"];
    let number = |key: &str| queue[key].as_u64().unwrap_or_default();
    let oldest = queue["oldest_wait_us"].as_u64();
    let oldest = oldest.map_or(String::new(), |us| {
        format!(", the oldest for {:.1} s", us as f64 / 1e6)
    });
    let _ = writeln!(
        out,
        "queue     {} waiting of {}{oldest}; {} of {}; {} running",
        number("waiting"),
        number("limit"),
        bytes(number("bytes")),
        bytes(number("bytes_limit")),
        number("running")
    );
    let none = Vec::new();
    if number("waiting") > 0 {
        let of = |class: usize| queue["by_priority"][class].as_u64().unwrap_or_default();
        let _ = write!(
            out,
            "          priority high {}, normal {}, low {}",
            of(0),
            of(1),
            of(2)
        );
        for one in queue["keys"].as_array().unwrap_or(&none) {
            let key = one["key"].as_str().unwrap_or_default();
            let key = key.get(..8).unwrap_or(key);
            let _ = write!(
                out,
                "; key {key} {}",
                one["waiting"].as_u64().unwrap_or_default()
            );
        }
        out.push('\n');
    }
    let count = |key: &str| status["counters"][key].as_u64().unwrap_or_default();
    let _ = writeln!(
        out,
        "requests  {} accepted, {} completed, {} failed, {} cancelled, {} refused; {} went on after a worker's death",
        count("accepted"),
        count("completed"),
        count("failed"),
        count("cancelled"),
        count("denied"),
        count("failovers")
    );
}

fn latencies(out: &mut String, metrics: &str) {
    let _ = writeln!(
        out,
        "\nlatency      {:>9}  {:>9}  {:>9}  samples, since the start",
        "p50", "p90", "p99"
    );
    for (name, metric) in LATENCIES {
        let histogram = Histogram::parse(metrics, metric);
        let at = |permille| {
            let value = histogram.permille(permille);
            value.map_or("-".to_owned(), seconds)
        };
        let [p50, p90, p99] = PERMILLES.map(|(_, permille)| at(permille));
        let count = histogram.count();
        let _ = writeln!(out, "{name:<12} {p50:>9}  {p90:>9}  {p99:>9}  {count}");
    }
}

fn events(out: &mut String, status: &Value, now_unix_s: u64) {
    let none = Vec::new();
    let all = status["events"].as_array().unwrap_or(&none);
    if all.is_empty() {
        return;
    }
    out.push_str("\nevents\n");
    for event in all.iter().rev().take(EVENTS_SHOWN) {
        let at = event["at_unix_s"].as_u64().unwrap_or_default();
        let ago = ask::duration(now_unix_s.saturating_sub(at));
        let words = event["words"].as_str().unwrap_or_default();
        let _ = writeln!(out, "  {:>14}  {words}", format!("{ago} ago"));
    }
}

fn crashes(run_directory: &Path, as_json: bool) -> Result<String, VerbError> {
    let folder = run_directory.join("crashes");
    let records = CrashLog::new(folder.clone())
        .read()
        .map_err(|cause| VerbError::File {
            path: folder,
            cause,
        })?;
    if as_json {
        return Ok(format!("{:#}\n", json!(records)));
    }
    if records.is_empty() {
        return Ok("no worker's death is recorded\n".to_owned());
    }
    let mut out = String::new();
    for record in records {
        let _ = writeln!(out, "{}", record.line());
        let lived = ask::duration(record.uptime_ms / 1000);
        let engine = record.engine.as_deref().unwrap_or("unknown engine");
        let _ = writeln!(
            out,
            "  {engine}, generation {}, lived {lived}",
            record.generation
        );
        for line in &record.tail {
            let _ = writeln!(out, "  | {line}");
        }
    }
    Ok(out)
}

fn bytes(bytes: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    UNITS
        .into_iter()
        .find(|(_, size)| bytes >= *size)
        .map_or(format!("{bytes} B"), |(unit, size)| {
            format!("{:.1} {unit}", bytes as f64 / size as f64)
        })
}

fn seconds(value: f64) -> String {
    if value < 1.0 {
        format!("{:.1} ms", value * 1e3)
    } else {
        format!("{value:.2} s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        State {
            pid: 4711,
            address: "127.0.0.1:8080".to_owned(),
            version: "0.1.0".to_owned(),
        }
    }

    fn busy() -> Value {
        json!({
            "served_model": "tiny",
            "ready": true,
            "not_ready_reason": null,
            "uptime_us": 7_500_000_000_u64,
            "instances": [
                {"instance": 0, "generation": 1, "state": "ready", "running": 7, "slots": 8, "device": "CPU",
                 "batch_mean": 6.53, "tokens_per_s": 161.2, "footprint_bytes": 431_000_000, "bus_usage": 0.614,
                 "restarts": 0, "crashes": 0},
                {"instance": 1, "generation": 4, "state": "loading", "progress_permille": 427, "running": 0,
                 "slots": 0, "restarts": 3, "crashes": 2},
                {"instance": 2, "generation": 9, "state": "quarantined", "reason": "6 crashes in 60 s",
                 "running": 0, "slots": 0, "restarts": 8, "crashes": 6}
            ],
            "queue": {"waiting": 3, "running": 7, "limit": 1024, "bytes": 9000, "bytes_limit": 268_435_456,
                      "by_priority": [1, 2, 0], "keys": [{"key": "00aa11bb22cc33dd", "waiting": 3}], "tokens": 900, "tokens_limit": 16_777_216, "oldest_wait_us": 2_100_000},
            "counters": {"accepted": 90, "completed": 78, "failed": 1, "cancelled": 1, "denied": 2, "failovers": 4},
            "last_reload_error": "slots = 0: must be at least 1",
            "events": [
                {"at_unix_s": 100, "words": "instance 0 is ready"},
                {"at_unix_s": 950, "words": "worker of instance 1 died: signal 6"}
            ],
            "bus": [{"device": "CPU", "advice": "bus 61 % busy at batch 6.5: batch 8 would add ~12 %"}]
        })
    }

    const METRICS: &str = "vllm:time_to_first_token_seconds_bucket{model_name=\"tiny\",le=\"0.1\"} 50\n\
        vllm:time_to_first_token_seconds_bucket{model_name=\"tiny\",le=\"2.5\"} 100\n\
        vllm:time_to_first_token_seconds_bucket{model_name=\"tiny\",le=\"+Inf\"} 100\n";

    #[test]
    fn a_busy_dispatcher_reads_as_its_snapshot() {
        insta::assert_snapshot!(text(&state(), &busy(), METRICS, 1000, false));
    }

    #[test]
    fn colour_is_only_where_it_is_wanted() {
        assert!(!text(&state(), &busy(), METRICS, 1000, false).contains('\x1b'));
        assert!(text(&state(), &busy(), METRICS, 1000, true).contains("\x1b[32mready"));
    }

    #[test]
    fn what_is_missing_is_left_out_and_nothing_fails() {
        let parked =
            json!({"uptime_us": 1, "not_ready_reason": "parked: no model", "instances": []});
        insta::assert_snapshot!(text(&state(), &parked, "", 0, false));
    }
}
