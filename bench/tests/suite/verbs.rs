//! The command line, from arguments to tables and result files.

use std::path::Path;
use std::process::{Command, Output};

use bench::record::{Recorded, read};

use crate::support::{Ending, Script, command, serve};

pub(crate) fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dispatcher-bench"))
        .args(arguments)
        .output()
        .unwrap()
}

pub(crate) fn table(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn only(path: &Path) -> Recorded {
    let mut runs = read(path).unwrap();
    assert_eq!(runs.len(), 1);
    runs.remove(0)
}

#[test]
fn a_single_run_of_a_started_server_has_cold_and_warm_rows_and_its_file_reports_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("single.jsonl");
    let path = out.to_str().unwrap();
    let text = table(&bench(&["single", "--exec", &command(500), "--out", path]));
    let row = |state: &str, done: &str| {
        text.lines()
            .any(|line| line.starts_with(&format!("| server | {state} | {done} |")))
    };
    assert!(row("cold", "1/1") && row("warm", "20/20"), "{text}");
    assert!(text.contains("† n too small"), "{text}");
    let recorded = only(&out);
    assert_eq!(recorded.run.contract.rules, "study-v1");
    assert_eq!(recorded.cells.len(), 2);
    assert_eq!(table(&bench(&["report", path])), text);
}

#[test]
fn scale_starts_a_server_for_each_size_and_draws_a_plot() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("scale.jsonl");
    let svg = folder.path().join("scale.svg");
    let path = out.to_str().unwrap();
    let text = table(&bench(&[
        "scale",
        "--exec",
        &command(500),
        "--out",
        path,
        "--rules",
        "v2",
        "--repeats",
        "2",
        "--instances",
        "1,2",
        "--slots",
        "3",
        "--requests",
        "12",
        "--cool-down-s",
        "0",
    ]));
    for size in ["1×3", "2×3"] {
        assert!(
            text.contains(&format!("| server | {size} | concurrency 16 | 24/24 |")),
            "{text}"
        );
    }
    table(&bench(&["report", path, "--svg", svg.to_str().unwrap()]));
    let drawn = std::fs::read_to_string(svg).unwrap();
    assert_eq!(drawn.matches("<circle").count(), 4);
}

#[test]
fn a_comparison_finds_the_slower_arm_and_refuses_another_contract() {
    let folder = tempfile::tempdir().unwrap();
    let (fast, slow) = (
        format!("fast={}", command(1_000)),
        format!("slow={}", command(4_000)),
    );
    let text = table(&bench(&[
        "compare",
        "--arm",
        &fast,
        "--arm",
        &slow,
        "--concurrency",
        "2",
        "--requests",
        "8",
        "--cool-down-s",
        "0",
    ]));
    let line = text
        .lines()
        .find(|line| line.starts_with("| aggregate tok/s"))
        .unwrap();
    assert!(line.ends_with("| worse |"), "{text}");

    let url = serve(Script::default()).url;
    let file = |name: &str, requests: &str| {
        let path = folder.path().join(name).to_str().unwrap().to_owned();
        table(&bench(&[
            "sweep",
            "--url",
            &url,
            "--concurrency",
            "2",
            "--requests",
            requests,
            "--out",
            &path,
            "--repeats",
            "5",
            "--cool-down-s",
            "0",
        ]));
        path
    };
    let (a, b, c) = (file("a", "8"), file("b", "8"), file("c", "9"));
    assert!(table(&bench(&["compare", "--files", &a, &b])).contains("a | b | b / a"));
    let refused = bench(&["compare", "--files", &a, &c]);
    assert_eq!(refused.status.code(), Some(64));
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(error.contains("requests: 8 and 9"), "{error}");
}

#[test]
fn an_open_loop_says_what_was_good_and_which_percentile_has_too_few_samples() {
    let url = serve(Script::default()).url;
    let text = table(&bench(&[
        "load",
        "--url",
        &url,
        "--rate",
        "200,400",
        "--requests",
        "70",
        "--slo-ttft-ms",
        "1500",
    ]));
    assert!(text.contains("| 200/s Poisson | 70/70 |"), "{text}");
    assert!(text.contains("| 100.0 % |"), "{text}");
    // Of the steady part, which is some fewer than 70.
    let too_few = |line: &str| line.contains("| n too small (") && line.contains(" < 662)");
    assert!(text.lines().any(too_few), "{text}");
}

#[test]
fn a_server_that_dies_in_mid_run_leaves_what_was_measured() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("died.jsonl");
    // The shell ends the server after a second, in the middle of the second level or so.
    let dying = format!("sh -c \"{} & sleep 1; kill $!; wait\"", command(3_000));
    let output = bench(&[
        "sweep",
        "--exec",
        &dying,
        "--out",
        out.to_str().unwrap(),
        "--concurrency",
        "1,1,2",
        "--requests",
        "30",
        "--cool-down-s",
        "0",
    ]);
    let recorded = only(&out);
    let samples: Vec<_> = recorded
        .cells
        .iter()
        .flat_map(|cell| &cell.samples)
        .collect();
    let done = samples
        .iter()
        .filter(|sample| sample.outcome.is_done())
        .count();
    assert!(
        done > 0 && done < samples.len() || !recorded.failures.is_empty(),
        "{recorded:?}"
    );
    let text = table(&output);
    assert!(
        ["unreachable", "truncated", "not measured"]
            .iter()
            .any(|word| text.contains(word)),
        "{text}"
    );
}

#[test]
fn nothing_to_measure_is_an_error_that_says_why() {
    let fails = |arguments: &[&str], code: i32, words: &str| {
        let output = bench(arguments);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(error.contains(words), "{error}");
    };
    let refusing = serve(Script {
        ending: Ending::Status(429),
        ..Script::default()
    });
    fails(&["sweep", "--url", &refusing.url], 69, "queue_full");
    let address = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let nobody = format!("http://{address}");
    fails(&["single", "--url", &nobody], 69, "refused");
    fails(
        &["flood", "--url", &nobody, "--requests", "2"],
        69,
        "refused",
    );
    fails(
        &["chaos", "--url", &nobody, "--requests", "2"],
        69,
        "refused",
    );
    fails(&["single", "--url", "https://x"], 64, "TLS");
    fails(&["single", "--exec", "x"], 64, "{port}");
    fails(&["single", "--extra", "["], 64, "--extra");
    fails(&["compare", "--arm", "a=http://x"], 64, "--arm twice");
    fails(&["load", "--rate", "0"], 64, "never sends");
    fails(&["report", "/no/such/file"], 74, "/no/such/file");
}

#[test]
fn the_bus_has_a_figure_for_each_number_of_threads_and_of_processes() {
    let text = table(&bench(&[
        "bus",
        "--mib",
        "8",
        "--passes",
        "2",
        "--threads",
        "1,2",
        "--processes",
        "1,3",
    ]));
    assert_eq!(text.matches("read_gb_per_s best=").count(), 4, "{text}");
    assert!(text.contains("processes=3 threads=3 bytes="), "{text}");
}
