//! Every message's bytes against committed files, so that a change of the wire is a visible diff.
//!
//! `GOLDEN_WRITE=1` rewrites the files. A diff there is a change of protocol: raise
//! `PROTOCOL_VERSION`.

#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

mod example;

use std::collections::BTreeSet;
use std::path::PathBuf;

use proto::codec::Message;
use proto::frame::PREFIX_BYTES;
use proto::{PROTOCOL_VERSION, ToDispatcher, ToWorker, decode, encode};
use serde::Serialize;

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(format!("{name}.bin"))
}

fn check<M>(direction: &str, examples: Vec<(&str, M)>)
where
    M: Message + Serialize + PartialEq + std::fmt::Debug,
{
    for (name, message) in examples {
        let name = format!("{direction}.{name}");
        let frame = encode(&message).unwrap();
        let (prefix, bytes) = frame.split_at(PREFIX_BYTES);
        assert_eq!(
            prefix,
            u32::try_from(bytes.len()).unwrap().to_le_bytes(),
            "{name}"
        );
        if std::env::var_os("GOLDEN_WRITE").is_some() {
            std::fs::write(path(&name), bytes).unwrap();
        }
        let golden = std::fs::read(path(&name))
            .unwrap_or_else(|error| panic!("{name}: {error}; GOLDEN_WRITE=1 writes it"));
        assert!(
            golden == bytes,
            "{name} has other bytes than version {PROTOCOL_VERSION} was released with"
        );
        assert_eq!(
            bincode::serialize(&message).unwrap(),
            bytes,
            "{name} is not bincode's encoding"
        );
        assert_eq!(decode::<M>(&golden).unwrap(), message, "{name}");
    }
}

#[test]
fn what_a_worker_hears_has_its_golden_bytes() {
    check("to_worker", example::to_worker());
}

#[test]
fn what_a_worker_says_has_its_golden_bytes() {
    check("to_dispatcher", example::to_dispatcher());
}

/// Without a wildcard: a new variant does not compile until it is named here, and then fails below
/// until it has an example.
fn variant_to_worker(message: &ToWorker) -> usize {
    match message {
        ToWorker::Hello { .. } => 0,
        ToWorker::Refused { .. } => 1,
        ToWorker::Tokenise { .. } => 2,
        ToWorker::Generate(_) => 3,
        ToWorker::Cancel { .. } => 4,
        ToWorker::Drain => 5,
    }
}

fn variant_to_dispatcher(message: &ToDispatcher) -> usize {
    match message {
        ToDispatcher::Hello(_) => 0,
        ToDispatcher::Loading { .. } => 1,
        ToDispatcher::Warming { .. } => 2,
        ToDispatcher::Ready(_) => 3,
        ToDispatcher::Tokenised { .. } => 4,
        ToDispatcher::Started { .. } => 5,
        ToDispatcher::Tokens(_) => 6,
        ToDispatcher::Failed { .. } => 7,
        ToDispatcher::Progress(_) => 8,
        ToDispatcher::Drained => 9,
    }
}

#[test]
fn every_variant_has_an_example_and_its_number_is_its_place() {
    let first = |bytes: &[u8]| u32::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let mut seen = BTreeSet::new();
    for (name, message) in example::to_worker() {
        let number = first(&encode(&message).unwrap()[PREFIX_BYTES..]);
        assert_eq!(number, variant_to_worker(&message), "{name}");
        seen.insert(number);
    }
    assert_eq!(seen, (0..6).collect());
    seen.clear();
    for (name, message) in example::to_dispatcher() {
        let number = first(&encode(&message).unwrap()[PREFIX_BYTES..]);
        assert_eq!(number, variant_to_dispatcher(&message), "{name}");
        seen.insert(number);
    }
    assert_eq!(seen, (0..10).collect());
}

#[test]
fn no_golden_file_is_left_without_its_message() {
    let names: BTreeSet<String> = example::to_worker()
        .iter()
        .map(|(name, _)| format!("to_worker.{name}.bin"))
        .chain(
            example::to_dispatcher()
                .iter()
                .map(|(name, _)| format!("to_dispatcher.{name}.bin")),
        )
        .collect();
    for entry in std::fs::read_dir(path("x").parent().unwrap()).unwrap() {
        let file = entry.unwrap().file_name().into_string().unwrap();
        assert!(names.contains(&file), "{file}");
    }
}
