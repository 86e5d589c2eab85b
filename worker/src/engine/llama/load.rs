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
use super::place::{Asked, Place};
use super::{LlamaEngine, LlamaText, Shape, log};
use crate::engine::{Limits, LoadError, LoadOptions, Loaded, Progress, TextModel};

/// llama.cpp's own bound on sequences.
const SLOTS_MAX: u32 = 256;
const THREADS_MAX: u32 = 1024;
/// A slot's cache is a multiple of so many tokens.
pub(super) const CELLS_MULTIPLE: u32 = 256;
/// Loads a model; to be called on the thread that will own the engine.
///
/// # Errors
/// `Permanent` for the file and the options, `Transient` where memory was short.
pub fn load(options: &LoadOptions, progress: Progress) -> Result<Loaded, LoadError> {
    let (engine, text, identity) = open(options, progress)?;
    Ok(Loaded {
        engine: Box::new(engine),
        text,
        identity,
    })
}

/// As [`load`], with the types unhidden.
///
/// # Errors
/// Those of [`load`].
pub fn open(
    options: &LoadOptions,
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
    // llama.cpp rounds each slot's share up by itself, but only after dividing the whole.
    let cells = context_tokens
        .checked_next_multiple_of(CELLS_MULTIPLE)
        .and_then(|each| each.checked_mul(options.slots))
        .and_then(NonZeroU32::new)
        .ok_or_else(|| {
            let slots = options.slots;
            permanent(format!(
                "{slots} slots of {context_tokens} tokens are too many"
            ))
        })?;

    log::install();
    let _ = log::take();
    let backend = backend()?;
    let asked = Asked {
        gpu_layers: options.gpu_layers,
        threads: options.threads,
        built_for_gpu: cfg!(feature = "cuda"),
    };
    let place = Place::decide(asked, &gpus(backend)).map_err(permanent)?;
    let model = load_model(backend, &options.model, &architecture, &place, progress)?;
    let device = place.confirmed(log::offloaded()).map_err(permanent)?;
    let text = Arc::new(LlamaText::new(model));
    if text.vocabulary() == 0 {
        return Err(permanent(format!("{path} has no vocabulary")));
    }

    let step_tokens = place.step_tokens.max(options.slots);
    let threads = i32::try_from(options.threads).unwrap_or(1);
    let params = LlamaContextParams::default()
        .with_n_ctx(Some(cells))
        .with_n_batch(step_tokens)
        .with_n_ubatch(step_tokens)
        .with_n_seq_max(options.slots)
        .with_n_threads(threads)
        .with_n_threads_batch(threads)
        // A cache for each slot. In a shared one the order of a row's cells depends on who came and
        // went, and ggml's CPU attention adds in that order, in 16 bits: the same row gives other
        // logits in company than alone. The price is that llama.cpp makes a pass of its own wherever
        // the numbers of the rows' slots have a gap; `plan::fill` closes the gaps that pay.
        .with_kv_unified(false);
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
        context_tokens,
        vocabulary: text.vocabulary(),
        weight_bytes_per_step: header.weight_bytes_per_step(),
        kv_bytes_per_token: header.kv_bytes_per_token(),
        device,
    };
    let name = options.name.clone().unwrap_or_else(|| stem(&options.model));
    let identity = ModelIdentity {
        name,
        hash: header.hash,
    };
    // An architecture with a running state can't take a filler row back.
    let can_fill = !model.is_recurrent() && !model.is_hybrid();
    let shape = Shape {
        step_tokens: step_tokens as usize,
        sampling_lanes: place.sampling_lanes,
        can_fill,
        on_gpu: place.gpu_layers > 0,
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

/// The GPUs that llama.cpp can use, in words.
fn gpus(backend: &LlamaBackend) -> Vec<String> {
    use LlamaBackendDeviceType::{Gpu, IntegratedGpu};
    if !backend.supports_gpu_offload() {
        return Vec::new();
    }
    list_llama_ggml_backend_devices()
        .into_iter()
        .filter(|d| matches!(d.device_type, Gpu | IntegratedGpu))
        .map(|d| format!("{}: {}", d.name, d.description))
        .collect()
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
