//! Parse, resolve, run, exit code; nothing else.

use std::process::ExitCode;

use clap::Parser as _;
use dispatcher::cli::{Args, ConfigVerb, Verb};
use dispatcher::config::{Config, Surroundings};
use dispatcher::error::RunError;
use dispatcher::{log, run};

fn main() -> ExitCode {
    let args = Args::parse();
    match act(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The log may be JSON for a machine; this line is for whoever typed the command.
            report(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn act(args: &Args) -> Result<(), RunError> {
    match args.verb {
        Some(Verb::Version) => say(concat!("dispatcher ", env!("CARGO_PKG_VERSION"), "\n")),
        Some(Verb::Config {
            verb: ConfigVerb::Show,
        }) => {
            say(&Config::resolve(&args.settings, &Surroundings::probe())?.show());
        }
        Some(Verb::Serve) | None => {
            let config = Config::resolve(&args.settings, &Surroundings::probe())?;
            log::init(config.log_format);
            run::run(config)?;
        }
    }
    Ok(())
}

#[expect(
    clippy::print_stdout,
    reason = "the verb's answer goes to the standard output"
)]
fn say(text: &str) {
    print!("{text}");
}

#[expect(
    clippy::print_stderr,
    reason = "errors of a command go to the standard error"
)]
fn report(error: &RunError) {
    eprintln!("dispatcher: {error}");
}
