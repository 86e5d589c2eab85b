//! What is under test: a server that is already there, or one that is started for each cell and stopped after it.

use std::fs::File;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::process::{Child, Command};

use crate::client::{Client, Patience};
use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::process::{Memory, Tree, send};

/// How often a starting server is asked whether it is ready.
const ASK_EVERY: Duration = Duration::from_millis(25);

/// From SIGTERM to SIGKILL.
const STOP_WITHIN: Duration = Duration::from_secs(40);

/// How to start a server. `{port}`, `{instances}` and `{slots}` in the arguments stand for the cell's.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    pub command: String,
    pub ready_within: Duration,
    /// What the server says goes here; without it, nowhere.
    pub log: Option<PathBuf>,
    pub api_key: Option<String>,
}

/// The size of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Size {
    pub instances: u32,
    pub slots: u32,
}

/// A server that answers.
#[derive(Debug)]
pub struct Running {
    pub endpoint: Endpoint,
    child: Option<Child>,
}

impl Launch {
    /// The words of the command with the cell's figures in them. Quotes group words, as in a shell;
    /// nothing else of a shell is understood.
    ///
    /// # Errors
    /// An open quote, or no word at all.
    pub fn words(&self, size: Size, port: u16) -> Result<Vec<String>, BenchError> {
        let words = split_words(&self.command)?;
        if words.is_empty() {
            return Err(BenchError::Usage("--exec names no program".into()));
        }
        if !self.command.contains("{port}") {
            return Err(BenchError::Usage("--exec has no {port} in it".into()));
        }
        let fill = |word: String| {
            word.replace("{port}", &port.to_string())
                .replace("{instances}", &size.instances.to_string())
                .replace("{slots}", &size.slots.to_string())
        };
        Ok(words.into_iter().map(fill).collect())
    }

