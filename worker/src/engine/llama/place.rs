//! Where the model runs: decided from what was asked and what is there, and checked after the load.

/// Tokens of one step on a CPU. From 64 rows on ggml's attention is another kernel there, whose
/// logits for the same row differ by 0.6 and more (p99.9, Q4_1): below, a row's arithmetic does not
/// depend on how many others are in the step. Few CPUs prefill more in the time a chunk may take.
const STEP_TOKENS_CPU: u32 = 63;
/// Tokens of one step on a GPU.
const STEP_TOKENS_GPU: u32 = 1024;
/// More layers than any model has: all of them.
const ALL_LAYERS: u32 = 100_000;

/// What is asked for, and with what it was built.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    /// Layers to put on a GPU; `None`: all where there is one.
    pub(super) gpu_layers: Option<u32>,
    pub(super) threads: u32,
    /// This build was made for a GPU, so that running without one is a fault and not a choice.
    pub(super) built_for_gpu: bool,
}

/// Where the model is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// For people: `CUDA0: NVIDIA H200`.
    words: String,
    pub(super) gpu_layers: u32,
    pub(super) step_tokens: u32,
    /// Threads that sample side by side. On a CPU engine they would only compete with its own.
    pub(super) sampling_lanes: usize,
}

impl Place {
    /// `gpus`: the GPUs that llama.cpp can use, in words.
    ///
    /// # Errors
    /// A GPU is wanted and there is none: the CPU is no substitute that nobody asked for.
    pub(super) fn decide(asked: Asked, gpus: &[String]) -> Result<Self, String> {
        let threads = asked.threads;
        let wants_none = asked.gpu_layers == Some(0);
        if wants_none || gpus.is_empty() {
            let fault = match asked.gpu_layers {
                Some(0) => None,
                Some(layers) => Some(format!("{layers} layers were to go to a GPU")),
                None if asked.built_for_gpu => Some("this worker was built for a GPU".to_owned()),
                None => None,
            };
            if let Some(fault) = fault {
                return Err(format!(
                    "{fault}, but llama.cpp finds none that it can use: look whether `nvidia-smi` \
                     lists it, at CUDA_VISIBLE_DEVICES, and whether this worker's llama.cpp has a \
                     GPU backend (docs/GPU.md); with `--n-gpu-layers 0` it runs on the CPU"
                ));
            }
            let plural = if threads == 1 { "" } else { "s" };
            return Ok(Self {
                words: format!("CPU ({threads} thread{plural})"),
                gpu_layers: 0,
                step_tokens: STEP_TOKENS_CPU,
                sampling_lanes: 1,
            });
        }
        Ok(Self {
            words: gpus.join(", "),
            gpu_layers: asked.gpu_layers.unwrap_or(ALL_LAYERS),
            step_tokens: STEP_TOKENS_GPU,
            sampling_lanes: threads as usize,
        })
    }

    /// The device in words, once the model is there. `offloaded`: the layers that llama.cpp says it
    /// put on GPUs, and how many there are; `None` where it said nothing of it.
    ///
    /// # Errors
    /// A GPU was promised, and no layer is on it.
    pub(super) fn confirmed(&self, offloaded: Option<(u32, u32)>) -> Result<String, String> {
        let words = &self.words;
        match offloaded {
            _ if self.gpu_layers == 0 => Ok(words.clone()),
            Some((0, all)) => Err(format!(
                "llama.cpp found {words} and put none of the {all} layers there; with \
                 `--n-gpu-layers 0` the model runs on the CPU"
            )),
            Some((there, all)) => Ok(format!("{words} ({there} of {all} layers)")),
            None => Ok(format!("{words} (llama.cpp does not say how many layers)")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ALL_LAYERS, Asked, Place, STEP_TOKENS_CPU, STEP_TOKENS_GPU};

    fn asked(gpu_layers: Option<u32>) -> Asked {
        Asked {
            gpu_layers,
            threads: 8,
            built_for_gpu: false,
        }
    }

    fn h200() -> Vec<String> {
        vec!["CUDA0: NVIDIA H200".to_owned()]
    }

    #[test]
    fn a_gpu_that_is_there_takes_all_layers_or_those_asked_for() {
        for (layers, placed) in [(None, ALL_LAYERS), (Some(7), 7)] {
            let place = Place::decide(asked(layers), &h200()).unwrap();
            assert_eq!(
                (place.gpu_layers, place.step_tokens, place.sampling_lanes),
                (placed, STEP_TOKENS_GPU, 8)
            );
        }
    }

    #[test]
    fn without_a_gpu_a_build_for_cpus_runs_on_the_cpu_and_says_so() {
        let place = Place::decide(asked(None), &[]).unwrap();
        assert_eq!(
            (place.gpu_layers, place.step_tokens, place.sampling_lanes),
            (0, STEP_TOKENS_CPU, 1)
        );
        assert_eq!(place.confirmed(None).unwrap(), "CPU (8 threads)");
    }

    #[test]
    fn layers_asked_for_without_a_gpu_are_an_error_and_not_a_slow_run() {
        let words = Place::decide(asked(Some(99)), &[]).unwrap_err();
        assert!(
            words.starts_with("99 layers were to go to a GPU, but llama.cpp finds none"),
            "{words}"
        );
        assert!(words.contains("`--n-gpu-layers 0`"), "{words}");
    }

    #[test]
    fn a_gpu_build_without_a_gpu_is_an_error_unless_the_cpu_is_asked_for() {
        let build = |gpu_layers| Asked {
            built_for_gpu: true,
            ..asked(gpu_layers)
        };
        let words = Place::decide(build(None), &[]).unwrap_err();
        assert!(
            words.starts_with("this worker was built for a GPU"),
            "{words}"
        );
        for gpus in [vec![], h200()] {
            let place = Place::decide(build(Some(0)), &gpus).unwrap();
            assert_eq!(place.confirmed(Some((0, 29))).unwrap(), "CPU (8 threads)");
        }
    }

    #[test]
    fn a_gpu_that_got_no_layer_is_an_error_and_one_that_did_is_told() {
        let place = Place::decide(asked(None), &h200()).unwrap();
        assert!(place.confirmed(Some((0, 29))).is_err());
        assert_eq!(
            place.confirmed(Some((29, 29))).unwrap(),
            "CUDA0: NVIDIA H200 (29 of 29 layers)"
        );
        assert!(place.confirmed(None).unwrap().contains("does not say"));
    }
}
