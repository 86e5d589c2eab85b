//! Source guard: nothing under `machine/` names a runtime, a clock, a file, a socket or chance.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic")]

use std::fs;
use std::path::{Path, PathBuf};

/// What the compiler cannot forbid by a path alone.
const FORBIDDEN: [&str; 12] = [
    "tokio",
    "async ",
    ".await",
    "std::fs",
    "std::net",
    "std::io",
    "std::thread",
    "std::process",
    "std::env",
    "rand::",
    "rand_chacha",
    "tracing::",
];

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("its entries can be read").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else {
            found.push(path);
        }
    }
    found
}

#[test]
fn the_machine_names_no_runtime_no_clock_no_file_no_socket_and_no_chance() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/machine");
    let files = sources(&folder);
    assert!(
        files.len() > 10,
        "the machine's sources are where they were"
    );
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for word in FORBIDDEN {
            assert!(!text.contains(word), "{} says {word:?}", file.display());
        }
    }
}

#[test]
fn the_machine_imports_no_other_part_of_the_dispatcher() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/machine");
    for file in sources(&folder) {
        let text = fs::read_to_string(&file).unwrap();
        let foreign = text
            .lines()
            .filter(|line| line.contains("crate::"))
            .find(|line| !line.contains("crate::machine"));
        assert_eq!(foreign, None, "in {}", file.display());
    }
}

#[test]
fn the_machine_denies_what_clippy_can_see() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/machine/mod.rs");
    let text = fs::read_to_string(root).unwrap();
    assert!(text.contains("#![deny(clippy::disallowed_methods, clippy::disallowed_types)]"));
}