    /// Starts the server on a free port and waits until it says that it is ready.
    ///
    /// # Errors
    /// It can't be started, ends, or is not ready in time.
    pub async fn start(&self, size: Size) -> Result<Running, BenchError> {
        let port = free_port()?;
        let words = self.words(size, port)?;
        let shown = words.join(" ");
        let failed = |reason: String| BenchError::Target(format!("{shown}: {reason}"));
        let output = || -> Result<Stdio, BenchError> {
            match &self.log {
                None => Ok(Stdio::null()),
                Some(path) => File::options()
                    .create(true)
                    .append(true)
                    .open(path)
                    .map(Stdio::from)
                    .map_err(|source| BenchError::File {
                        path: path.clone(),
                        source,
                    }),
            }
        };
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(output()?)
            .stderr(output()?)
            .kill_on_drop(true)
            // A Ctrl-C at the terminal is for the bench, which stops the server itself.
            .process_group(0)
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let endpoint = Endpoint::parse(&format!("http://127.0.0.1:{port}"), self.api_key.clone())?;
        let client = Client::new(endpoint.clone(), Patience::default(), false);
        let give_up = tokio::time::Instant::now() + self.ready_within;
        loop {
            if let Ok(Some(status)) = child.try_wait() {
                let words = self.last_words();
                return Err(failed(format!(
                    "it ended ({status}) before it was ready{words}"
                )));
            }
            if is_ready(&client, size).await {
                return Ok(Running {
                    endpoint,
                    child: Some(child),
                });
            }
            if tokio::time::Instant::now() >= give_up {
                return Err(failed(format!("not ready within {:?}", self.ready_within)));
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
    }
}

impl Launch {
    /// What the server said last, where it is written down.
    fn last_words(&self) -> String {
        let Some(path) = &self.log else {
            return "; --log FILE keeps what it says".into();
        };
        // Only ever a few lines of a server that did not live: reading it whole is no burden.
        let text = std::fs::read(path).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        last.map_or_else(String::new, |line| {
            let line: String = line.chars().take(300).collect();
            format!("; it said last: {line}")
        })
    }
}

impl Running {
    /// A server that somebody else started.
    #[must_use]
    pub fn foreign(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            child: None,
        }
    }

    /// The memory of the processes that the server has started, or, where it has started none, of itself.
    /// `None` for a foreign server.
    #[must_use]
    pub fn memory(&self) -> Option<Memory> {
        Some(Tree::below(self.child.as_ref()?.id()?).memory())
    }

    /// Stops it: SIGTERM, and SIGKILL where that does not do.
    ///
    /// # Errors
    /// It had to be killed.
    pub async fn stop(self) -> Result<(), BenchError> {
        let Some(mut child) = self.child else {
            return Ok(());
        };
        if let Some(pid) = child.id() {
            // It may have ended by itself, which the wait tells.
            let _ = send(pid, Some(Signal::SIGTERM));
        }
        match tokio::time::timeout(STOP_WITHIN, child.wait()).await {
            Ok(_) => Ok(()),
            Err(_) => {
                let _ = child.kill().await;
                Err(BenchError::Target(format!(
                    "it had to be killed {STOP_WITHIN:?} after SIGTERM"
                )))
            }
        }
    }
}

/// Ready, and where there is a `/status`, ready with all its instances: a half-started fleet is not what is to be measured.
async fn is_ready(client: &Client, size: Size) -> bool {
    let within = Duration::from_secs(5);
    let mut ready = false;
    for path in ["/ready", "/health", "/v1/models"] {
        match client.get(path, within).await {
            Ok((code, _)) if code == 404 => {}
            Ok((code, _)) => {
                ready = code == 200;
                break;
            }
            Err(_) => return false,
        }
    }
    if !ready {
        return false;
    }
    let Ok((code, body)) = client.get("/status", within).await else {
        return true;
    };
    let status: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    match status["instances"].as_array() {
        Some(instances) if code == 200 => {
            let ready = instances.iter().filter(|one| one["state"] == "ready");
            ready.count() >= size.instances as usize
        }
        _ => true,
    }
}

/// A port that is free now. Somebody could take it before the server does; then the server ends and says so.
fn free_port() -> Result<u16, BenchError> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(|source| BenchError::System {
            what: "find a free port",
            source,
        })
}

fn split_words(command: &str) -> Result<Vec<String>, BenchError> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for letter in command.chars() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(letter),
            (None, '"' | '\'') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, _) if letter.is_whitespace() => words.extend(word.take()),
            (None, _) => word.get_or_insert_default().push(letter),
        }
    }
    if quote.is_some() {
        return Err(BenchError::Usage(
            "--exec has a quote without an end".into(),
        ));
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(command: &str) -> Launch {
        Launch {
            command: command.into(),
            ready_within: Duration::from_secs(5),
            log: None,
            api_key: None,
        }
    }

    const SIZE: Size = Size {
        instances: 3,
        slots: 8,
    };

    #[test]
    fn a_command_is_filled_in_word_by_word() {
        let command = r#"./server --name "two words" --k={instances} -s {slots} '' --port {port}"#;
        assert_eq!(
            launch(command).words(SIZE, 99).unwrap(),
            [
                "./server",
                "--name",
                "two words",
                "--k=3",
                "-s",
                "8",
                "",
                "--port",
                "99"
            ]
        );
        assert!(launch("server 'x {port}").words(SIZE, 1).is_err());
        assert!(launch("server").words(SIZE, 1).is_err());
        assert!(launch(" ").words(SIZE, 1).is_err());
    }

    #[test]
    fn a_server_that_ends_at_once_is_told_with_its_status() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let error = runtime
            .block_on(launch("sh -c 'exit 78' {port}").start(SIZE))
            .unwrap_err();
        assert!(error.to_string().contains("78"), "{error}");
        let error = runtime
            .block_on(launch("/no/such/program {port}").start(SIZE))
            .unwrap_err();
        assert_eq!(error.exit_code(), 69);
    }
}
