//! `dispatcher doctor`: looks at the machine and the installation, and says of each thing what to do.

mod bus;
mod machine;
mod service;

use std::fmt::Write as _;
use std::net::TcpListener;
use std::path::Path;

use serde_json::{Value, json};

use crate::ask;
use crate::cli::Settings;
use crate::config::{Config, ConfigError, EngineKind, Surroundings};
use crate::model::gguf;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    Good,
    /// It could not be found out, or does not matter here.
    Unknown,
    /// It serves, but not as well as it could.
    Poor,
    /// It cannot serve.
    Bad,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    subject: &'static str,
    level: Level,
    fact: String,
    /// What to do about it.
    todo: Option<String>,
}

impl Finding {
    pub(super) fn good(subject: &'static str, fact: impl Into<String>) -> Self {
        Self::new(subject, Level::Good, fact, None)
    }

    pub(super) fn unknown(subject: &'static str, fact: impl Into<String>) -> Self {
        Self::new(subject, Level::Unknown, fact, None)
    }

    pub(super) fn poor(
        subject: &'static str,
        fact: impl Into<String>,
        todo: impl Into<String>,
    ) -> Self {
        Self::new(subject, Level::Poor, fact, Some(todo.into()))
    }

    pub(super) fn bad(
        subject: &'static str,
        fact: impl Into<String>,
        todo: impl Into<String>,
    ) -> Self {
        Self::new(subject, Level::Bad, fact, Some(todo.into()))
    }

    fn new(
        subject: &'static str,
        level: Level,
        fact: impl Into<String>,
        todo: Option<String>,
    ) -> Self {
        Self {
            subject,
            level,
            fact: fact.into(),
            todo,
        }
    }
}

/// All findings.
#[derive(Debug)]
pub struct Diagnosis(Vec<Finding>);

/// Looks at everything that `settings` mean on this machine.
#[must_use]
pub fn examine(settings: &Settings, around: &Surroundings, measure_bus: bool) -> Diagnosis {
    let config = Config::resolve(settings, around);
    let mut all = machine::examine(config.as_ref().ok());
    all.push(bus::examine(&around.cache_directory(), measure_bus));
    all.extend(configuration(&config));
    let directory = super::run_directory(settings, around).ok();
    let running = directory.as_deref().and_then(ask::running);
    if let Ok(config) = &config {
        all.push(port(
            config,
            running.as_ref().map(|state| state.address.as_str()),
        ));
        all.extend(service::programs(config));
    }
    if let Some(directory) = &directory {
        all.push(answers(directory));
    }
    all.extend(service::examine(config.as_ref().ok()));
    Diagnosis(all)
}

fn configuration(config: &Result<Config, ConfigError>) -> Vec<Finding> {
    let config = match config {
        Err(error) => {
            let todo = "mend that; `dispatcher config check` repeats only this look";
            return vec![Finding::bad("configuration", error.to_string(), todo)];
        }
        Ok(config) => config,
    };
    let mut all = vec![Finding::good(
        "configuration",
        format!(
            "{}: instances {}, slots {}, context {} tokens",
            config.served_model_name, config.instances, config.slots, config.context_tokens
        ),
    )];
    for note in &config.notes {
        let todo = "see `dispatcher config show`";
        all.push(Finding::poor("configuration", note.clone(), todo));
    }
    if let Some(path) = &config.model {
        all.push(model(path, config.engine));
    }
    all
}

