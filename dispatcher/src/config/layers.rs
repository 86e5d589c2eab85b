//! Where a setting's text comes from: flag, then environment, then file, then default; and the record of it.

use std::collections::BTreeMap;
use std::fmt;

use super::{ConfigError, value::Parsed};
use crate::cli::Settings;

/// Every setting's key. A file with any other key is refused.
pub const KEYS: [&str; 32] = [
    "engine",
    "model",
    "models-dir",
    "served-model-name",
    "instances",
    "slots",
    "ctx-size",
    "threads",
    "n-gpu-layers",
    "devices",
    "memory-limit",
    "host",
    "port",
    "api-key",
    "api-key-file",
    "queue",
    "queue-bytes",
    "queue-tokens",
    "queue-timeout",
    "priority-aging",
    "drain-timeout",
    "replace-timeout",
    "max-crashes",
    "crash-window",
    "suspect-after",
    "stall-after",
    "worker-grace",
    "run-dir",
    "worker",
    "log-format",
    "stop-limit",
    "scripted",
];

/// Who said it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Flag,
    Environment,
    /// The path of the file.
    File(String),
    Default,
    /// Worked out from the machine and the model.
    Derived,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("flag"),
            Self::Environment => f.write_str("environment"),
            Self::File(path) => write!(f, "file {path}"),
            Self::Default => f.write_str("default"),
            Self::Derived => f.write_str("derived"),
        }
    }
}

/// One effective value, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effective {
    pub key: &'static str,
    pub value: String,
    pub source: Source,
}

/// The layers of one run. Pure: the environment and the file were read before.
#[derive(Debug)]
pub(super) struct Layers<'a> {
    pub(super) typed: &'a Settings,
    pub(super) environment: &'a BTreeMap<String, String>,
    pub(super) file: Option<File>,
}

/// A parsed configuration file.
#[derive(Debug)]
pub(super) struct File {
    path: String,
    values: BTreeMap<String, Vec<String>>,
}

/// The environment variable of a setting.
pub(super) fn variable(key: &str) -> String {
    format!("DISPATCHER_{}", key.to_ascii_uppercase().replace('-', "_"))
}

impl File {
    /// Reads the file's text: keys are the flags' names; an unknown key is an error, so that a typing
    /// mistake is not a silent default.
    pub(super) fn parse(path: &str, text: &str) -> Result<Self, ConfigError> {
        let refused = |problem: String| ConfigError::File {
            path: path.to_owned(),
            problem,
        };
        let table: toml::Table = text
            .parse()
            .map_err(|error: toml::de::Error| refused(error.to_string().trim_end().to_owned()))?;
        let mut values = BTreeMap::new();
        for (key, value) in table {
            if !KEYS.contains(&key.as_str()) {
                return Err(refused(match nearest(&key) {
                    Some(near) => format!("unknown setting `{key}` (did you mean `{near}`?)"),
                    None => format!("unknown setting `{key}`"),
                }));
            }
            let texts = match value {
                toml::Value::Array(array) if key == "api-key" => array
                    .into_iter()
                    .map(scalar)
                    .collect::<Option<Vec<String>>>(),
                other => scalar(other).map(|text| vec![text]),
            };
            let texts = texts
                .ok_or_else(|| refused(format!("`{key}` must be a text or a whole number")))?;
            values.insert(key, texts);
        }
        Ok(Self {
            path: path.to_owned(),
            values,
        })
    }
}

fn scalar(value: toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text),
        toml::Value::Integer(number) => Some(number.to_string()),
        _ => None,
    }
}

/// The key that was probably meant: the same but for `_`, or one letter's difference.
fn nearest(wrong: &str) -> Option<&'static str> {
    let wrong = wrong.replace('_', "-").to_ascii_lowercase();
    KEYS.into_iter()
        .filter(|key| *key != "scripted")
        .find(|key| {
            let same_head = key.chars().zip(wrong.chars()).take_while(|(a, b)| a == b);
            let head = same_head.count();
            let tail = key[head..]
                .chars()
                .rev()
                .zip(
                    wrong
                        .chars()
                        .skip(head)
                        .collect::<Vec<_>>()
                        .into_iter()
                        .rev(),
                )
                .take_while(|(a, b)| a == b)
                .count();
            key.len().max(wrong.chars().count()) - head - tail <= 1
        })
}

