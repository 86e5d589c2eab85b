//! The property list that launchd is given: text from a [`Spec`], and nothing else.

use std::net::IpAddr;

use plist::{Dictionary, Value};

use super::spec::{OPEN_FILES, RESTART_PAUSE_S, Scope, Spec, text};
use super::{Manager, ServiceError};

/// The job's name.
pub const LABEL: &str = "local.dispatcher";

/// The whole property list, as XML.
///
/// # Errors
/// Where the writer fails, which is a fault of this program.
pub fn definition(spec: &Spec) -> Result<String, ServiceError> {
    let mut bytes = Vec::new();
    Value::Dictionary(dictionary(spec))
        .to_writer_xml(&mut bytes)
        .map_err(|error| ServiceError::Internal(error.to_string()))?;
    let mut text =
        String::from_utf8(bytes).map_err(|error| ServiceError::Internal(error.to_string()))?;
    text.push('\n');
    Ok(text)
}

fn dictionary(spec: &Spec) -> Dictionary {
    let mut all = Dictionary::new();
    let mut set = |key: &str, value: Value| all.insert(key.to_owned(), value);
    set("Label", LABEL.into());
    let words = spec.command(Manager::Launchd);
    set(
        "ProgramArguments",
        Value::Array(words.into_iter().map(Value::from).collect()),
    );
    set("WorkingDirectory", text(spec.folder()).into());
    set("RunAtLoad", true.into());
    // Started again whenever it did not end of its own will. A mistake in the configuration ends
    // with 0 for this reason.
    set("KeepAlive", map([("SuccessfulExit", false.into())]));
    set("ThrottleInterval", RESTART_PAUSE_S.into());
    // Neither throttled nor put to sleep: people wait for its answers.
    set("ProcessType", "Interactive".into());
    let files = || map([("NumberOfFiles", OPEN_FILES.into())]);
    set("SoftResourceLimits", files());
    set("HardResourceLimits", files());
    set("ExitTimeOut", spec.stop_limit_s().into());
    set("Umask", 0o077_u64.into());
    set("StandardOutPath", text(&spec.log).into());
    set("StandardErrorPath", text(&spec.log).into());
    if let (Scope::System, Some(user)) = (spec.scope, &spec.user) {
        set("UserName", user.as_str().into());
    }
    if spec.socket {
        let family = match spec.listen.ip() {
            IpAddr::V4(_) => "IPv4",
            IpAddr::V6(_) => "IPv6",
        };
        // One family, so that a name never makes two sockets.
        let listeners = map([
            ("SockNodeName", spec.listen.ip().to_string().into()),
            ("SockServiceName", spec.listen.port().to_string().into()),
            ("SockFamily", family.into()),
            ("SockType", "stream".into()),
        ]);
        set("Sockets", map([("Listeners", listeners)]));
    }
    all
}

fn map<const N: usize>(entries: [(&str, Value); N]) -> Value {
    let entries = entries.into_iter();
    Value::Dictionary(
        entries
            .map(|(key, value)| (key.to_owned(), value))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::super::spec::examples::{awkward, ordinary};
    use super::*;

    #[test]
    fn an_agent_of_an_ordinary_user_reads_as_its_snapshot() {
        insta::assert_snapshot!(definition(&ordinary(Scope::User)).unwrap());
    }

    #[test]
    fn a_daemon_with_awkward_paths_reads_as_its_snapshot() {
        insta::assert_snapshot!(definition(&awkward(Scope::System)).unwrap());
    }

    /// What launchd would read, as plain text.
    fn read(spec: &Spec) -> Dictionary {
        let text = definition(spec).unwrap();
        let value = Value::from_reader_xml(text.as_bytes()).unwrap();
        value.into_dictionary().unwrap()
    }

    #[test]
    fn what_launchd_reads_back_is_what_was_meant() {
        for spec in [
            ordinary(Scope::User),
            awkward(Scope::User),
            awkward(Scope::System),
            Spec {
                socket: false,
                ..ordinary(Scope::User)
            },
        ] {
            let all = read(&spec);
            let string = |key: &str| all[key].as_string().unwrap().to_owned();
            let number = |value: &Value| value.as_unsigned_integer().unwrap();
            assert_eq!(string("Label"), LABEL);
            let words = all["ProgramArguments"].as_array().unwrap().iter();
            let words: Vec<_> = words.map(|word| word.as_string().unwrap()).collect();
            assert_eq!(words, spec.command(Manager::Launchd));
            assert_eq!(string("WorkingDirectory"), text(spec.folder()));
            assert_eq!(string("StandardErrorPath"), text(&spec.log));
            assert_eq!(all["RunAtLoad"].as_boolean(), Some(true));
            let keep = all["KeepAlive"].as_dictionary().unwrap();
            assert_eq!(keep["SuccessfulExit"].as_boolean(), Some(false));
            assert_eq!(number(&all["ThrottleInterval"]), RESTART_PAUSE_S);
            assert_eq!(string("ProcessType"), "Interactive");
            for limits in ["SoftResourceLimits", "HardResourceLimits"] {
                let limits = all[limits].as_dictionary().unwrap();
                assert_eq!(number(&limits["NumberOfFiles"]), OPEN_FILES);
            }
            assert_eq!(number(&all["ExitTimeOut"]), spec.stop_limit_s());
            let user = all.get("UserName").and_then(Value::as_string);
            assert_eq!(user, spec.user.as_deref());
            assert_eq!(all.contains_key("Sockets"), spec.socket);
            if spec.socket {
                let sockets = all["Sockets"].as_dictionary().unwrap();
                let one = sockets["Listeners"].as_dictionary().unwrap();
                let at = |key: &str| one[key].as_string().unwrap().to_owned();
                assert_eq!(at("SockNodeName"), spec.listen.ip().to_string());
                assert_eq!(at("SockServiceName"), spec.listen.port().to_string());
            }
        }
    }
}
