//! The program `dispatcher`: reads what was typed, acts on it, and exits with a code that says how it went.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, FromArgMatches as _, ValueEnum as _};
use dispatcher::cli::{self, Args, ConfigVerb, Settings, Verb};
use dispatcher::config::{Config, Surroundings};
use dispatcher::error::{EXIT_CONFIG, RunError};
use dispatcher::service::Manager;
use dispatcher::verbs::{self, VerbError, bench, chat, config_file, doctor, status};

fn main() -> ExitCode {
    let matched = cli::command().try_get_matches();
    let args = match matched.and_then(|matches| Args::from_arg_matches(&matches)) {
        Ok(args) => args,
        Err(error) => return refuse(&error),
    };
    match act(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&mut std::io::stderr(), &format!("dispatcher: {error}\n"));
            // What asks a service manager is not started by it.
            let manager = match args.verb {
                Some(Verb::Serve) | None => args.settings.service_manager,
                _ => None,
            };
            ExitCode::from(error.exit_code_under(manager))
        }
    }
}

fn act(args: &Args) -> Result<(), RunError> {
    let resolve = || Config::resolve(&args.settings, &Surroundings::probe());
    let run_directory = || verbs::run_directory(&args.settings, &Surroundings::probe());
    match &args.verb {
        Some(Verb::Version) => {
            let version = concat!("dispatcher ", env!("CARGO_PKG_VERSION"), "\n");
            say(&mut std::io::stdout(), version);
        }
        Some(Verb::Config { verb }) => configuration(*verb, args)?,
        Some(Verb::Service { verb }) => {
            let told = dispatcher::service::run(verb, &args.settings)?;
            answer(&told);
        }
        Some(Verb::Status(arguments)) => status::run(*arguments, &run_directory()?)?,
        Some(Verb::Chat(arguments)) => {
            chat::run(arguments, &args.settings, &resolve(), &run_directory()?)?;
        }
        Some(Verb::Doctor { json, bus }) => {
            let diagnosis = doctor::examine(&args.settings, &Surroundings::probe(), *bus);
            if *json {
                answer(&format!("{:#}\n", diagnosis.json()));
            } else {
                answer(&diagnosis.text(verbs::is_coloured()));
            }
            if diagnosis.is_unfit() {
                return Err(VerbError::Unfit.into());
            }
        }
        Some(Verb::Bench { words }) => {
            match bench::run(&Surroundings::probe().executable, words)? {}
        }
        Some(Verb::Completions { shell }) => {
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut Args::command(), "dispatcher", &mut text);
            answer(&String::from_utf8_lossy(&text));
        }
        Some(Verb::Man) => {
            let mut text = Vec::new();
            // Writing to memory cannot fail.
            let _ = clap_mangen::Man::new(Args::command()).render(&mut text);
            answer(&String::from_utf8_lossy(&text));
        }
        Some(Verb::Plan(plan)) => {
            let text = dispatcher::plan::cli::run(plan, &args.settings, &Surroundings::probe())?;
            answer(&text);
        }
        Some(Verb::Reload) => {
            let told = dispatcher::reload::reload(&run_directory()?)?;
            answer(&told);
        }
        Some(Verb::Serve) | None => {
            dispatcher::run::run(&args.settings, None)?;
        }
    }
    Ok(())
}

fn configuration(verb: ConfigVerb, args: &Args) -> Result<(), RunError> {
    let around = Surroundings::probe();
    match verb {
        ConfigVerb::Show { json } => {
            let config = Config::resolve(&args.settings, &around)?;
            if json {
                answer(&format!("{:#}\n", config_file::show_json(&config)));
            } else {
                answer(&config.show());
            }
        }
        ConfigVerb::Check => {
            let config = Config::resolve(&args.settings, &around)?;
            for note in &config.notes {
                answer(&format!("note: {note}\n"));
            }
            answer("it could serve\n");
        }
        ConfigVerb::Init { force } => {
            let path = config_file::target(args.settings.config.as_deref(), around.config_path());
            answer(&config_file::init(&path, force)?);
        }
        ConfigVerb::Schema => answer(&format!("{:#}\n", config_file::schema())),
    }
    Ok(())
}

/// Help and version are answers; all else that the parser says is a mistake in the command line.
fn refuse(error: &clap::Error) -> ExitCode {
    // Where even the message cannot be written, the exit code is all that is left to say.
    let _ = error.print();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ => match started_by(std::env::args_os()) {
            Some(manager) => refuse_under(manager, error),
            None => ExitCode::from(EXIT_CONFIG),
        },
    }
}

/// A service whose arguments this program does not know (its definition is another version's) may end
/// in a loop of restarts as little as one whose file is wrong.
fn refuse_under(manager: Manager, error: &clap::Error) -> ExitCode {
    let settings = Settings {
        service_manager: Some(manager),
        ..Settings::default()
    };
    let words = error.to_string();
    let words = format!(
        "its service definition does not fit this program, `dispatcher service install` writes it anew: {}",
        words.lines().next().unwrap_or_default()
    );
    match dispatcher::run::run(&settings, Some(words)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&mut std::io::stderr(), &format!("dispatcher: {error}\n"));
            ExitCode::from(error.exit_code_under(Some(manager)))
        }
    }
}

/// The service manager that the arguments name, whatever else is wrong with them.
fn started_by(words: impl Iterator<Item = OsString>) -> Option<Manager> {
    let words: Vec<String> = words.filter_map(|word| word.into_string().ok()).collect();
    let after = words
        .iter()
        .skip_while(|word| *word != "--service-manager")
        .nth(1)?;
    Manager::from_str(after, false).ok()
}

fn answer(text: &str) {
    say(&mut std::io::stdout(), text);
}

/// Prints; a reader that went away (`dispatcher config show | head -1`) is no error.
fn say(stream: &mut dyn std::io::Write, text: &str) {
    let _ = stream.write_all(text.as_bytes());
    let _ = stream.flush();
}
