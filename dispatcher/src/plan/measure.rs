//! `plan --measure`: loads the model in a server of its own and times its steps at a few batch sizes.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::blocking::ask;
use super::calibration::{Calibration, STEPS_MIN, points, prefill_s_per_token};
use super::curve::Curve;
use super::error::PlanError;
use super::model::ModelFacts;
use crate::bus::StepTimes;
use crate::bus::store::now;
use crate::config::Sizing;
use crate::state::StateFile;

/// A model may take so long to load and warm up. The timing's own bound begins afterwards.
const LOAD_MAX: Duration = Duration::from_secs(600);
/// No further batch size is begun after so long.
const TIMING_MAX: Duration = Duration::from_secs(40);
/// Of one request.
const REQUEST_MAX: Duration = Duration::from_secs(300);
/// Between two looks at a server that starts.
const PAUSE: Duration = Duration::from_millis(100);
/// A status shows what happened so long ago, at the latest.
const SETTLE: Duration = Duration::from_millis(400);
/// Batch sizes that are timed, as far as memory allows.
const BATCHES: [u32; 5] = [1, 2, 4, 8, 16];
/// Batch sizes at which two instances are timed beside each other.
const CROWDED_BATCHES: [u32; 2] = [1, 4];
/// Words of a prompt, and of the prompt that prefill is timed with.
const PROMPT_WORDS: u32 = 16;
const LONG_PROMPT_WORDS: u32 = 128;
/// Words that every tokeniser for English has as one token.
const WORDS: [&str; 29] = [
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are",
    "as", "with", "his", "they", "at", "be", "this", "have", "from", "or", "one", "had", "by",
    "but", "not",
];
/// Tokens of each timed request: as many as a batch needs seconds for, within bounds.
const TIMED_S: f64 = 1.5;
const OUTPUT_MIN: f64 = 48.0;
const OUTPUT_MAX: f64 = 192.0;
/// Tokens of a slot: the longest prompt in the worst tokeniser, and the longest output.
const CONTEXT_TOKENS: u32 = 1024;

/// Times the steps of `model`. `tell` gets a line for each thing that begins.
///
/// # Errors
/// Where no server can be started, or it does not answer.
pub(super) fn measure(
    model: &ModelFacts,
    sizing: &Sizing,
    slots_max: u32,
    two_fit: bool,
    tell: &mut dyn FnMut(&str),
) -> Result<Calibration, PlanError> {
    let load_before = sysinfo::System::load_average().ok().map(|load| load.one);
    let batches: Vec<u32> = BATCHES.into_iter().filter(|n| *n <= slots_max).collect();
    let slots = batches.last().copied().unwrap_or(1);
    tell(&format!("loading {} with {slots} slots", model.name));
    let server = Server::start(model, sizing, 1, slots)?;
    let deadline = Instant::now() + TIMING_MAX;
    server.generate(1, PROMPT_WORDS, 8)?;
    let prefill = server.during(|| server.generate(1, LONG_PROMPT_WORDS, 1))?;
    let mut timed: Vec<(u32, f64)> = Vec::new();
    for batch in batches {
        if Instant::now() >= deadline {
            break;
        }
        tell(&format!("timing steps of {batch}"));
        let last = timed.last().map(|(_, seconds)| *seconds);
        timed.extend(server.time(batch, 1, last)?);
    }
    server.stop()?;
    let mut crowds = Vec::new();
    if two_fit && sizing.devices.len() < 2 && Instant::now() < deadline {
        tell("timing two instances beside each other");
        let server = Server::start(model, sizing, 2, CROWDED_BATCHES[1])?;
        server.generate(2, PROMPT_WORDS, 8)?;
        let mut factors = Vec::new();
        for batch in CROWDED_BATCHES {
            let Some((_, alone)) = timed.iter().find(|(known, _)| *known == batch) else {
                continue;
            };
            if let Some((_, beside)) = server.time(batch, 2, Some(*alone * 2.0))? {
                factors.push(beside / (2.0 * alone));
            }
        }
        server.stop()?;
        if !factors.is_empty() {
            crowds.push((2, factors.iter().sum::<f64>() / factors.len() as f64));
        }
    }
    let curve = Curve::measured(timed, prefill_s_per_token(&prefill), crowds);
    Ok(Calibration {
        model: model.name.clone(),
        curve: curve.ok_or_else(|| problem("no step was seen often enough"))?,
        origin: "plan --measure".to_owned(),
        load_before,
        unix_s: now(),
    })
}

fn problem(words: impl Into<String>) -> PlanError {
    PlanError::Measure {
        problem: words.into(),
    }
}

/// A dispatcher for this purpose alone; ended when dropped.
struct Server {
    child: Child,
    folder: PathBuf,
    address: String,
    model: String,
}

