//! The MLX engine: loads a Hugging Face model folder and serves it through `mlx-rs`.
//!
//! It computes the Llama, Qwen2 and Qwen3 families, plain or with MLX's affine packing. A folder is
//! checked before a number of it is read: a missing, unknown or misshapen tensor is an error that
//! names it. All that is foreign (JSON, headers, the template) ends in a [`LoadError`], never in a
//! panic.

mod cache;
mod choose;
mod config;
mod device;
mod layout;
mod model;
mod safetensors;
mod schedule;
mod serve;
mod text;
mod weights;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use mlx_rs::{Device, Dtype};
use proto::to_dispatcher::ModelIdentity;

use self::cache::Shape;
use self::config::ModelConfig;
use self::device::{Backend, Claim};
use self::layout::Layout;
use self::model::Model;
use self::safetensors::Shard;
pub use self::serve::MlxEngine;
pub use self::text::FolderText;
use self::weights::Wanted;
use super::identity::Identity;
use super::{LoadError, LoadOptions, Loaded, Progress};

const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Of the machine's memory, the part that weights and caches may take together.
const MEMORY_PARTS: (u64, u64) = (4, 5);
/// A context shorter than this is of no use; a machine that cannot hold it cannot hold the model.
const CONTEXT_TOKENS_MIN: u32 = 256;

/// Whether packed weights stay packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unpacking {
    /// On a CPU, where the unpacked model takes less than a quarter of the memory: MLX's packed
    /// kernels there are scalar, its plain ones are the BLAS's.
    #[default]
    WhereFaster,
    Never,
    Always,
}

/// A loaded engine in its own type, for whoever needs more than the trait.
#[derive(Debug)]
pub struct LoadedMlx {
    pub engine: MlxEngine,
    pub text: Arc<FolderText>,
    pub identity: ModelIdentity,
}

/// Loads a model folder on the calling thread, which becomes the only one that may use MLX.
///
/// # Errors
/// Permanent where the folder or the options are at fault, transient where memory or a device was
/// short.
pub fn load(options: &LoadOptions, progress: Progress) -> Result<Loaded, LoadError> {
    let loaded = load_unpacking(options, Unpacking::default(), progress)?;
    Ok(Loaded {
        engine: Box::new(loaded.engine),
        text: loaded.text,
        identity: loaded.identity,
    })
}

/// As [`load`], with a say in whether packed weights stay packed.
///
/// # Errors
/// Those of [`load`].
pub fn load_unpacking(
    options: &LoadOptions,
    unpacking: Unpacking,
    mut progress: Progress,
) -> Result<LoadedMlx, LoadError> {
    let folder = options.model.as_path();
    if !folder.is_dir() {
        return Err(permanent(format!(
            "{} is not a folder: the MLX engine loads a folder with config.json and safetensors \
             (scripts/convert-gguf-to-mlx makes one from a GGUF file)",
            folder.display()
        )));
    }
    if options.slots == 0 {
        return Err(permanent("an engine needs at least one slot"));
    }
    let config_text = read_text(&folder.join("config.json"), CONFIG_BYTES_MAX)?;
    let config = ModelConfig::parse(&config_text)?;
    let shards = safetensors::inventory(folder)?;
    let layout = Layout::of(&config, &shards)?;
    layout.check(&shards)?;
    let vocabulary = config.vocabulary.unsigned_abs();
    let text = Arc::new(FolderText::load(folder, vocabulary, &config.end_tokens)?);

    let claim = Claim::take()
        .ok_or_else(|| permanent("another thread of this process uses MLX already"))?;
    if options.gpu_layers == Some(0) {
        Device::set_default(&Device::cpu());
    }
    let backend = Backend::detect()?;
    let wanted = wanted(backend, unpacking, &layout, &shards);
    let mut shape = Shape {
        layers: config.layers.unsigned_abs() as usize,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        dtype: wanted.compute,
        context_tokens: 0,
    };
    let weight_bytes = layout.memory_bytes(&shards, wanted.unpack, number_bytes(wanted.compute));
    // A GPU's own memory is not the machine's; MLX says where it ends.
    let machine = device::machine_bytes().filter(|_| backend != Backend::Cuda);
    let context = context_tokens(options, &config, &shape, weight_bytes, machine)?;
    shape.context_tokens = i32::try_from(context).unwrap_or(i32::MAX);
    let cache_bytes = u64::from(options.slots) * u64::from(context) * shape.bytes_per_token();
    device::bound_memory(weight_bytes, cache_bytes)?;

    let weights = weights::read(&layout, &shards, wanted, &mut progress)?;
    let identity = identity(options, &config_text, &shards)?;
    let model = Model::new(config, weights);
    let engine = MlxEngine::new(
        claim,
        backend,
        model,
        shape,
        options.slots,
        Arc::clone(&text),
    );
    Ok(LoadedMlx {
        engine,
        text,
        identity,
    })
}

