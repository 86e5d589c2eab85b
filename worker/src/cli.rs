//! The arguments that the dispatcher starts a worker with.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;
use proto::{Generation, InstanceId};

use crate::engine::LoadOptions;
use crate::engine::scripted::{Script, ScriptError};
use crate::engine::select::{BUILT_IN, EngineKind, Selection};

/// The one argument of a worker that is asked which engines it has, and that serves nobody.
pub const ENGINES: &str = "--engines";

/// What is said to the arguments `--engines` (the program's name left out): the engines that this
/// build has, one a line. `None` to any others.
#[must_use]
pub fn engines(mut arguments: impl Iterator<Item = OsString>) -> Option<String> {
    let asked = arguments.next().is_some_and(|first| first == ENGINES);
    let lines = BUILT_IN.iter().map(|kind| format!("{}\n", kind.as_str()));
    (asked && arguments.next().is_none()).then(|| lines.collect())
}

/// One engine behind one socket. Started by `dispatcher`, which hands a one-time token of 32 bytes
/// on standard input and keeps that pipe open: its end is the worker's end.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "dispatcher-worker",
    version,
    after_help = "`dispatcher-worker --engines` prints the engines that this build has, one a line."
)]
pub struct Arguments {
    /// The place in the pool that this process fills.
    #[arg(long, value_name = "N")]
    pub instance: u32,
    /// Which incarnation of that place this is.
    #[arg(long, value_name = "G")]
    pub generation: u64,
    /// The socket that the dispatcher listens on.
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// The dispatcher's process id.
    #[arg(long, value_name = "PID")]
    pub parent_pid: i32,
    /// Which runtime holds the model.
    #[arg(long, value_enum)]
    pub engine: EngineKind,
    /// The model's file or folder.
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// The name under which the model is served; the file's or folder's own by default.
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Sequences that one step decodes.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub slots: u32,
    /// Tokens of one sequence, prompt and output together; 0: what the model was trained on.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub ctx_size: u32,
    /// Compute threads of a CPU engine; 0: one a core.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub threads: u32,
    /// Layers to put on a GPU, where there is one; -1: all.
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    pub n_gpu_layers: i32,
    /// What the scripted engine is to do, as `key=value,…`.
    #[arg(long, value_name = "SPEC")]
    pub scripted: Option<String>,
}

impl Arguments {
    /// The place and its incarnation.
    #[must_use]
    pub fn place(&self) -> (InstanceId, Generation) {
        (InstanceId(self.instance), Generation(self.generation))
    }

    /// The engine that is asked for.
    ///
    /// # Errors
    ///
    /// The script has a mistake.
    pub fn selection(&self) -> Result<Selection, ScriptError> {
        Ok(match self.engine {
            EngineKind::Llama => Selection::Llama,
            EngineKind::Mlx => Selection::Mlx,
            EngineKind::Scripted => {
                let script: Script = self.scripted.as_deref().unwrap_or_default().parse()?;
                Selection::Scripted(Box::new(script.for_worker(self.instance, self.generation)))
            }
        })
    }

    /// What the engine is to load.
    #[must_use]
    pub fn load_options(&self) -> LoadOptions {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        LoadOptions {
            model: self.model.clone(),
            name: self.served_model_name.clone(),
            slots: self.slots,
            context_tokens: self.ctx_size,
            threads: match self.threads {
                0 => u32::try_from(cores()).unwrap_or(1),
                threads => threads,
            },
            gpu_layers: u32::try_from(self.n_gpu_layers).ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(extra: &[&str]) -> Result<Arguments, clap::Error> {
        let required = [
            "dispatcher-worker",
            "--instance",
            "3",
            "--generation",
            "8",
            "--socket",
            "/s",
            "--parent-pid",
            "1",
            "--engine",
            "scripted",
            "--model",
            "dummy",
        ];
        Arguments::try_parse_from(required.iter().chain(extra))
    }

    #[test]
    fn the_dispatchers_arguments_are_understood() {
        let arguments = parse(&["--slots", "4", "--n-gpu-layers", "0", "--threads", "2"]).unwrap();
        assert_eq!(arguments.place(), (InstanceId(3), Generation(8)));
        let options = arguments.load_options();
        assert_eq!(
            (options.slots, options.gpu_layers, options.threads),
            (4, Some(0), 2)
        );
    }

    #[test]
    fn a_worker_that_is_asked_names_the_engines_of_its_build() {
        let asked = |words: &[&str]| engines(words.iter().map(OsString::from));
        let said = asked(&["--engines"]).unwrap();
        let said: Vec<&str> = said.lines().collect();
        assert_eq!(said.contains(&"llama"), cfg!(feature = "llama"));
        assert_eq!(said.contains(&"mlx"), cfg!(feature = "mlx"));
        assert_eq!(said.last(), Some(&"scripted"));
        assert_eq!(asked(&["--engines", "--instance"]), None);
        assert_eq!(asked(&["--engine", "llama"]), None);
        assert_eq!(asked(&[]), None);
    }

    #[test]
    fn minus_one_layer_on_the_gpu_is_all_of_them() {
        for extra in [&["--n-gpu-layers=-1"][..], &["--n-gpu-layers", "-1"], &[]] {
            assert_eq!(parse(extra).unwrap().load_options().gpu_layers, None);
        }
    }

    #[test]
    fn a_worker_without_slots_is_refused() {
        assert!(parse(&["--slots", "0"]).is_err());
    }

    #[test]
    fn a_script_with_a_mistake_is_refused() {
        let arguments = parse(&["--scripted", "speed=1"]).unwrap();
        assert!(arguments.selection().is_err());
    }
}
