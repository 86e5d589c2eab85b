//! From what a worker is to be to what is executed: program, arguments, environment.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use proto::{Generation, InstanceId};

use crate::devices::Device;
use crate::model::EngineKind;

/// What a worker inherits by name. Everything else of the dispatcher's environment, API keys
/// among it, stays here.
const KEPT: [&str; 5] = ["PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH"];

/// What a worker inherits by how the name begins: loader paths, device choice, backend settings.
const KEPT_PREFIXES: [&str; 3] = ["DYLD_", "CUDA_", "GGML_"];

/// Can wedge a Mac's GPU until the next boot (ml-explore/mlx 3830): it never reaches a worker.
const REFUSED: &str = "MLX_METAL_FAST_SYNCH";

/// One worker, as its command line says it.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerCommand {
    /// The `dispatcher-worker` binary.
    pub program: PathBuf,
    pub instance: InstanceId,
    pub generation: Generation,
    /// Where the dispatcher listens.
    pub socket: PathBuf,
    pub engine: EngineKind,
    pub model: PathBuf,
    pub slots: u32,
    /// Context of each slot in tokens.
    pub context_tokens: u32,
    pub threads: u32,
    /// Layers on the GPU; `None`: as the engine thinks best.
    pub gpu_layers: Option<u32>,
    /// The scripted engine's script.
    pub scripted: Option<String>,
    /// The only device that it may see; `None`: as the engine chooses.
    pub device: Option<Device>,
    /// Of this instance alone.
    pub environment: Vec<(String, String)>,
}

/// What is executed. Nothing is added to it but the pipes and the process group.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
}

impl WorkerCommand {
    /// The command for a child of this process, with this process's environment scrubbed.
    #[must_use]
    pub fn launch(&self) -> Launch {
        self.launch_from(std::env::vars_os(), std::process::id())
    }

    fn launch_from(
        &self,
        inherited: impl Iterator<Item = (OsString, OsString)>,
        parent_pid: u32,
    ) -> Launch {
        Launch {
            program: self.program.clone(),
            arguments: self.arguments(parent_pid),
            environment: self.environment(inherited),
        }
    }

    fn arguments(&self, parent_pid: u32) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = Vec::new();
        let mut add = |name: &str, value: &OsStr| {
            arguments.push(name.into());
            arguments.push(value.into());
        };
        add("--instance", self.instance.to_string().as_ref());
        add("--generation", self.generation.to_string().as_ref());
        add("--socket", self.socket.as_ref());
        add("--parent-pid", parent_pid.to_string().as_ref());
        add("--engine", self.engine.as_str().as_ref());
        add("--model", self.model.as_ref());
        add("--slots", self.slots.to_string().as_ref());
        add("--ctx-size", self.context_tokens.to_string().as_ref());
        add("--threads", self.threads.to_string().as_ref());
        if let Some(script) = &self.scripted {
            add("--scripted", script.as_ref());
        }
        if let Some(layers) = self.gpu_layers {
            add("--n-gpu-layers", layers.to_string().as_ref());
        }
        arguments
    }

    fn environment(
        &self,
        inherited: impl Iterator<Item = (OsString, OsString)>,
    ) -> Vec<(OsString, OsString)> {
        let mut environment: Vec<(OsString, OsString)> = inherited
            .filter(|(name, _)| name.to_str().is_some_and(is_kept))
            .collect();
        let threads = self.threads.to_string();
        let own = [
            // Otherwise ggml's abort starts a debugger on the dying process.
            ("GGML_NO_BACKTRACE", "1"),
            // Every BLAS that an engine may compute with, by its own name for it.
            ("OMP_NUM_THREADS", &threads),
            ("OPENBLAS_NUM_THREADS", &threads),
            ("VECLIB_MAXIMUM_THREADS", &threads),
        ];
        let extra = self
            .environment
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()));
        let device = self.device.as_ref().map_or(&[][..], Device::environment);
        let device = device.iter().map(|(name, value)| (*name, value.as_str()));
        // What is always so comes last: not even an instance's own settings replace it.
        for (name, value) in extra.chain(device).chain(own) {
            environment.retain(|(kept, _)| kept != name);
            if name != REFUSED {
                environment.push((name.into(), value.into()));
            }
        }
        environment
    }
}

