//! A commented configuration file, and its JSON schema: both written from the command line's own help.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::CommandFactory as _;
use serde_json::{Value, json};

use super::VerbError;
use crate::cli::Args;
use crate::config::{Config, KEYS};
use crate::service::write_whole;

/// A value for each setting whose default depends on the machine or the model.
const EXAMPLES: [(&str, &str); 16] = [
    ("engine", "\"llama\""),
    ("model", "\"/srv/models/qwen2.5-7b-instruct-q4_k_m.gguf\""),
    ("models-dir", "\"/srv/models\""),
    ("served-model-name", "\"qwen\""),
    ("slots", "8"),
    ("ctx-size", "8192"),
    ("threads", "4"),
    ("n-gpu-layers", "99"),
    ("devices", "\"0,1\""),
    ("memory-limit", "\"12GiB\""),
    ("api-key", "[\"a-long-random-text\"]"),
    ("api-key-file", "\"/etc/dispatcher/keys\""),
    ("run-dir", "\"/run/dispatcher\""),
    ("worker", "\"/usr/local/bin/dispatcher-worker\""),
    ("stop-limit", "\"45s\""),
    ("log-format", "\"auto\""),
];

/// A setting, as its flag's help has it.
struct Setting {
    key: &'static str,
    heading: String,
    help: String,
    default: Option<String>,
}

fn settings() -> Vec<Setting> {
    let command = Args::command();
    let of_key = |key: &'static str| {
        let argument = command
            .get_arguments()
            .find(|argument| argument.get_long() == Some(key) && !argument.is_hide_set())?;
        let help = argument.get_help().map(ToString::to_string)?;
        let default = help.split_once("[default: ").and_then(|(_, rest)| {
            let (default, _) = rest.split_once(']')?;
            // A default in words is none that could be written down.
            (!default.contains(' ')).then(|| default.to_owned())
        });
        Some(Setting {
            key,
            heading: argument.get_help_heading().unwrap_or_default().to_owned(),
            help,
            default,
        })
    };
    KEYS.into_iter().filter_map(of_key).collect()
}

/// Every setting with its explanation, each commented out.
#[must_use]
pub fn commented() -> String {
    let mut text = String::from(
        "# Configuration of dispatcher. Take the # from a line to change that setting; what is not set has its default.\n\
         # Times: 250ms, 30s, 5m, 1h. Sizes: 4096, 256MiB, 12GB. `dispatcher config check` finds mistakes,\n\
         # `dispatcher config show` prints every value and where it came from, `dispatcher reload` has a\n\
         # running dispatcher read this file again.\n",
    );
    let mut heading = String::new();
    for setting in settings() {
        // Writing to a String cannot fail.
        if setting.heading != heading {
            let _ = write!(text, "\n# ---- {} ----\n", setting.heading);
            heading.clone_from(&setting.heading);
        }
        let _ = writeln!(text, "\n# {}", setting.help);
        let _ = writeln!(text, "#{} = {}", setting.key, setting.value());
    }
    text
}

impl Setting {
    fn value(&self) -> String {
        let example = EXAMPLES.iter().find(|(key, _)| *key == self.key);
        match (&self.default, example) {
            (_, Some((_, example))) => (*example).to_owned(),
            (Some(default), None) if default.parse::<u64>().is_ok() => default.clone(),
            (Some(default), None) => format!("{default:?}"),
            (None, None) => "\"\"".to_owned(),
        }
    }
}

/// Writes the commented file to `path`.
///
/// # Errors
/// Where one is there and `force` is not said, or the file system refuses.
pub fn init(path: &Path, force: bool) -> Result<String, VerbError> {
    if path.exists() && !force {
        return Err(VerbError::Exists(path.to_owned()));
    }
    // It may come to hold an API key.
    write_whole(path, commented().as_bytes(), 0o600).map_err(|cause| VerbError::File {
        path: path.to_owned(),
        cause,
    })?;
    Ok(format!(
        "written {}: every setting is in it, commented out\n",
        path.display()
    ))
}

/// The schema of the configuration file, for editors.
#[must_use]
pub fn schema() -> Value {
    let properties: serde_json::Map<String, Value> = settings()
        .into_iter()
        .map(|setting| {
            let mut property = json!({ "description": setting.help });
            match setting.key {
                "api-key" => {
                    property["type"] = json!(["string", "array"]);
                    property["items"] = json!({ "type": "string" });
                }
                "engine" => property["enum"] = json!(["llama", "mlx"]),
                "log-format" => property["enum"] = json!(["auto", "text", "json"]),
                // A number may also be written as text.
                _ => property["type"] = json!(["string", "integer"]),
            }
            (setting.key.to_owned(), property)
        })
        .collect();
    json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "dispatcher.toml",
        "type": "object",
        "additionalProperties": false,
        "properties": properties,
    })
}

/// `config show --json`.
#[must_use]
pub fn show_json(config: &Config) -> Value {
    let values: Vec<Value> = config
        .effective
        .iter()
        .map(|one| {
            // As the file would have it, and as text where it has no such value.
            let value = format!("v = {}", one.value)
                .parse::<toml::Table>()
                .ok()
                .and_then(|table| serde_json::to_value(&table["v"]).ok());
            json!({
                "key": one.key,
                "value": value.unwrap_or_else(|| json!(one.value)),
                "source": one.source.to_string(),
            })
        })
        .collect();
    json!({
        "settings": values,
        "api_keys": config.api_keys.as_slice().len(),
        "memory": config.plan.as_ref().map(ToString::to_string),
        "notes": config.notes,
    })
}

/// Where `config init` writes where no file is named.
#[must_use]
pub fn target(named: Option<&str>, default: PathBuf) -> PathBuf {
    named.map_or(default, PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_of_the_commented_file_is_one_that_the_program_takes() {
        let text = commented();
        let mut keys = Vec::new();
        for line in text.lines() {
            let Some(line) = line.strip_prefix('#').filter(|line| !line.starts_with(' ')) else {
                continue;
            };
            let table: toml::Table = line
                .parse()
                .unwrap_or_else(|error| panic!("{line}: {error}"));
            keys.extend(table.keys().cloned());
        }
        let hidden = 1;
        assert_eq!(keys.len(), KEYS.len() - hidden, "{keys:?}");
        assert!(keys.iter().all(|key| KEYS.contains(&key.as_str())));
        assert!(
            !text.contains("= \"\"\n"),
            "a setting has no example:\n{text}"
        );
    }

    #[test]
    fn a_file_is_written_once_and_replaced_only_when_asked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("Zoë's files/dispatcher.toml");
        init(&path, false).unwrap();
        assert!(
            std::fs::read_to_string(&path)
                .unwrap()
                .contains("#queue-timeout = \"10m\"")
        );
        std::fs::write(&path, "mine").unwrap();
        assert!(matches!(init(&path, false), Err(VerbError::Exists(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
        init(&path, true).unwrap();
    }
}