/// Whether the file is as long as its header says: a download that was cut is not.
fn model(path: &Path, engine: EngineKind) -> Finding {
    if engine != EngineKind::Llama {
        return Finding::unknown("model", format!("{} is not looked into", path.display()));
    }
    match gguf::read(path) {
        Err(error) => Finding::bad(
            "model",
            format!("{} {error}", path.display()),
            "fetch it again, or choose another with `--model`",
        ),
        Ok(header) if header.file_bytes < header.tensor_bytes => Finding::bad(
            "model",
            format!(
                "{} has {} bytes, and its tensors alone want {}",
                path.display(),
                header.file_bytes,
                header.tensor_bytes
            ),
            "it was cut short: fetch it again",
        ),
        Ok(header) => Finding::good(
            "model",
            format!(
                "{} ({}, {} MiB) is whole by its header",
                path.display(),
                header.architecture,
                header.file_bytes >> 20
            ),
        ),
    }
}

fn port(config: &Config, ours: Option<&str>) -> Finding {
    let address = config.listen;
    if let Some(ours) = ours {
        return Finding::good("port", format!("a dispatcher listens on {ours}"));
    }
    match TcpListener::bind(address) {
        Ok(_) => Finding::good("port", format!("{address} is free")),
        Err(error) => Finding::bad(
            "port",
            format!("{address} cannot be listened on: {error}"),
            "end what listens there, or choose another with `--port`",
        ),
    }
}

fn answers(directory: &Path) -> Finding {
    let Some(state) = ask::running(directory) else {
        return Finding::unknown("server", format!("none runs in {}", directory.display()));
    };
    let at = format!("http://{} (pid {})", state.address, state.pid);
    match ask::status(&state.address) {
        Err(error) => Finding::bad(
            "server",
            format!("{at} does not answer: {error}"),
            "look at its log, and restart it",
        ),
        Ok(status) => match status["not_ready_reason"].as_str() {
            None => Finding::good("server", format!("{at} is ready")),
            Some(reason) => Finding::poor(
                "server",
                format!("{at} is not ready: {reason}"),
                "`dispatcher status` and `dispatcher status --crashes` say more",
            ),
        },
    }
}

impl Diagnosis {
    /// Whether something keeps it from serving.
    #[must_use]
    pub fn is_unfit(&self) -> bool {
        self.0.iter().any(|one| one.level == Level::Bad)
    }

    #[must_use]
    pub fn json(&self) -> Value {
        let all = self.0.iter().map(|one| {
            json!({
                "subject": one.subject,
                "level": word(one.level),
                "fact": one.fact,
                "todo": one.todo,
            })
        });
        all.collect()
    }

    #[must_use]
    pub fn text(&self, coloured: bool) -> String {
        let mut text = String::new();
        for one in &self.0 {
            let word = word(one.level);
            let colour = match one.level {
                Level::Good => "\x1b[32m",
                Level::Unknown => "\x1b[2m",
                Level::Poor => "\x1b[33m",
                Level::Bad => "\x1b[31m",
            };
            let word = if coloured {
                format!("{colour}{word:<7}\x1b[0m")
            } else {
                format!("{word:<7}")
            };
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{word} {:<14} {}", one.subject, one.fact);
            if let Some(todo) = &one.todo {
                let _ = writeln!(text, "{:22} -> {todo}", "");
            }
        }
        text
    }
}

fn word(level: Level) -> &'static str {
    match level {
        Level::Good => "ok",
        Level::Unknown => "-",
        Level::Poor => "warning",
        Level::Bad => "wrong",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_finding_that_is_not_good_says_what_to_do() {
        let diagnosis = Diagnosis(vec![
            Finding::good("memory", "8 GiB, 6 free"),
            Finding::unknown("power", "nothing says"),
            Finding::poor("swap", "1 GiB in use", "end other programs"),
            Finding::bad("port", "127.0.0.1:80 cannot be used", "choose another"),
        ]);
        insta::assert_snapshot!(diagnosis.text(false));
        assert!(diagnosis.is_unfit());
        assert!(diagnosis.text(true).contains("\x1b[31mwrong"));
    }

    #[test]
    fn a_model_that_was_cut_short_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        std::fs::write(&path, b"GGUF").unwrap();
        assert_eq!(model(&path, EngineKind::Llama).level, Level::Bad);
    }
}
