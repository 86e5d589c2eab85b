//! The list of faults in docs/TESTING.md names tests that exist.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|suffix| suffix == "rs") {
            found.push(path);
        }
    }
}

/// Names of functions that a test attribute, or the contract's table, stands before.
fn tests() -> HashSet<String> {
    let mut files = Vec::new();
    for folder in [
        "dispatcher/src",
        "dispatcher/tests",
        "worker/src",
        "worker/tests",
    ] {
        sources(&root().join(folder), &mut files);
    }
    let mut names = HashSet::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let mut marked = false;
        for line in text.lines().map(str::trim) {
            if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
                marked = true;
            } else if let Some(rest) = line
                .strip_prefix("fn ")
                .or_else(|| line.strip_prefix("async fn "))
            {
                if std::mem::take(&mut marked) {
                    names.extend(rest.split(['(', '<']).next().map(str::to_owned));
                }
            }
        }
    }
    names
}

#[test]
fn every_test_that_the_list_of_faults_names_exists() {
    let page = std::fs::read_to_string(root().join("docs/TESTING.md")).unwrap();
    let list = page
        .split_once("## Faults and the tests that hold them")
        .unwrap()
        .1;
    let tests = tests();
    let mut named = 0;
    for quoted in list.split('`').skip(1).step_by(2) {
        let Some((_, name)) = quoted
            .split_once(": ")
            .filter(|(kind, _)| ["w", "d", "m", "u"].contains(kind))
        else {
            continue;
        };
        assert!(tests.contains(name), "no test is called {name}");
        named += 1;
    }
    assert!(named > 80, "{named} names were read");
    let rows = list.lines().filter(|line| line.starts_with("| "));
    for row in rows.filter(|row| *row != "| fault | test |") {
        assert!(
            row.contains("`w: ")
                || row.contains("`d: ")
                || row.contains("`m: ")
                || row.contains("`u: "),
            "{row}"
        );
    }
}
