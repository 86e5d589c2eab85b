//! `dispatcher chat`: a small terminal chat, with a running server or with one that is started for it.

use std::io::{self, BufRead as _, BufReader, IsTerminal as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::Args;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::VerbError;
use crate::ask;
use crate::cli::Settings;
use crate::config::Config;

/// Between two looks at a server that starts.
const LOOK: Duration = Duration::from_millis(100);
/// Without one word for so long, an answer is given up. The first may wait for the queue.
const SILENCE: Duration = Duration::from_secs(600);

#[derive(Clone, Debug, Default, Args)]
pub struct ChatArgs {
    /// Say this, show the answer, and end.
    #[arg(value_name = "WORDS")]
    pub words: Option<String>,
    /// The server to talk to, as host:port [default: the one that runs here, else one is started].
    #[arg(long, value_name = "HOST:PORT")]
    pub to: Option<String>,
    /// Tokens of one answer at most.
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub max_tokens: u32,
    /// What the model is to be.
    #[arg(long, value_name = "WORDS")]
    pub system: Option<String>,
}

/// A server of our own; it ends with the chat.
struct Started {
    child: Child,
    _folder: OwnFolder,
}

/// A folder that goes with its owner.
struct OwnFolder(std::path::PathBuf);

impl Drop for OwnFolder {
    fn drop(&mut self) {
        // What is left of it is in the temporary directory, and empty.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            // One that has ended already is as good as ended.
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        let _ = self.child.wait();
    }
}

/// Talks until the end of the input.
///
/// # Errors
/// Where there is no server and none can be started, or it answers with an error.
pub fn run(
    arguments: &ChatArgs,
    settings: &Settings,
    config: &Result<Config, crate::config::ConfigError>,
    run_directory: &Path,
) -> Result<(), VerbError> {
    let keys = config.as_ref().map(|config| config.api_keys.as_slice());
    let key = keys.ok().and_then(|keys| keys.first()).cloned();
    let mut own = None;
    let address = match (&arguments.to, ask::running(run_directory)) {
        (Some(address), _) => address.clone(),
        (None, Some(state)) => state.address,
        (None, None) => {
            if let Err(error) = config {
                return Err(VerbError::Ended(format!(
                    "no dispatcher runs, and none can be started: {error}"
                )));
            }
            let (started, address) = start(settings)?;
            own = Some(started);
            address
        }
    };
    let mut messages: Vec<Value> = Vec::new();
    if let Some(system) = &arguments.system {
        messages.push(json!({"role": "system", "content": system}));
    }
    let turn = |messages: &mut Vec<Value>, words: &str| {
        messages.push(json!({"role": "user", "content": words}));
        let said = answer(&address, key.as_deref(), messages, arguments.max_tokens)?;
        messages.push(json!({"role": "assistant", "content": said}));
        Ok::<(), VerbError>(())
    };
    if let Some(words) = &arguments.words {
        turn(&mut messages, words)?;
    } else {
        let terminal = io::stdin().is_terminal();
        if terminal {
            say(&format!(
                "talking to http://{address}; an empty line or Ctrl-D ends it\n"
            ));
        }
        loop {
            if terminal {
                say("> ");
            }
            let mut line = String::new();
            let read = io::stdin().lock().read_line(&mut line);
            if read.map_or(0, |bytes| bytes) == 0 || line.trim().is_empty() {
                break;
            }
            turn(&mut messages, line.trim())?;
        }
    }
    drop(own);
    Ok(())
}

/// Starts a server on a free port with what was typed, and waits until it is ready.
fn start(settings: &Settings) -> Result<(Started, String), VerbError> {
    let program = std::env::current_exe().unwrap_or_default();
    let folder = std::env::temp_dir().join(format!("dsp-chat-{}", std::process::id()));
    let failed = |path: &Path, cause| VerbError::File {
        path: path.to_owned(),
        cause,
    };
    std::fs::create_dir_all(&folder).map_err(|cause| failed(&folder, cause))?;
    let own_folder = OwnFolder(folder.clone());
    let log_path = folder.join("log");
    let log = std::fs::File::create(&log_path).map_err(|cause| failed(&log_path, cause))?;
    let run_dir = folder.join("run");
    let mut command = Command::new(&program);
    command.arg("serve");
    for (key, value) in settings.all_typed() {
        if !["port", "run-dir", "host"].contains(&key) {
            command.arg(format!("--{key}={value}"));
        }
    }
    let child = command
        .args(["--port", "0", "--host", "127.0.0.1", "--run-dir"])
        .arg(&run_dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .map_err(|cause| VerbError::Program {
            path: program,
            cause,
        })?;
    let mut started = Started {
        child,
        _folder: own_folder,
    };
    if io::stderr().is_terminal() {
        tell("starting a server for this chat\n");
    }
    loop {
        if let Ok(Some(status)) = started.child.try_wait() {
            let log = std::fs::read_to_string(&log_path).unwrap_or_default();
            let last = log.lines().last().unwrap_or_default().to_owned();
            return Err(VerbError::Ended(format!(
                "the server for this chat ended ({status}): {last}"
            )));
        }
        if let Some(state) = ask::running(&run_dir)
            && let Ok(status) = ask::status(&state.address)
            && status["ready"] == true
        {
            return Ok((started, state.address));
        }
        std::thread::sleep(LOOK);
    }
}

/// Asks for the next message, shows it as it comes, and returns it.
fn answer(
    address: &str,
    key: Option<&str>,
    messages: &[Value],
    max_tokens: u32,
) -> Result<String, VerbError> {
    let silent = |cause| VerbError::Silent {
        address: address.to_owned(),
        cause,
    };
    let body = json!({"messages": messages, "max_tokens": max_tokens, "stream": true}).to_string();
    let mut head = format!(
        "POST /v1/chat/completions HTTP/1.0\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n",
        body.len()
    );
    if let Some(key) = key {
        head.push_str(&format!("authorization: Bearer {key}\r\n"));
    }
    head.push_str("\r\n");
    let at: SocketAddr = address
        .parse()
        .map_err(|error| silent(io::Error::other(error)))?;
    let mut stream = TcpStream::connect(ask::reachable(at)).map_err(silent)?;
    stream.set_read_timeout(Some(SILENCE)).map_err(silent)?;
    stream
        .write_all(format!("{head}{body}").as_bytes())
        .map_err(silent)?;
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    let mut read = |line: &mut String| {
        line.clear();
        reader.read_line(line).map_err(silent)
    };
    read(&mut line)?;
    let good = line.split(' ').nth(1) == Some("200");
    while read(&mut line)? > 0 && !line.trim().is_empty() {}
    let mut said = String::new();
    let mut rest = String::new();
    while read(&mut line)? > 0 {
        if !good {
            rest.push_str(&line);
            continue;
        }
        let Some(event) = line.strip_prefix("data: ") else {
            continue;
        };
        if event.trim() == "[DONE]" {
            say("\n");
            return Ok(said);
        }
        let event: Value = serde_json::from_str(event).unwrap_or_default();
        if let Some(words) = event["error"]["message"].as_str() {
            return Err(VerbError::Ended(format!("the answer broke off: {words}")));
        }
        if let Some(words) = event["choices"][0]["delta"]["content"].as_str() {
            say(words);
            said.push_str(words);
        }
    }
    if good {
        return Err(VerbError::Ended("the answer broke off".to_owned()));
    }
    let error: Value = serde_json::from_str(&rest).unwrap_or_default();
    let words = error["error"]["message"].as_str().unwrap_or(rest.trim());
    Err(VerbError::Ended(format!("the server refused: {words}")))
}

fn say(words: &str) {
    let mut out = io::stdout();
    // A reader that went away ends the chat with the next line.
    let _ = out.write_all(words.as_bytes()).and_then(|()| out.flush());
}

fn tell(words: &str) {
    let _ = io::stderr().write_all(words.as_bytes());
}
