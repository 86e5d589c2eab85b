//! `dispatcher service status`: the definition, the manager's view, the dispatcher's own, its settings.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::ServiceError;
use super::control::Control;
use super::intent::resolve;
use super::stamp::Origin;
use crate::ask;
use crate::cli::Settings;
use crate::config::Effective;
use crate::crash::{CrashLog, CrashRecord};

/// All that is to be said.
struct Report {
    definition: PathBuf,
    origin: Option<Origin>,
    state: String,
    pid: Option<u32>,
    last_exit: Option<i32>,
    config: Option<PathBuf>,
    run_dir: Option<PathBuf>,
    settings: Result<Vec<Effective>, String>,
    status: Option<Value>,
    last_crash: Option<CrashRecord>,
}

pub(super) fn report(
    control: &Control<'_>,
    settings: &Settings,
    as_json: bool,
) -> Result<String, ServiceError> {
    let report = gather(control, settings)?;
    Ok(if as_json {
        format!("{:#}\n", report.json())
    } else {
        report.text()
    })
}

fn gather(control: &Control<'_>, settings: &Settings) -> Result<Report, ServiceError> {
    let owner = control.owner;
    let main = &owner.possible()[0];
    let found = main.found()?;
    let standing = control.standing()?;
    let text = found.as_ref().map(|(text, _)| text.as_str());
    let config = text
        .and_then(|text| argument(text, "--config"))
        .or_else(|| settings.config.as_ref().map(PathBuf::from))
        .or_else(|| owner.config(None).ok());
    let resolved = match &config {
        None => Err("no configuration file is known".to_owned()),
        Some(path) => resolve(owner, path).map_err(|error| error.to_string()),
    };
    let run_dir = text
        .and_then(|text| argument(text, "--run-dir"))
        .or_else(|| resolved.as_ref().ok().map(|config| config.run_dir.clone()));
    let status = run_dir
        .as_deref()
        .and_then(|path| ask::status_of(path).ok());
    let crashes = run_dir
        .as_ref()
        .map(|path| CrashLog::new(path.join("crashes")));
    Ok(Report {
        definition: main.path.clone(),
        origin: found.map(|(_, origin)| origin),
        state: standing.word,
        pid: standing.pid,
        last_exit: standing.last_exit,
        config,
        run_dir,
        settings: resolved.map(|config| config.effective),
        status,
        last_crash: crashes.and_then(|log| log.read().ok()?.into_iter().next()),
    })
}

/// The value of an argument in a definition: the next string of a property list, the next word of a unit.
pub(super) fn argument(definition: &str, flag: &str) -> Option<PathBuf> {
    if let Ok(plist) = plist::Value::from_reader_xml(definition.as_bytes()) {
        let words = plist.as_dictionary()?.get("ProgramArguments")?.as_array()?;
        let mut words = words
            .iter()
            .map(|word| word.as_string().unwrap_or_default());
        words.find(|word| *word == flag)?;
        return words.next().map(PathBuf::from);
    }
    let line = definition
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="))?;
    let (_, after) = line.split_once(&format!(" {flag} "))?;
    let word = match after.strip_prefix('"') {
        None => after.split(' ').next()?.to_owned(),
        Some(quoted) => {
            let mut word = String::new();
            let mut characters = quoted.chars();
            loop {
                match characters.next()? {
                    '"' => break word,
                    '\\' => word.push(characters.next()?),
                    other => word.push(other),
                }
            }
        }
    };
    Some(word.replace("$$", "$").replace("%%", "%").into())
}

impl Report {
    fn json(&self) -> Value {
        let origin = self.origin.as_ref().map(origin_word);
        let settings = match &self.settings {
            Ok(all) => all
                .iter()
                .map(|one| json!({"key": one.key, "value": one.value, "source": one.source.to_string()}))
                .collect::<Value>(),
            Err(problem) => json!({ "error": problem }),
        };
        json!({
            "installed": self.origin.is_some(),
            "definition": self.definition,
            "definition_origin": origin,
            "state": self.state,
            "pid": self.pid,
            "last_exit": self.last_exit,
            "config": self.config,
            "run_dir": self.run_dir,
            "settings": settings,
            "status": self.status,
            "last_crash": self.last_crash,
        })
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, words: &str| {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{name:<12}{words}");
        };
        let definition = super::command::shown(&self.definition);
        match &self.origin {
            None => line("definition", &format!("not installed ({definition})")),
            Some(Origin::Ours) => line("definition", &definition),
            Some(other) => line(
                "definition",
                &format!("{definition} ({})", origin_word(other)),
            ),
        }
        line("state", &self.state);
        if let Some(pid) = self.pid {
            line("pid", &pid.to_string());
        }
        if let Some(code) = self.last_exit
            && self.pid.is_none()
        {
            line("last exit", &code.to_string());
        }
        match &self.status {
            None => line("answers", "no"),
            Some(status) => {
                let uptime_s = status["uptime_us"].as_u64().unwrap_or_default() / 1_000_000;
                line("uptime", &ask::duration(uptime_s));
                let reason = status["not_ready_reason"].as_str();
                line(
                    "ready",
                    &reason.map_or("yes".to_owned(), |reason| format!("no: {reason}")),
                );
            }
        }
        match &self.last_crash {
            None => line("last crash", "none is recorded"),
            Some(crash) => line("last crash", &crash.line()),
        }
        if let Some(config) = &self.config {
            line("config", &super::command::shown(config));
        }
        match &self.settings {
            Err(problem) => line("settings", &format!("cannot work: {problem}")),
            Ok(all) => {
                line("settings", "");
                for one in all {
                    let set = format!("{} = {}", one.key, one.value);
                    let _ = writeln!(text, "  {set:<48} # {}", one.source);
                }
            }
        }
        text
    }
}

pub(super) fn origin_word(origin: &Origin) -> &'static str {
    match origin {
        Origin::Ours => "as installed",
        Origin::Newer(_) => "of a newer dispatcher",
        Origin::Edited => "edited",
        Origin::Foreign => "not ours",
    }
}

#[cfg(test)]
mod tests {
    use super::super::spec::Scope;
    use super::super::spec::examples::awkward;
    use super::super::{launchd, systemd};
    use super::*;

    #[test]
    fn what_a_definition_starts_with_is_read_back_from_it() {
        let spec = awkward(Scope::System);
        let definitions = [systemd::service(&spec), launchd::definition(&spec).unwrap()];
        for text in definitions {
            assert_eq!(
                argument(&text, "--config"),
                Some(spec.config.clone()),
                "{text}"
            );
            assert_eq!(argument(&text, "--run-dir"), spec.run_dir, "{text}");
            assert_eq!(argument(&text, "--port"), None);
        }
    }
}
