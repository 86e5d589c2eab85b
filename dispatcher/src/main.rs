//! The program `dispatcher`: reads what was typed, acts on it, and exits with a code that says how it went.

use std::process::ExitCode;

use clap::Parser as _;
use clap::error::ErrorKind;
use dispatcher::cli::{Args, ConfigVerb, Verb};
use dispatcher::config::{Config, Surroundings};
use dispatcher::error::{EXIT_CONFIG, RunError};

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return refuse(&error),
    };
    match act(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&mut std::io::stderr(), &format!("dispatcher: {error}\n"));
            ExitCode::from(error.exit_code())
        }
    }
}

fn act(args: &Args) -> Result<(), RunError> {
    let resolve = || Config::resolve(&args.settings, &Surroundings::probe());
    match &args.verb {
        Some(Verb::Version) => {
            let version = concat!("dispatcher ", env!("CARGO_PKG_VERSION"), "\n");
            say(&mut std::io::stdout(), version);
        }
        Some(Verb::Config {
            verb: ConfigVerb::Show,
        }) => say(&mut std::io::stdout(), &resolve()?.show()),
        Some(Verb::Plan(plan)) => {
            let text = dispatcher::plan::cli::run(plan, &args.settings, &Surroundings::probe())?;
            say(&mut std::io::stdout(), &text);
        }
        Some(Verb::Reload) => {
            let directory = Config::run_directory(&args.settings, &Surroundings::probe())?;
            let told = dispatcher::reload::reload(&directory)?;
            say(&mut std::io::stdout(), &told);
        }
        Some(Verb::Serve) | None => {
            let config = resolve()?;
            dispatcher::log::init(config.log_format);
            dispatcher::run::run(config, args.settings.clone())?;
        }
    }
    Ok(())
}

/// Help and version are answers; all else that the parser says is a mistake in the command line.
fn refuse(error: &clap::Error) -> ExitCode {
    // Where even the message cannot be written, the exit code is all that is left to say.
    let _ = error.print();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ => ExitCode::from(EXIT_CONFIG),
    }
}

/// Prints; a reader that went away (`dispatcher config show | head -1`) is no error.
fn say(stream: &mut dyn std::io::Write, text: &str) {
    let _ = stream.write_all(text.as_bytes());
    let _ = stream.flush();
}
