//! Which part carries out which verb.

mod bus;
mod compare;
mod matrix;
mod report;
mod streams;
mod study;

use crate::cli::{Args, Verb};
use crate::error::BenchError;
use crate::synth;

/// Carries out what was asked.
///
/// # Errors
/// Whatever kept it from measuring, or a promise that was measured broken.
pub fn run(args: Args) -> Result<(), BenchError> {
    match args.verb {
        Verb::Single(args) => matrix::single_verb(&args),
        Verb::Sweep(args) => matrix::sweep_verb(&args),
        Verb::Scale(args) => matrix::scale_verb(&args),
        Verb::Surface(args) => matrix::surface_verb(&args),
        Verb::Study(args) => study::study_verb(&args),
        Verb::Load(args) => matrix::load_verb(&args),
        Verb::Compare(args) => compare::compare_verb(&args),
        Verb::Bus(args) => bus::bus_verb(&args),
        Verb::Synth(args) => {
            let bytes = synth::write(args.shapes, &args.tokenizer, args.seed, &args.out)?;
            say(&format!("{}: {bytes} bytes", args.out.display()));
            Ok(())
        }
        Verb::Report(args) => report::report_verb(&args),
        Verb::Flood(args) => streams::flood_verb(&args),
        Verb::Chaos(args) => streams::chaos_verb(&args),
    }
}

fn extra(text: Option<&str>) -> Result<serde_json::Map<String, serde_json::Value>, BenchError> {
    let Some(text) = text else {
        return Ok(serde_json::Map::new());
    };
    serde_json::from_str(text)
        .map_err(|error| BenchError::Usage(format!("--extra is no JSON object: {error}")))
}

/// One thread: it is not the client that is to be fast, and what it leaves belongs to the server.
fn runtime() -> Result<tokio::runtime::Runtime, BenchError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| BenchError::System {
            what: "start the event loop",
            source,
        })
}

#[expect(clippy::print_stdout, reason = "the result of a command line tool")]
fn say(text: &str) {
    println!("{text}");
}
