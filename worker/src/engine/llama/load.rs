//! From a GGUF file to a warmable engine, every failure in words and with whose fault it is.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::{LlamaBackendDeviceType, list_llama_ggml_backend_devices};
use proto::to_dispatcher::ModelIdentity;

use super::gguf::Header;
use super::{LlamaEngine, LlamaText, Shape, log};
use crate::engine::{Limits, LoadError, LoadOptions, Loaded, Progress, TextModel};

/// llama.cpp's own bound on sequences.
const SLOTS_MAX: u32 = 256;
const THREADS_MAX: u32 = 1024;
/// Tokens of one step on a CPU. From 64 rows on ggml's attention is another kernel there, whose
/// logits for the same row differ by 0.6 and more (p99.9, Q4_1): below, a row's arithmetic does not
/// depend on how many others are in the step. Few CPUs prefill more in the time a chunk may take.
const STEP_TOKENS_CPU: u32 = 63;
/// Tokens of one step on a GPU.
const STEP_TOKENS_GPU: u32 = 1024;
/// More layers than any model has: all of them.
const ALL_LAYERS: u32 = 100_000;

/// Loads a model; to be called on the thread that will own the engine.
///
/// # Errors
/// `Permanent` for the file and the options, `Transient` where memory was short.
pub fn load(options: &LoadOptions, progress: Progress) -> Result<Loaded, LoadError> {
    let (engine, text, identity) = open(options, None, progress)?;
    Ok(Loaded {
        engine: Box::new(engine),
        text,
        identity,
    })
}

/// As [`load`], with the types unhidden, and a bound on the tokens that all slots' caches hold
/// together (`None`: as many as all contexts full).
///
/// # Errors
/// Those of [`load`].
pub fn open(
    options: &LoadOptions,
    kv_tokens: Option<u32>,
    progress: Progress,
) -> Result<(LlamaEngine, Arc<LlamaText>, ModelIdentity), LoadError> {
    if !(1..=SLOTS_MAX).contains(&options.slots) {
        return Err(permanent(format!("slots must be 1 to {SLOTS_MAX}")));
    }
    if !(1..=THREADS_MAX).contains(&options.threads) {
        return Err(permanent(format!("threads must be 1 to {THREADS_MAX}")));
    }
    let header = Header::read(&options.model).map_err(|e| permanent(e.to_string()))?;
    let path = options.model.display();
    let architecture = header
        .architecture()
        .ok_or_else(|| permanent(format!("{path} does not name its architecture")))?
        .to_owned();
    if !header.is_generative() {
        let words = "does not continue texts (it is an encoder, an embedding or a diffusion model)";
        return Err(permanent(format!(
            "{path}: the architecture `{architecture}` {words}"
        )));
    }
    let trained = header
        .context_length()
        .and_then(|n| u32::try_from(n).ok())
        .unwrap_or(4096);
    let context_tokens = match options.context_tokens {
        0 => trained,
        asked => asked,
    };
    let cells = match kv_tokens {
        Some(bound) => bound,
        None => options.slots.checked_mul(context_tokens).ok_or_else(|| {
            permanent(format!(
                "{} slots of {context_tokens} tokens are too many",
                options.slots
            ))
        })?,
    };
    let cells = NonZeroU32::new(cells).ok_or_else(|| permanent("the context is empty".into()))?;

    log::install();
    let _ = log::take();
    let backend = backend()?;
    let place = Place::find(backend, options);
    let model = load_model(backend, &options.model, &architecture, &place, progress)?;
    let text = Arc::new(LlamaText::new(model));
    if text.vocabulary() == 0 {
        return Err(permanent(format!("{path} has no vocabulary")));
    }

    let step_tokens = place
        .step_tokens
        .max(options.slots)
        .min(cells.get().max(options.slots));
    let threads = i32::try_from(options.threads).unwrap_or(1);
    let params = LlamaContextParams::default()
        .with_n_ctx(Some(cells))
        .with_n_batch(step_tokens)
        .with_n_ubatch(step_tokens)
        .with_n_seq_max(options.slots)
        .with_n_threads(threads)
        .with_n_threads_batch(threads)
        // One cache for all slots: with one a slot llama.cpp cuts a step wherever the numbers of the
        // live slots have a gap or the rows' lengths differ, and reads the weights for each part.
        .with_kv_unified(true);
    // Making two contexts of one model at a time is a data race in llama.cpp.
    static MAKING: Mutex<()> = Mutex::new(());
    let guard = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let context = model.new_context(backend, params);
    drop(guard);
    let context = context.map_err(|_| {
        LoadError::Transient(format!(
            "make a context of {cells} tokens for {path}: {}",
            reason("llama.cpp gave no reason")
        ))
    })?;
    // It may give less than was asked for, never more rows.
    let step_tokens = context.n_batch().min(context.n_ubatch());
    if step_tokens < options.slots {
        return Err(permanent(format!(
            "a step of {step_tokens} tokens can't hold all slots"
        )));
    }
    let limits = Limits {
        slots: options.slots,
        context_tokens: context_tokens.min(context.n_ctx()),
        vocabulary: text.vocabulary(),
        weight_bytes_per_step: header.weight_bytes_per_step(),
        kv_bytes_per_token: header.kv_bytes_per_token(),
        device: place.words,
    };
    let name = options.name.clone().unwrap_or_else(|| stem(&options.model));
    let identity = ModelIdentity {
        name,
        hash: header.hash,
    };
    let shape = Shape {
        step_tokens: step_tokens as usize,
        sampling_lanes: place.sampling_lanes,
    };
    Ok((
        LlamaEngine::new(context, Arc::clone(&text), limits, shape),
        text,
        identity,
    ))
}