impl Layers<'_> {
    /// The text of a setting and who said it; `None`: nobody did.
    fn text(&self, key: &str) -> Option<(String, Source)> {
        if let Some(text) = self.typed.typed(key) {
            return Some((text.to_owned(), Source::Flag));
        }
        if let Some(text) = self.environment.get(&variable(key)) {
            return Some((text.clone(), Source::Environment));
        }
        let file = self.file.as_ref()?;
        let text = file.values.get(key)?.first()?;
        Some((text.clone(), Source::File(file.path.clone())))
    }

    /// A setting's value and who said it; `None`: nobody did, and the default holds.
    ///
    /// # Errors
    /// Where the text cannot be understood, naming the place where it was said.
    pub(super) fn get<T>(
        &self,
        key: &'static str,
        parse: impl Fn(&str) -> Parsed<T>,
    ) -> Result<Option<(T, Source)>, ConfigError> {
        let Some((text, source)) = self.text(key) else {
            return Ok(None);
        };
        match parse(&text) {
            Ok(value) => Ok(Some((value, source))),
            Err(problem) => Err(ConfigError::Value {
                said: said(key, &text, &source),
                problem,
            }),
        }
    }

    /// All API keys of the first layer that names any, and who said them.
    pub(super) fn api_keys(&self) -> (Vec<String>, Source) {
        if !self.typed.api_key.is_empty() {
            return (self.typed.api_key.clone(), Source::Flag);
        }
        if let Some(text) = self.environment.get(&variable("api-key")) {
            let keys = text.split(',').map(|key| key.trim().to_owned()).collect();
            return (keys, Source::Environment);
        }
        if let Some(file) = &self.file
            && let Some(keys) = file.values.get("api-key")
        {
            return (keys.clone(), Source::File(file.path.clone()));
        }
        (Vec::new(), Source::Default)
    }
}

/// A setting the way its author wrote it.
fn said(key: &str, text: &str, source: &Source) -> String {
    match source {
        Source::Environment => format!("{}={text}", variable(key)),
        Source::File(path) => format!("{path}: {key} = {text}"),
        Source::Flag | Source::Default | Source::Derived => format!("--{key} {text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::value;

    fn port(
        typed: Option<&str>,
        environment: Option<&str>,
        file: Option<&str>,
    ) -> Result<Option<(u32, Source)>, ConfigError> {
        let typed = Settings {
            port: typed.map(str::to_owned),
            ..Settings::default()
        };
        let environment = environment
            .map(|text| ("DISPATCHER_PORT".to_owned(), text.to_owned()))
            .into_iter()
            .collect();
        let file = file
            .map(|text| File::parse("d.toml", &format!("port = {text}")))
            .transpose()?;
        let layers = Layers {
            typed: &typed,
            environment: &environment,
            file,
        };
        layers.get("port", |text| value::count32(text, 0, 65_535))
    }

    #[test]
    fn a_flag_wins_over_the_environment_and_that_over_the_file() {
        let from_file = Source::File("d.toml".into());
        let cases = [
            (port(Some("1"), Some("2"), Some("3")), (1, Source::Flag)),
            (port(None, Some("2"), Some("3")), (2, Source::Environment)),
            (port(None, None, Some("3")), (3, from_file.clone())),
            (port(None, None, Some("\"3\"")), (3, from_file)),
        ];
        for (got, wanted) in cases {
            assert_eq!(got.unwrap(), Some(wanted));
        }
        assert_eq!(port(None, None, None).unwrap(), None);
    }

    #[test]
    fn a_wrong_value_is_quoted_as_its_author_wrote_it() {
        let text = |result: Result<_, ConfigError>| match result {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        };
        assert!(text(port(Some("x"), None, None)).starts_with("--port x: "));
        assert!(text(port(None, Some("x"), None)).starts_with("DISPATCHER_PORT=x: "));
        assert!(text(port(None, None, Some("'x'"))).starts_with("d.toml: port = x: "));
    }

    #[test]
    fn an_unknown_key_is_refused_with_the_one_that_was_meant() {
        let error = File::parse("d.toml", "ctx_size = 1")
            .unwrap_err()
            .to_string();
        assert!(error.contains("`ctx-size`"), "{error}");
        let error = File::parse("d.toml", "instance = 1")
            .unwrap_err()
            .to_string();
        assert!(error.contains("`instances`"), "{error}");
        let error = File::parse("d.toml", "colour = 1").unwrap_err().to_string();
        assert!(!error.contains("mean"), "{error}");
        assert!(File::parse("d.toml", "port = 1.5").is_err());
        assert!(File::parse("d.toml", "port = ").is_err());
    }
}