fn wanted(backend: Backend, unpacking: Unpacking, layout: &Layout, shards: &[Shard]) -> Wanted {
    let compute = match backend {
        Backend::Cpu => Dtype::Float32,
        Backend::Metal | Backend::Cuda => weights::dtype(layout::common_float(shards)),
    };
    let unpack = match unpacking {
        Unpacking::Never => false,
        Unpacking::Always => true,
        Unpacking::WhereFaster => {
            let plain = layout.memory_bytes(shards, true, number_bytes(compute));
            let fits = device::machine_bytes().is_some_and(|machine| plain < machine / 4);
            backend == Backend::Cpu && fits
        }
    };
    Wanted { compute, unpack }
}

fn number_bytes(dtype: Dtype) -> u64 {
    if dtype == Dtype::Float32 { 4 } else { 2 }
}

/// The context that was asked for, or as much of the trained one as memory holds.
fn context_tokens(
    options: &LoadOptions,
    config: &ModelConfig,
    shape: &Shape,
    weight_bytes: u64,
    machine: Option<u64>,
) -> Result<u32, LoadError> {
    let asked = match options.context_tokens {
        0 => config.context_tokens,
        asked => asked,
    };
    let Some(machine) = machine else {
        return Ok(asked);
    };
    let (part, of) = MEMORY_PARTS;
    let free = (machine / of * part).saturating_sub(weight_bytes);
    let per_token = u64::from(options.slots) * shape.bytes_per_token();
    let held = u32::try_from(free / per_token.max(1)).unwrap_or(u32::MAX);
    if held >= asked {
        return Ok(asked);
    }
    if options.context_tokens == 0 && held >= CONTEXT_TOKENS_MIN {
        return Ok(held);
    }
    Err(permanent(format!(
        "the weights take {} MB, and {} slots of {asked} tokens {} MB of cache: more than {part}/{of} \
         of this machine's {} MB (fewer slots or a smaller context would fit)",
        weight_bytes >> 20,
        options.slots,
        (per_token * u64::from(asked)) >> 20,
        machine >> 20,
    )))
}

fn identity(
    options: &LoadOptions,
    config: &str,
    shards: &[Shard],
) -> Result<ModelIdentity, LoadError> {
    let mut identity = Identity::new();
    identity.part(config.as_bytes());
    let tokenizer = options.model.join("tokenizer.json");
    for path in shards
        .iter()
        .map(|shard| shard.path.as_path())
        .chain([tokenizer.as_path()])
    {
        let metadata = std::fs::metadata(path).map_err(|e| unreadable(path, &e))?;
        identity.part(path.file_name().unwrap_or_default().as_encoded_bytes());
        identity.file(&metadata);
    }
    for shard in shards {
        identity.part(&shard.header);
    }
    let name = options.name.clone().unwrap_or_else(|| {
        let own = options.model.file_name().unwrap_or_default();
        own.to_string_lossy().into_owned()
    });
    Ok(identity.finish(name))
}

fn permanent(words: impl Into<String>) -> LoadError {
    LoadError::Permanent(words.into())
}

fn transient(words: impl Into<String>) -> LoadError {
    LoadError::Transient(words.into())
}

fn unreadable(path: &Path, error: &std::io::Error) -> LoadError {
    permanent(format!("reading {}: {error}", path.display()))
}

/// The whole text of a file of at most `bytes_max` bytes.
fn read_text(path: &Path, bytes_max: u64) -> Result<String, LoadError> {
    let file = File::open(path).map_err(|e| unreadable(path, &e))?;
    let mut text = String::new();
    file.take(bytes_max + 1)
        .read_to_string(&mut text)
        .map_err(|e| unreadable(path, &e))?;
    if text.len() as u64 > bytes_max {
        return Err(permanent(format!(
            "{} is larger than {bytes_max} bytes",
            path.display()
        )));
    }
    Ok(text)
}
