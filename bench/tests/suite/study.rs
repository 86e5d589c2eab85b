//! The study in one command, its pages, and what becomes of a run that is stopped.

use std::path::Path;
use std::process::{Command, Stdio};

use bench::record::read;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{Script, command, serve};
use crate::verbs::{bench, table};

#[test]
fn the_study_prints_its_three_tables_beside_the_studys_own_and_writes_its_pages() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let text = table(&bench(&[
        "study",
        "--quick",
        "--exec",
        &command(1_000),
        "--out",
        &at("study.jsonl"),
        "--cool-down-s",
        "0",
        "--html",
        &at("study.html"),
        "--svg",
        &at("study.svg"),
        "--png",
        &at("study.png"),
    ]));
    for part in [
        "## study: single (study-v1-quick,",
        "## study: sweep (study-v1-quick,",
        "## study: scale (study-v1-quick,",
        "| llama.cpp | 3×1 | 49.3 | 1.09 |",
        "| server | 3×1 | concurrency 4 | 4/4 |",
        "| server | 1×8 | concurrency 2 | 4/4 |",
        "## study: the verdict",
        "× the memory for",
        "run `--instances",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let runs = read(Path::new(&at("study.jsonl"))).unwrap();
    assert_eq!(runs.len(), 3);
    assert!(runs.iter().all(|run| run.unfinished.is_empty()));
    let page = std::fs::read_to_string(at("study.html")).unwrap();
    assert_eq!(page.matches("<svg").count(), 3);
    assert!(
        page.contains("study: the verdict")
            && page.contains("<table>")
            && page.contains("class=\"verdict\"")
    );
    assert!(
        !page.contains("src=") && !page.contains("href="),
        "needs nothing else"
    );
    let svg = std::fs::read_to_string(at("study.svg")).unwrap();
    assert!(svg.contains("server 1×1") && svg.contains("server 1×8"));
    assert!(
        std::fs::read(at("study.png"))
            .unwrap()
            .starts_with(b"\x89PNG")
    );
    // What is finished is not measured again.
    let before = std::fs::metadata(at("study.jsonl")).unwrap().len();
    table(&bench(&[
        "study",
        "--quick",
        "--exec",
        &command(1_000),
        "--out",
        &at("study.jsonl"),
        "--cool-down-s",
        "0",
        "--resume",
    ]));
    let runs = read(Path::new(&at("study.jsonl"))).unwrap();
    assert_eq!(runs.len(), 3);
    let after = std::fs::metadata(at("study.jsonl")).unwrap().len();
    assert!(after - before < 4_096, "{} bytes more", after - before);
}

#[test]
fn a_run_that_is_interrupted_says_how_to_go_on_and_does() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("sweep.jsonl");
    let server = command(2_000);
    let arguments = [
        "sweep",
        "--exec",
        &server,
        "--out",
        out.to_str().unwrap(),
        "--concurrency",
        "1,2,4,8",
        "--requests",
        "24",
        "--cool-down-s",
        "0",
        "--resume",
    ];
    let mut child = Command::new(env!("CARGO_BIN_EXE_dispatcher-bench"))
        .args(arguments)
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    // The first level is over when its line is written.
    let mut errors = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("concurrency 1:") {
        line.clear();
        assert_ne!(
            std::io::BufRead::read_line(&mut errors, &mut line).unwrap(),
            0
        );
    }
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
    kill(pid, Signal::SIGINT).unwrap();
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut errors, &mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest}");
    assert!(rest.contains("--resume goes on"), "{rest}");

    let first = read(&out).unwrap().remove(0);
    let finished = first.cells.len() - first.unfinished.len();
    assert!((1..4).contains(&finished), "{finished} levels");
    let done = first.cells[0].samples.clone();
    table(&bench(&arguments));
    let mut runs = read(&out).unwrap();
    assert_eq!(runs.len(), 1);
    let run = runs.remove(0);
    assert_eq!((run.cells.len(), run.unfinished.len()), (4, 0));
    assert!(run.cells.iter().all(|cell| cell.samples.len() == 24));
    assert_eq!(run.cells[0].samples, done, "it was measured again");
    // Another question begins a run of its own.
    let other: Vec<&str> = arguments
        .iter()
        .map(|word| if *word == "24" { "5" } else { word })
        .collect();
    table(&bench(&other));
    assert_eq!(read(&out).unwrap().len(), 2);
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_told_and_ends_the_run() {
    let url = serve(Script::default()).url;
    let output = bench(&["sweep", "--url", &url, "--out", "/dev/full"]);
    assert_eq!(output.status.code(), Some(74));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.contains("/dev/full") && error.contains("space"),
        "{error}"
    );
}

#[test]
fn a_trace_is_sent_at_its_moments() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("day.jsonl");
    let out = folder.path().join("out.jsonl");
    let lines: String = (0..12)
        .map(|n| {
            format!(
                "{{\"at_ms\": {}, \"prompt_tokens\": 9, \"max_tokens\": 8}}\n",
                n * 50
            )
        })
        .collect();
    std::fs::write(&trace, lines).unwrap();
    let url = serve(Script::default()).url;
    let text = table(&bench(&[
        "load",
        "--url",
        &url,
        "--trace",
        trace.to_str().unwrap(),
        "--rate",
        "2",
        "--out",
        out.to_str().unwrap(),
    ]));
    assert!(text.contains("| trace × 2 | 12/12 |"), "{text}");
    assert!(text.contains("Workload trace-day"), "{text}");
    let samples = &read(&out).unwrap()[0].cells[0].samples;
    let intended = samples[11].intended_us - samples[0].intended_us;
    assert_eq!(intended, 11 * 25_000);
    let error = bench(&["load", "--url", &url, "--trace", "/no/such"]);
    assert_eq!(error.status.code(), Some(74));
}

#[test]
fn a_ramp_ends_where_the_server_is_saturated() {
    // 8 tokens, 10 ms each, one request at a time: about 12 a second and no more.
    let url = serve(Script {
        gap: std::time::Duration::from_millis(10),
        one_at_a_time: true,
        ..Script::default()
    })
    .url;
    let text = table(&bench(&[
        "load",
        "--url",
        &url,
        "--rate",
        "8",
        "--ramp",
        "--burstiness",
        "0",
        "--requests",
        "40",
    ]));
    assert!(text.contains("▲ saturated"), "{text}");
    let verdict = text
        .lines()
        .find(|line| line.contains("keeps up with"))
        .unwrap();
    assert!(verdict.contains("saturated at"), "{text}");
    let rates = text.lines().filter(|line| line.starts_with("| server"));
    assert!((2..8).contains(&rates.count()), "{text}");
}