impl Server {
    fn start(
        model: &ModelFacts,
        sizing: &Sizing,
        instances: u32,
        slots: u32,
    ) -> Result<Self, PlanError> {
        let folder = std::env::temp_dir().join(format!("dispatcher-plan-{}", std::process::id()));
        let failed = |cause: io::Error| problem(format!("start a server: {cause}"));
        fs::create_dir_all(&folder).map_err(failed)?;
        let log = File::create(folder.join("log")).map_err(failed)?;
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        // Settings of the real server, its API keys among them, are not for this one.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("DISPATCHER_") {
                command.env_remove(name);
            }
        }
        let context = model.context_length.unwrap_or(CONTEXT_TOKENS);
        command
            .args(["serve", "--port", "0", "--log-format", "text"])
            .args(["--instances", &instances.to_string()])
            .args(["--slots", &slots.to_string()])
            .args(["--ctx-size", &context.min(CONTEXT_TOKENS).to_string()])
            .arg("--model")
            .arg(&model.path)
            .args(["--engine", model.engine.as_str()])
            .arg("--run-dir")
            .arg(folder.join("run"))
            .arg("--worker")
            .arg(&sizing.worker);
        if let Some(threads) = sizing.threads {
            let each = (threads / instances).max(1);
            command.args(["--threads", &each.to_string()]);
        }
        if !sizing.devices.is_empty() {
            let list: Vec<String> = sizing
                .devices
                .iter()
                .map(|device| device.index.to_string())
                .collect();
            command.args(["--devices", &list.join(",")]);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(failed)?)
            .stderr(log)
            .spawn()
            .map_err(failed)?;
        let mut server = Self {
            child,
            folder,
            address: String::new(),
            model: model.name.clone(),
        };
        server.await_ready()?;
        Ok(server)
    }

    fn await_ready(&mut self) -> Result<(), PlanError> {
        let deadline = Instant::now() + LOAD_MAX;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(self.ended(&status.to_string()));
            }
            if let Ok(state) = StateFile::read(&self.folder.join("run")) {
                self.address = state.address;
                if let Ok((200, _)) = ask(&self.address, "/ready", None, REQUEST_MAX) {
                    // All instances, not only the first.
                    let status = self.status()?;
                    let instances = status["instances"].as_array();
                    if instances.is_some_and(|all| all.iter().all(|one| one["state"] == "ready")) {
                        return Ok(());
                    }
                }
            }
            if Instant::now() >= deadline {
                return Err(problem(format!("{} did not become ready", self.model)));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// The last thing that the server said, which says why.
    fn ended(&self, status: &str) -> PlanError {
        let log = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        let last = log.lines().rev().find(|line| !line.trim().is_empty());
        problem(format!(
            "the server ended ({status}): {}",
            last.unwrap_or("it said nothing")
        ))
    }

    fn status(&self) -> Result<Value, PlanError> {
        match ask(&self.address, "/status", None, REQUEST_MAX) {
            Ok((200, status)) => Ok(status),
            Ok((code, _)) => Err(problem(format!("the server's status is {code}"))),
            Err(cause) => Err(problem(format!("ask the server: {cause}"))),
        }
    }

    fn step_times(&self) -> Result<StepTimes, PlanError> {
        std::thread::sleep(SETTLE);
        let times = self.status()?["step_times"].take();
        serde_json::from_value(times).map_err(|cause| problem(format!("its status: {cause}")))
    }

    /// The steps that happened while `work` was done.
    fn during(&self, work: impl FnOnce() -> Result<(), PlanError>) -> Result<StepTimes, PlanError> {
        let before = self.step_times()?;
        work()?;
        Ok(self.step_times()?.since(&before))
    }

    /// Seconds of a step of `batch` rows on each of `instances`; `expected`: about so many.
    fn time(
        &self,
        batch: u32,
        instances: u32,
        expected: Option<f64>,
    ) -> Result<Option<(u32, f64)>, PlanError> {
        let wanted = expected.map_or(OUTPUT_MIN, |seconds| TIMED_S / seconds);
        let output = tokens(wanted.clamp(OUTPUT_MIN, OUTPUT_MAX));
        // Seats fill one after another: with more rows there are more steps before all sit.
        let output = output + batch * 4;
        let seen = self.during(|| self.generate(batch * instances, PROMPT_WORDS, output))?;
        let mut found = points(&seen, STEPS_MIN).into_iter();
        Ok(found.find(|(rows, _)| *rows == batch))
    }

    /// Runs `streams` requests at once, each of its own prompt.
    fn generate(&self, streams: u32, words: u32, output_tokens: u32) -> Result<(), PlanError> {
        let one = |stream: u32| -> Result<(), PlanError> {
            // Not two prompts alike, so that none is found in a cache.
            let prompt: Vec<&str> = (0..words)
                .map(|word| WORDS[((stream + 1) * (word + 1)) as usize % WORDS.len()])
                .collect();
            let body = json!({
                "prompt": prompt.join(" "),
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": true,
                "cache_prompt": false,
            });
            match ask(&self.address, "/v1/completions", Some(&body), REQUEST_MAX) {
                Ok((200, _)) => Ok(()),
                Ok((code, answer)) => Err(problem(format!(
                    "a request was answered {code}: {}",
                    answer["error"]["message"].as_str().unwrap_or("")
                ))),
                Err(cause) => Err(problem(format!("a request failed: {cause}"))),
            }
        };
        std::thread::scope(|scope| {
            let asked: Vec<_> = (0..streams)
                .map(|stream| scope.spawn(move || one(stream)))
                .collect();
            asked.into_iter().try_for_each(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(problem("a client thread failed")))
            })
        })
    }

    fn stop(mut self) -> Result<(), PlanError> {
        self.terminate();
        self.child
            .wait()
            .map(|_| ())
            .map_err(|cause| problem(format!("end the server: {cause}")))
    }

    fn terminate(&self) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            // One that is gone already needs no signal.
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.terminate();
            // It ends by itself within its drain.
            let _ = self.child.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "clamped to a few hundred before"
)]
fn tokens(count: f64) -> u32 {
    count as u32
}
