//! Parse, run, exit code; nothing else.

use std::process::ExitCode;

use bench::cli::Args;
use bench::verbs::run;
use clap::Parser;

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            #[expect(clippy::print_stderr, reason = "the last word of a command line tool")]
            {
                eprintln!("dispatcher-bench: failed to {error}");
            }
            ExitCode::from(error.exit_code())
        }
    }
}
