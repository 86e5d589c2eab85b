//! What the user typed: the command line as text, before anything is decided.

use std::ffi::OsString;
use std::fmt::Write as _;

use clap::{Args as ClapArgs, CommandFactory as _, Parser, Subcommand};

use crate::service::{Manager, ServiceVerb};
use crate::verbs::chat::ChatArgs;
use crate::verbs::status::StatusArgs;

/// One computer, one LLM server: K isolated workers behind one queue.
#[derive(Clone, Debug, Default, Parser)]
#[command(
    name = "dispatcher",
    version,
    after_help = "Every setting may also be given as an environment variable (DISPATCHER_, then the flag's name \
        in capitals with _ for -; DISPATCHER_CTX_SIZE=2048) or in the configuration file (TOML, the flag's name as \
        the key; ctx-size = 2048; `dispatcher config init` writes one). A flag wins over the environment, the environment over the file, the file over \
        the default. `dispatcher config show` prints what holds and where it came from.\n\n\
        Exit codes: 0 asked to end, and did; 69 no dispatcher runs there; 70 a fault of dispatcher; 71 the machine refused something; \
        78 what was asked for cannot work, and trying again will not help. NO_COLOR is honoured.",
    disable_help_subcommand = true
)]
pub struct Args {
    #[command(subcommand)]
    pub verb: Option<Verb>,
    #[command(flatten)]
    pub settings: Settings,
}

#[derive(Clone, Debug, Subcommand)]
pub enum Verb {
    /// Serve (the default).
    Serve,
    /// Talk with the model in this terminal.
    Chat(ChatArgs),
    /// How the running dispatcher stands: instances, queue, latency, events.
    Status(StatusArgs),
    /// Look at the machine and the installation, and say what to do.
    Doctor {
        /// As JSON.
        #[arg(long)]
        json: bool,
        /// Measure the read bandwidth of the memory now (about a second), and keep it.
        #[arg(long)]
        bus: bool,
    },
    /// Have the running dispatcher read its configuration again and replace its workers.
    Reload,
    /// The settings: what they come to, a file to begin with.
    Config {
        #[command(subcommand)]
        verb: ConfigVerb,
    },
    /// Say what K instances of so many slots would give for a model, from its header and this machine's memory.
    Plan(crate::plan::cli::PlanArgs),
    /// Run as a service of launchd or systemd.
    Service {
        #[command(subcommand)]
        verb: ServiceVerb,
    },
    /// Measure: hands over to dispatcher-bench.
    #[command(disable_help_flag = true)]
    Bench {
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "WORDS"
        )]
        words: Vec<OsString>,
    },
    /// Print completions for a shell.
    Completions {
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Print the manual page.
    Man,
    /// Print the version.
    Version,
}

#[derive(Clone, Copy, Debug, Subcommand)]
pub enum ConfigVerb {
    /// Check all settings, the model and the memory, and print every value with its source.
    Show {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// The same look, but say only whether it could serve.
    Check,
    /// Write a file with every setting in it, explained and commented out.
    Init {
        /// Also over a file that is there.
        #[arg(long)]
        force: bool,
    },
    /// Print the file's JSON schema, for editors.
    Schema,
}

/// The verbs as the help groups them; one that is in no group stands in the last.
const GROUPS: [(&str, &[&str]); 5] = [
    ("Serve", &["serve", "reload", "service"]),
    ("Use", &["chat", "bench"]),
    ("Look", &["status", "doctor", "plan"]),
    ("Set up", &["config"]),
    ("Other", &[]),
];

/// The command line with its verbs in groups, which clap has for flags alone: it is told to list none,
/// and the list stands before the flags.
#[must_use]
pub fn command() -> clap::Command {
    let command = Args::command();
    let mut lines = vec![String::new(); GROUPS.len()];
    for verb in command.get_subcommands() {
        let name = verb.get_name();
        let group = GROUPS.iter().position(|(_, names)| names.contains(&name));
        let about = verb
            .get_about()
            .map(ToString::to_string)
            .unwrap_or_default();
        // Writing to a String cannot fail.
        let _ = writeln!(
            lines[group.unwrap_or(GROUPS.len() - 1)],
            "  {name:<12} {about}"
        );
    }
    let groups = GROUPS.iter().zip(&lines);
    let groups: Vec<_> = groups
        .map(|((name, _), lines)| format!("{name}:\n{lines}"))
        .collect();
    command
        .mut_subcommands(|verb| verb.hide(true))
        .override_usage("dispatcher [OPTIONS] [COMMAND]")
        .before_help(groups.join("\n"))
        .before_long_help(groups.join("\n"))
        .help_template(
            "{about-with-newline}\n{usage-heading} {usage}\n\n{before-help}{all-args}{after-help}",
        )
}

/// Every setting, as typed. Meaning and bounds are `config`'s.
#[derive(Clone, Debug, Default, ClapArgs)]
pub struct Settings {
    /// A TOML file with settings [default: dispatcher/dispatcher.toml in the user's configuration directory, if it is there].
    #[arg(long, global = true, value_name = "FILE", help_heading = "Settings")]
    pub config: Option<String>,

