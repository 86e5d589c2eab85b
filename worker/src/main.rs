//! Parses, ties itself to its parent, connects, runs; the exit code says why it ended.

use std::io::Write as _;
use std::os::unix::net::UnixStream;

use clap::Parser;
use worker::cli::{self, Arguments};
use worker::session::Ending;
use worker::{Outcome, Setup, exit, parent};

fn main() {
    exit::abort_on_panic();
    if let Some(engines) = cli::engines(std::env::args_os().skip(1)) {
        let told = std::io::stdout().write_all(engines.as_bytes());
        exit::now(told.map_or(exit::UNREACHABLE, |()| exit::ORDERLY));
    }
    let arguments = Arguments::try_parse().unwrap_or_else(|error| {
        let _ = error.print();
        exit::now(if error.use_stderr() {
            exit::CONFIGURATION
        } else {
            exit::ORDERLY
        })
    });
    match serve(&arguments) {
        Ok(Outcome::Terminated) => {
            parent::die_of_sigterm();
            exit::now(exit::ORDERLY)
        }
        Ok(Outcome::Ended(ending)) | Err(ending) => {
            if let Some(words) = &ending.words {
                exit::say(words);
            }
            exit::now(ending.code)
        }
    }
}

fn serve(arguments: &Arguments) -> Result<Outcome, Ending> {
    let unable = |error: std::io::Error| Ending::new(exit::LOAD_FAILED, error.to_string());
    let terminate = parent::watch_signals().map_err(unable)?;
    if !parent::tie(arguments.parent_pid) {
        return Err(Ending::orphaned("this process has another parent"));
    }
    let selection = arguments
        .selection()
        .map_err(|error| Ending::new(exit::CONFIGURATION, error.to_string()))?;
    let token = parent::read_token()
        .map_err(|_| Ending::orphaned("standard input ended before the token"))?;
    let orphaned = parent::watch_standard_input().map_err(unable)?;
    let stream = UnixStream::connect(&arguments.socket).map_err(|error| {
        Ending::new(
            exit::UNREACHABLE,
            format!("cannot connect to {}: {error}", arguments.socket.display()),
        )
    })?;
    let (instance, generation) = arguments.place();
    let setup = Setup {
        instance,
        generation,
        token,
        selection,
        options: arguments.load_options(),
    };
    Ok(worker::run(setup, stream, &terminate, &orphaned))
}