pub(super) fn is_kept(name: &str) -> bool {
    KEPT.contains(&name) || KEPT_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> WorkerCommand {
        WorkerCommand {
            program: "/opt/bin/dispatcher-worker".into(),
            instance: InstanceId(1),
            generation: Generation(12),
            socket: "/run/d/link.sock".into(),
            engine: EngineKind::Llama,
            model: "/models/tiny model.gguf".into(),
            slots: 4,
            context_tokens: 4096,
            threads: 8,
            gpu_layers: Some(7),
            scripted: None,
            device: None,
            environment: Vec::new(),
        }
    }

    fn environment(command: &WorkerCommand, inherited: &[(&str, &str)]) -> Vec<(String, String)> {
        let inherited = inherited.iter().map(|(k, v)| (k.into(), v.into()));
        let mut found: Vec<_> = command
            .environment(inherited)
            .into_iter()
            .map(|(k, v)| (k.into_string().unwrap(), v.into_string().unwrap()))
            .collect();
        found.sort();
        found
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    #[test]
    fn the_command_line_is_the_one_that_the_worker_reads() {
        let mut command = command();
        let plain = "--instance 1 --generation 12 --socket /run/d/link.sock --parent-pid 99 \
             --engine llama --model /models/tiny\u{a0}model.gguf --slots 4 --ctx-size 4096 \
             --threads 8";
        let words = |text: &str| -> Vec<OsString> {
            text.split_ascii_whitespace()
                .map(|word| word.replace('\u{a0}', " ").into())
                .collect()
        };
        assert_eq!(
            command.arguments(99),
            words(&format!("{plain} --n-gpu-layers 7"))
        );
        command.scripted = Some("echo".into());
        assert_eq!(
            command.arguments(99),
            words(&format!("{plain} --scripted echo --n-gpu-layers 7"))
        );
    }

    #[test]
    fn secrets_and_strangers_stay_out_of_a_workers_environment() {
        let found = environment(
            &command(),
            &[
                ("PATH", "/bin"),
                ("DISPATCHER_API_KEY", "secret"),
                ("AWS_SECRET_ACCESS_KEY", "secret"),
                ("LD_PRELOAD", "/tmp/x.so"),
                ("MLX_METAL_FAST_SYNCH", "1"),
                ("DYLD_LIBRARY_PATH", "/opt/lib"),
                ("CUDA_VISIBLE_DEVICES", "0,1"),
                ("GGML_CUDA_FORCE_MMQ", "1"),
            ],
        );
        let expected = pairs(&[
            ("CUDA_VISIBLE_DEVICES", "0,1"),
            ("DYLD_LIBRARY_PATH", "/opt/lib"),
            ("GGML_CUDA_FORCE_MMQ", "1"),
            ("GGML_NO_BACKTRACE", "1"),
            ("OMP_NUM_THREADS", "8"),
            ("OPENBLAS_NUM_THREADS", "8"),
            ("PATH", "/bin"),
            ("VECLIB_MAXIMUM_THREADS", "8"),
        ]);
        assert_eq!(found, expected);
    }

    #[test]
    fn an_instances_own_settings_replace_what_is_inherited_but_not_what_is_always_so() {
        let mut command = command();
        command.environment = pairs(&[
            ("CUDA_VISIBLE_DEVICES", "3"),
            ("GGML_NO_BACKTRACE", "0"),
            ("MLX_METAL_FAST_SYNCH", "1"),
        ]);
        let found = environment(&command, &[("CUDA_VISIBLE_DEVICES", "0,1")]);
        let expected = pairs(&[
            ("CUDA_VISIBLE_DEVICES", "3"),
            ("GGML_NO_BACKTRACE", "1"),
            ("OMP_NUM_THREADS", "8"),
            ("OPENBLAS_NUM_THREADS", "8"),
            ("VECLIB_MAXIMUM_THREADS", "8"),
        ]);
        assert_eq!(found, expected);
    }
}