    /// `llama` or `mlx`; without it the model's kind decides.
    #[arg(long, global = true, value_name = "NAME", help_heading = "Model")]
    pub engine: Option<String>,
    /// A GGUF file or a model folder: a path, or a name in the models directory. Without it, the only one there.
    #[arg(
        long,
        short,
        global = true,
        value_name = "MODEL",
        help_heading = "Model"
    )]
    pub model: Option<String>,
    /// Where models are looked for [default: ./models where it exists, else the user's data directory].
    #[arg(long, global = true, value_name = "DIR", help_heading = "Model")]
    pub models_dir: Option<String>,
    /// The model's name in the API [default: the file's or folder's name].
    #[arg(long, global = true, value_name = "NAME", help_heading = "Model")]
    pub served_model_name: Option<String>,

    /// Worker processes, each with the whole model [default: 1].
    #[arg(long, global = true, value_name = "K", help_heading = "Size")]
    pub instances: Option<String>,
    /// Sequences that one instance decodes together [default: as many as memory allows, at most 8].
    #[arg(
        long,
        visible_alias = "parallel",
        global = true,
        value_name = "N",
        help_heading = "Size"
    )]
    pub slots: Option<String>,
    /// Tokens of one request, prompt and output together [default: the model's, at most 4096].
    #[arg(
        long,
        short = 'c',
        global = true,
        value_name = "TOKENS",
        help_heading = "Size"
    )]
    pub ctx_size: Option<String>,
    /// Threads of one instance [default: cores divided by instances, at least 1].
    #[arg(long, short, global = true, value_name = "N", help_heading = "Size")]
    pub threads: Option<String>,
    /// Layers that go to the GPU [default: the engine's].
    #[arg(
        long,
        visible_alias = "gpu-layers",
        global = true,
        value_name = "N",
        help_heading = "Size"
    )]
    pub n_gpu_layers: Option<String>,
    /// GPUs that instances are given in turn, such as 0,1: each worker sees its own alone [default: the engine chooses].
    #[arg(long, global = true, value_name = "LIST", help_heading = "Size")]
    pub devices: Option<String>,
    /// Memory that all instances may take together, such as 12GiB [default: 90 % of the machine's or the cgroup's].
    #[arg(long, global = true, value_name = "SIZE", help_heading = "Size")]
    pub memory_limit: Option<String>,

    /// Address to listen on [default: 127.0.0.1].
    #[arg(long, global = true, value_name = "ADDRESS", help_heading = "Front")]
    pub host: Option<String>,
    /// Port to listen on; 0 takes a free one [default: 8080].
    #[arg(long, global = true, value_name = "PORT", help_heading = "Front")]
    pub port: Option<String>,
    /// A key that clients must send; may be repeated. Others can read a command line: prefer the environment or a file.
    #[arg(long, global = true, value_name = "KEY", help_heading = "Front")]
    pub api_key: Vec<String>,
    /// A file of such keys, one a line.
    #[arg(long, global = true, value_name = "FILE", help_heading = "Front")]
    pub api_key_file: Option<String>,

    /// Requests that may wait [default: 1024]; more get 429.
    #[arg(long, global = true, value_name = "N", help_heading = "Queue")]
    pub queue: Option<String>,
    /// Bytes that waiting requests may hold together [default: 256MiB].
    #[arg(long, global = true, value_name = "SIZE", help_heading = "Queue")]
    pub queue_bytes: Option<String>,
    /// Estimated tokens that waiting requests may ask for together [default: 16777216].
    #[arg(long, global = true, value_name = "N", help_heading = "Queue")]
    pub queue_tokens: Option<String>,
    /// Longest wait for a slot [default: 10m]; longer gets 504.
    #[arg(long, global = true, value_name = "TIME", help_heading = "Queue")]
    pub queue_timeout: Option<String>,
    /// A waiting request rises one priority class for each of these it has waited [default: 30s].
    #[arg(long, global = true, value_name = "TIME", help_heading = "Queue")]
    pub priority_aging: Option<String>,

    /// On SIGTERM, how long running requests may still run [default: 30s].
    #[arg(long, global = true, value_name = "TIME", help_heading = "Supervision")]
    pub drain_timeout: Option<String>,
    /// On a reload, how long a worker's requests may still run before they go on elsewhere [default: 30s].
    #[arg(long, global = true, value_name = "TIME", help_heading = "Supervision")]
    pub replace_timeout: Option<String>,
    /// Crashes in the crash window after which an instance is parked [default: 5].
    #[arg(long, global = true, value_name = "N", help_heading = "Supervision")]
    pub max_crashes: Option<String>,
    /// The window in which crashes are counted [default: 1m].
    #[arg(long, global = true, value_name = "TIME", help_heading = "Supervision")]
    pub crash_window: Option<String>,
    /// Workers that may be killed from outside under one request before it runs alone [default: 5].
    #[arg(long, global = true, value_name = "N", help_heading = "Supervision")]
    pub suspect_after: Option<String>,
    /// How long a worker with work may go without a step before it is replaced; ten of its longest steps, if longer [default: 30s].
    #[arg(long, global = true, value_name = "TIME", help_heading = "Supervision")]
    pub stall_after: Option<String>,
    /// From SIGTERM to SIGKILL of a worker [default: 5s].
    #[arg(long, global = true, value_name = "TIME", help_heading = "Supervision")]
    pub worker_grace: Option<String>,

    /// Where sockets and process records go [default: one of its own for each port].
    #[arg(long, global = true, value_name = "DIR", help_heading = "Process")]
    pub run_dir: Option<String>,
    /// The worker program [default: dispatcher-worker beside this program].
    #[arg(long, global = true, value_name = "FILE", help_heading = "Process")]
    pub worker: Option<String>,
    /// `text`, `json`, or `auto`: text on a terminal, JSON elsewhere [default: auto].
    #[arg(long, global = true, value_name = "FORMAT", help_heading = "Process")]
    pub log_format: Option<String>,
    /// What started this: a mistake in the configuration then must not end in a loop of restarts, and the
    /// settings come from the file alone.
    #[arg(
        long,
        global = true,
        value_name = "MANAGER",
        value_enum,
        help_heading = "Process"
    )]
    pub service_manager: Option<Manager>,
    /// How long a service manager waits from SIGTERM to SIGKILL; the drain timeout is cut to fit.
    #[arg(long, global = true, value_name = "TIME", help_heading = "Process")]
    pub stop_limit: Option<String>,

    /// The scripted engine's script, for tests.
    #[arg(long, global = true, value_name = "SPEC", hide = true)]
    pub scripted: Option<String>,
}