/// llama.cpp, initialised once a process and never freed: models may outlive any scope.
///
/// # Errors
/// `Transient` where it can't be initialised.
pub fn backend() -> Result<&'static LlamaBackend, LoadError> {
    static BACKEND: OnceLock<Result<LlamaBackend, String>> = OnceLock::new();
    BACKEND
        .get_or_init(|| LlamaBackend::init().map_err(|e| e.to_string()))
        .as_ref()
        .map_err(|e| LoadError::Transient(format!("start llama.cpp: {e}")))
}

/// Where the model runs.
struct Place {
    words: String,
    gpu_layers: u32,
    step_tokens: u32,
    /// Threads that sample side by side. On a CPU engine they would only compete with its own.
    sampling_lanes: usize,
}

impl Place {
    fn find(backend: &LlamaBackend, options: &LoadOptions) -> Self {
        let layers = options.gpu_layers.unwrap_or(ALL_LAYERS);
        let gpus: Vec<String> = if backend.supports_gpu_offload() && layers > 0 {
            list_llama_ggml_backend_devices()
                .into_iter()
                .filter(|d| {
                    use LlamaBackendDeviceType::{Gpu, IntegratedGpu};
                    matches!(d.device_type, Gpu | IntegratedGpu)
                })
                .map(|d| format!("{}: {}", d.name, d.description))
                .collect()
        } else {
            Vec::new()
        };
        let threads = options.threads;
        if gpus.is_empty() {
            let plural = if threads == 1 { "" } else { "s" };
            return Self {
                words: format!("CPU ({threads} thread{plural})"),
                gpu_layers: 0,
                step_tokens: STEP_TOKENS_CPU,
                sampling_lanes: 1,
            };
        }
        let part = options
            .gpu_layers
            .map_or_else(String::new, |n| format!(" ({n} layers)"));
        Self {
            words: format!("{}{part}", gpus.join(", ")),
            gpu_layers: layers,
            step_tokens: STEP_TOKENS_GPU,
            sampling_lanes: threads as usize,
        }
    }
}

fn load_model(
    backend: &LlamaBackend,
    path: &Path,
    architecture: &str,
    place: &Place,
    mut progress: Progress,
) -> Result<&'static LlamaModel, LoadError> {
    let mut told = 0;
    let params = LlamaModelParams::default()
        .with_use_mmap(true)
        .with_n_gpu_layers(place.gpu_layers)
        .with_progress_callback(move |done| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a fraction of 1000"
            )]
            let permille = (done.clamp(0.0, 1.0) * 1000.0) as u32;
            told = told.max(permille);
            progress(told);
            true
        });
    let shown = path.display();
    if path.to_str().is_none() {
        return Err(permanent(format!(
            "the path {shown} is not UTF-8, which llama.cpp wants"
        )));
    }
    match LlamaModel::load_from_file(backend, path, &params) {
        // Never freed: a worker loads one model and ends with it, and a context borrows it for life.
        Ok(model) => Ok(Box::leak(Box::new(model))),
        Err(_) => {
            let reason = reason("llama.cpp gave no reason");
            let words = format!("load {shown} (architecture `{architecture}`): {reason}");
            let lower = reason.to_lowercase();
            let memory = ["allocate", "out of memory", "cannot allocate"];
            if memory.iter().any(|m| lower.contains(m)) {
                Err(LoadError::Transient(words))
            } else {
                Err(permanent(words))
            }
        }
    }
}

/// The last things that llama.cpp complained of.
fn reason(none: &str) -> String {
    let lines = log::take();
    let last = lines.len().saturating_sub(3);
    if lines.is_empty() {
        none.to_owned()
    } else {
        lines[last..].join("; ")
    }
}

fn stem(path: &Path) -> String {
    path.file_stem()
        .map_or_else(|| "model".to_owned(), |s| s.to_string_lossy().into_owned())
}

fn permanent(words: String) -> LoadError {
    LoadError::Permanent(words)
}