impl Settings {
    /// The first setting that was typed, if any was. Where settings come from is none.
    #[must_use]
    pub fn first_typed(&self) -> Option<&'static str> {
        if !self.api_key.is_empty() {
            return Some("api-key");
        }
        let mut keys = crate::config::KEYS.into_iter();
        keys.find(|key| self.typed(key).is_some())
    }

    /// Each setting that was typed, with its text.
    pub fn all_typed(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let keys = self.api_key.iter().map(|key| ("api-key", key.as_str()));
        let others = crate::config::KEYS.into_iter();
        let config = self.config.as_deref().map(|path| ("config", path));
        keys.chain(others.filter_map(|key| Some((key, self.typed(key)?))))
            .chain(config)
    }

    /// What was typed for the setting `key`, if anything.
    #[must_use]
    pub fn typed(&self, key: &str) -> Option<&str> {
        let value = match key {
            "engine" => &self.engine,
            "model" => &self.model,
            "models-dir" => &self.models_dir,
            "served-model-name" => &self.served_model_name,
            "instances" => &self.instances,
            "slots" => &self.slots,
            "ctx-size" => &self.ctx_size,
            "threads" => &self.threads,
            "n-gpu-layers" => &self.n_gpu_layers,
            "devices" => &self.devices,
            "memory-limit" => &self.memory_limit,
            "host" => &self.host,
            "port" => &self.port,
            "api-key-file" => &self.api_key_file,
            "queue" => &self.queue,
            "queue-bytes" => &self.queue_bytes,
            "queue-tokens" => &self.queue_tokens,
            "queue-timeout" => &self.queue_timeout,
            "priority-aging" => &self.priority_aging,
            "drain-timeout" => &self.drain_timeout,
            "replace-timeout" => &self.replace_timeout,
            "max-crashes" => &self.max_crashes,
            "crash-window" => &self.crash_window,
            "suspect-after" => &self.suspect_after,
            "stall-after" => &self.stall_after,
            "worker-grace" => &self.worker_grace,
            "run-dir" => &self.run_dir,
            "worker" => &self.worker,
            "stop-limit" => &self.stop_limit,
            "log-format" => &self.log_format,
            "scripted" => &self.scripted,
            _ => return None,
        };
        value.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn every_setting_typed_is_found_by_its_key() {
        let command = Args::command();
        for argument in command.get_arguments() {
            let key = argument.get_long().unwrap();
            // These are lists, or say where settings are, or who asks.
            if ["api-key", "config", "help", "service-manager", "version"].contains(&key) {
                continue;
            }
            let args = Args::parse_from(["dispatcher", &format!("--{key}"), "17"]);
            assert_eq!(args.settings.typed(key), Some("17"), "--{key}");
        }
    }

    #[test]
    fn settings_may_stand_before_and_after_the_verb() {
        let before = Args::parse_from(["dispatcher", "--instances", "3", "config", "show"]);
        let after = Args::parse_from(["dispatcher", "config", "show", "--instances", "3"]);
        assert_eq!(before.settings.typed("instances"), Some("3"));
        assert_eq!(after.settings.typed("instances"), Some("3"));
    }
}
