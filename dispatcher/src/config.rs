//! What the settings mean: resolved once from flags, environment, file and machine, and validated.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use crate::bus::Weights;
use crate::cli::Settings;
use crate::devices::{self, Device};
use crate::machine::Policy;
use crate::memory::{self, Costs, DoesNotFit, Limit, LimitOrigin, Plan};

use crate::model::discover::{self, Available, Choice, DiscoverError};
use crate::model::folder::{self, Folder};
use crate::model::gguf::{self, GgufError, Header};
use crate::process::engines;

mod layers;
mod sizing;
mod surroundings;
mod value;

use crate::model::Engines;

pub use crate::model::EngineKind;
pub use layers::{Effective, KEYS, Source};
pub use sizing::Sizing;
pub use surroundings::Surroundings;
pub use value::LogFormat;

use layers::{File, Layers};

/// Context a request gets where nobody said how much, in tokens.
const CONTEXT_DEFAULT: u32 = 4096;
/// Slots of the scripted engine, whose memory bounds nothing.
const SCRIPTED_SLOTS: u32 = 8;
/// A configuration or key file of more bytes is not one.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// A run directory's path in bytes: a socket's whole path may have 104 on macOS, its name needs the rest.
pub const RUN_DIR_BYTES_MAX: usize = 80;
/// Of a service manager's time to stop, what drain and workers' end do not get: answers are written
/// out, files removed.
pub const STOP_MARGIN: Duration = Duration::from_secs(10);

/// What is fixed at the start: sockets, files, the front's and the queue's bounds, the number of places.
const FIXED: [&str; 12] = [
    "served-model-name",
    "instances",
    "memory-limit",
    "host",
    "port",
    "queue",
    "queue-bytes",
    "queue-tokens",
    "priority-aging",
    "run-dir",
    "api-key-file",
    "log-format",
];

/// Why nothing can be started. All of these are permanent: trying again will not help.
#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("{said}: {problem}")]
    Value { said: String, problem: String },
    #[error("the configuration file {path} cannot be used: {problem}")]
    File { path: String, problem: String },
    #[error("{0}")]
    Conflict(String),
    #[error(transparent)]
    Model(#[from] DiscoverError),
    #[error("the model {} {cause}", .model.display())]
    Header { model: PathBuf, cause: GgufError },
    #[error("the model {} {cause}", .model.display())]
    Memory { model: PathBuf, cause: DoesNotFit },
}

/// All that a run is made from.
#[derive(Clone, Debug)]
pub struct Config {
    pub engine: EngineKind,
    /// `None` for the scripted engine.
    pub model: Option<PathBuf>,
    /// The model's name in the API.
    pub served_model_name: String,
    pub instances: u32,
    /// Sequences of one instance.
    pub slots: u32,
    /// Tokens of one request, prompt and output together.
    pub context_tokens: u32,
    /// Threads of one instance.
    pub threads: u32,
    pub n_gpu_layers: Option<u32>,
    pub listen: SocketAddr,
    /// Clients must send one of these; empty: no key is asked for. Never printed.
    pub api_keys: ApiKeys,
    pub queue_entries_max: u32,
    pub queue_bytes_max: u64,
    pub queue_tokens_max: u64,
    pub queue_timeout: Duration,
    pub priority_aging: Duration,
    pub drain_timeout: Duration,
    pub replace_timeout: Duration,
    pub crashes_max: u32,
    pub crash_window: Duration,
    pub suspect_after: u32,
    /// Without a step for so long, work pending, a worker is stalled.
    pub stall_after: Duration,
    /// From SIGTERM to SIGKILL of a worker.
    pub worker_grace: Duration,
    pub run_dir: PathBuf,
    /// Where measurements are kept.
    pub cache_dir: PathBuf,
    pub worker: PathBuf,
    pub log_format: LogFormat,
    pub scripted: Option<String>,
    /// The reserved memory; `None` where the engine has no model.
    pub plan: Option<Plan>,
    /// The weights as a step meets them; `None` where no header was read.
    pub weights: Option<Weights>,
    /// The devices that instances are given in turn; empty: the engine chooses.
    pub devices: Vec<Device>,
    /// What all instances may take together.
    pub memory: Limit,
    /// Whether a replacement may run beside the worker it replaces.
    pub start_then_stop: bool,
    /// Every value with its source, for `config show`.
    pub effective: Vec<Effective>,
    /// What the user should know before it serves.
    pub notes: Vec<String>,
}

/// Keys that clients may send. Debug output holds their number alone.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ApiKeys(Vec<String>);

impl ApiKeys {
    #[must_use]
    pub fn as_slice(&self) -> &[String] {
        &self.0
    }
}

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

/// Reads settings one by one and keeps the record of what holds.
struct Resolver<'a> {
    layers: Layers<'a>,
    effective: Vec<Effective>,
}

impl Resolver<'_> {
    /// The value that was given, or `default`.
    fn or<T: Clone>(
        &mut self,
        key: &'static str,
        default: T,
        parse: impl Fn(&str) -> value::Parsed<T>,
        show: impl Fn(&T) -> String,
    ) -> Result<T, ConfigError> {
        let (value, source) = self
            .layers
            .get(key, parse)?
            .unwrap_or((default, Source::Default));
        self.record(key, show(&value), source);
        Ok(value)
    }

    fn count(
        &mut self,
        key: &'static str,
        default: u32,
        min: u32,
        max: u32,
    ) -> Result<u32, ConfigError> {
        let parse = |text: &str| value::count32(text, min, max);
        self.or(key, default, parse, u32::to_string)
    }

    fn duration(&mut self, key: &'static str, default: Duration) -> Result<Duration, ConfigError> {
        self.or(key, default, value::duration, show_duration)
    }

    fn record(&mut self, key: &'static str, value: String, source: Source) {
        self.effective.push(Effective { key, value, source });
    }
}

impl Config {
    /// What `settings` mean on this machine.
    ///
    /// # Errors
    /// Where a value is out of range, the model cannot be found, read or fitted, or a file is missing.
    /// Permanent all of them.
    pub fn resolve(settings: &Settings, around: &Surroundings) -> Result<Self, ConfigError> {
        let file = config_file(settings, around)?;
        let mut resolver = Resolver {
            layers: Layers {
                typed: settings,
                environment: environment(settings, around),
                file,
            },
            effective: Vec::new(),
        };
        let limits = Policy::default();
        let r = &mut resolver;

        let instances = r.count("instances", 1, 1, 256)?;
        let (engine, model) = choose_model(r, around)?;
        let size = match (&model, engine) {
            (Some(model), EngineKind::Llama) => Some(ModelSize::File(read_header(model)?)),
            (Some(model), EngineKind::Mlx) => Some(ModelSize::Folder(folder::read(model))),
            _ => None,
        };
        let name = model.as_deref().map_or("scripted".to_owned(), model_name);
        let served_model_name = r.or("served-model-name", name, value::text, |text| quote(text))?;
        let context_tokens = context(r, size.as_ref())?;
        let (threads, n_gpu_layers) = processors(r, instances, around.cores)?;
        let devices = devices(r, engine, around)?;
        let offloaded = match n_gpu_layers {
            Some(layers) => layers > 0,
            // Whoever names a device wants the layers there.
            None => !devices.is_empty() && engine == EngineKind::Llama,
        };
        let demand = Demand {
            instances,
            context_tokens,
            offloaded: offloaded && !around.is_mac,
            is_mac: around.is_mac,
            devices: &devices,
        };
        let (memory, plan) = fit(r, size.as_ref(), model.as_deref(), demand, around.memory)?;
        let slots = plan.as_ref().map_or(SCRIPTED_SLOTS, |plan| plan.slots);
        let slots = match &plan {
            Some(_) => slots,
            None => r.count("slots", slots, 1, 256)?,
        };

        let host = r.or(
            "host",
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            value::host,
            |host| quote(&host.to_string()),
        )?;
        let port = r.count("port", 8080, 0, 65_535)?;
        let port = u16::try_from(port).unwrap_or_default();
        let listen = SocketAddr::new(host, port);
        let api_keys = api_keys(r)?;

        let queue_entries_max = r.count("queue", limits.queue_entries_max, 1, 1_000_000)?;
        let queue_bytes_max = r.or(
            "queue-bytes",
            limits.queue_bytes_max,
            value::size,
            |bytes| bytes.to_string(),
        )?;
        let tokens = |text: &str| value::count(text, 1, 1 << 40);
        let queue_tokens_max = r.or(
            "queue-tokens",
            limits.queue_tokens_max,
            tokens,
            u64::to_string,
        )?;
        let queue_timeout = r.duration("queue-timeout", limits.queue_timeout)?;
        let priority_aging = r.duration("priority-aging", limits.priority_aging)?;
        let drain_timeout = r.duration("drain-timeout", limits.drain_timeout)?;
        let replace_timeout = r.duration("replace-timeout", limits.replace_timeout)?;
        let crashes_max = r.count("max-crashes", limits.crashes_max, 1, 1_000_000)?;
        let crash_window = r.duration("crash-window", limits.crash_window)?;
        let suspect_after = r.count("suspect-after", limits.suspect_after, 1, 1_000_000)?;
        let stall_after = r.duration("stall-after", limits.stall_min)?;
        let worker_grace = r.duration("worker-grace", limits.worker_grace)?;

        let asked_drain = drain_timeout;
        let drain_timeout = drain_within_stop_limit(r, asked_drain, worker_grace)?;

        let run_dir = run_dir(r, around, port)?;
        let worker = worker(r, around)?;
        let log_format = r.or("log-format", LogFormat::Auto, value::log_format, |format| {
            quote(match format {
                LogFormat::Auto => "auto",
                LogFormat::Text => "text",
                LogFormat::Json => "json",
            })
        })?;
        let scripted = r.layers.get("scripted", value::text)?;
        if let Some((spec, source)) = &scripted {
            r.record("scripted", quote(spec), source.clone());
        }

        let start_then_stop = plan.is_none_or(|plan| plan.has_room_for_one_more())
            && threads.saturating_mul(instances.saturating_add(1)) <= around.cores;
        let mut config = Self {
            engine,
            model,
            served_model_name,
            instances,
            slots,
            context_tokens,
            threads,
            n_gpu_layers,
            listen,
            api_keys,
            queue_entries_max,
            queue_bytes_max,
            queue_tokens_max,
            queue_timeout,
            priority_aging,
            drain_timeout,
            replace_timeout,
            crashes_max,
            crash_window,
            suspect_after,
            stall_after,
            worker_grace,
            run_dir,
            cache_dir: around.cache_directory(),
            worker,
            log_format,
            scripted: scripted.map(|(spec, _)| spec),
            plan,
            weights: size.as_ref().and_then(ModelSize::weights),
            devices,
            memory,
            start_then_stop,
            effective: resolver.effective,
            notes: Vec::new(),
        };
        config.notes = config.remarks(around.cores, offloaded);
        if drain_timeout < asked_drain {
            config.notes.push(format!(
                "running requests get {} to end, not the {} that were asked for: the service manager \
                 ends everything after its own limit; `dispatcher service install` takes the drain \
                 timeout over into it",
                show_duration(&drain_timeout),
                show_duration(&asked_drain)
            ));
        }
        Ok(config)
    }

    /// The run directory that `settings` mean; nothing else is asked for.
    ///
    /// # Errors
    /// As [`Config::resolve`], for the settings that decide it.
    pub fn run_directory(
        settings: &Settings,
        around: &Surroundings,
    ) -> Result<PathBuf, ConfigError> {
        let mut resolver = Resolver {
            layers: Layers {
                typed: settings,
                environment: environment(settings, around),
                file: config_file(settings, around)?,
            },
            effective: Vec::new(),
        };
        let port = resolver.count("port", 8080, 0, 65_535)?;
        run_dir(
            &mut resolver,
            around,
            u16::try_from(port).unwrap_or_default(),
        )
    }

    /// What `settings` mean now to a dispatcher that was started with `self`, whose number of
    /// instances stays: all that depends on it is worked out for that.
    ///
    /// # Errors
    /// As [`Config::resolve`].
    pub fn again(&self, settings: &Settings, around: &Surroundings) -> Result<Self, ConfigError> {
        let mut config = Self::resolve(settings, around)?;
        if config.instances != self.instances {
            let asked = config.instances.to_string();
            let kept = Settings {
                instances: Some(self.instances.to_string()),
                ..settings.clone()
            };
            config = Self::resolve(&kept, around)?;
            let shown = config.effective.iter_mut();
            for one in shown.filter(|one| one.key == "instances") {
                one.value.clone_from(&asked);
            }
        }
        Ok(config)
    }

    /// Settings of `self` that a dispatcher started with `started` cannot take over while it runs.
    #[must_use]
    pub fn needs_restart(&self, started: &Self) -> Vec<&'static str> {
        let value = |config: &Self, key: &str| {
            let mut all = config.effective.iter();
            all.find(|one| one.key == key).map(|one| one.value.clone())
        };
        let mut changed: Vec<_> = FIXED
            .into_iter()
            .filter(|key| value(self, key) != value(started, key))
            .collect();
        if self.api_keys != started.api_keys {
            changed.push("api-key");
        }
        changed
    }

    /// The machine's limits under this configuration.
    #[must_use]
    pub fn policy(&self) -> Policy {
        let limits = Policy::default();
        Policy {
            instances: self.instances,
            queue_entries_max: self.queue_entries_max,
            queue_bytes_max: self.queue_bytes_max,
            queue_tokens_max: self.queue_tokens_max,
            queue_timeout: self.queue_timeout,
            priority_aging: self.priority_aging,
            drain_timeout: self.drain_timeout,
            replace_timeout: self.replace_timeout,
            crashes_max: self.crashes_max,
            crash_window: self.crash_window,
            suspect_after: self.suspect_after,
            stall_min: self.stall_after,
            stall_max: limits.stall_max.max(self.stall_after),
            // Readiness must turn before the worker is given up, whatever was asked for.
            unready_min: limits.unready_min.min(self.stall_after / 2),
            clock_jump: limits.clock_jump.min(self.stall_after / 2),
            worker_grace: self.worker_grace,
            link_grace: limits.link_grace.min(self.worker_grace),
            ..limits
        }
    }

    /// Every value and its source, as a configuration file that says the same.
    #[must_use]
    pub fn show(&self) -> String {
        let mut text = String::new();
        for Effective { key, value, source } in &self.effective {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{:<40} # {source}", format!("{key} = {value}"));
        }
        if !self.api_keys.0.is_empty() {
            let _ = writeln!(text, "# api-key: {} (not shown)", self.api_keys.0.len());
        }
        if let Some(plan) = &self.plan {
            let _ = writeln!(text, "# memory: {plan}");
        }
        for note in &self.notes {
            let _ = writeln!(text, "# note: {note}");
        }
        text
    }

    fn remarks(&self, cores: u32, offloaded: bool) -> Vec<String> {
        let mut notes = Vec::new();
        if self.instances > cores && self.threads == 1 {
            notes.push(format!(
                "{} instances on {cores} cores: each computes with one thread, and they take turns; \
                 more than {cores} instances add no speed",
                self.instances,
            ));
        }
        let total = self.instances.saturating_mul(self.threads);
        if total > cores && self.threads > 1 {
            notes.push(format!(
                "{} instances x {} threads are more than the {cores} cores: waiting threads spin, \
                 and throughput may halve; `--threads {}` avoids it",
                self.instances,
                self.threads,
                (cores / self.instances).max(1)
            ));
        }
        if !self.listen.ip().is_loopback() && self.api_keys.0.is_empty() {
            notes.push(format!(
                "{} can be reached from other machines and no API key is asked for: see `--api-key`",
                self.listen.ip()
            ));
        }
        if offloaded && self.devices.is_empty() {
            notes.push(
                "memory of the GPU is not checked before the start: only the machine's is"
                    .to_owned(),
            );
        }
        notes
    }
}

/// What memory is asked for, beside the model.
#[derive(Clone, Copy)]
struct Demand<'a> {
    instances: u32,
    context_tokens: u32,
    offloaded: bool,
    is_mac: bool,
    devices: &'a [Device],
}

/// What a model says of its size, in its own way.
enum ModelSize {
    File(Header),
    Folder(Folder),
}

impl ModelSize {
    fn context_length(&self) -> Option<u32> {
        match self {
            Self::File(header) => header.context_length,
            Self::Folder(folder) => folder.context_length,
        }
    }

    /// The weights as a step meets them. `None` for a folder, whose engine says it once loaded.
    fn weights(&self) -> Option<Weights> {
        match self {
            Self::File(header) => Some(header.weights()),
            Self::Folder(_) => None,
        }
    }

    /// `None` where it says too little.
    fn costs(&self, demand: Demand, memory: Limit) -> Option<Costs> {
        match self {
            Self::File(header) => Some(Costs::of_header(header, demand.offloaded)),
            Self::Folder(folder) => Costs::of_folder(folder, memory, demand.is_mac),
        }
    }
}

/// A service has its settings from its file: what some shell or session had set when the manager was
/// started says nothing.
fn environment<'a>(settings: &Settings, around: &'a Surroundings) -> &'a BTreeMap<String, String> {
    static NONE: BTreeMap<String, String> = BTreeMap::new();
    match settings.service_manager {
        Some(_) => &NONE,
        None => &around.environment,
    }
}

/// The drain timeout, or what of it the service manager leaves: after the drain come the workers' end
/// and ours.
fn drain_within_stop_limit(
    r: &mut Resolver<'_>,
    asked: Duration,
    worker_grace: Duration,
) -> Result<Duration, ConfigError> {
    let Some((limit, source)) = r.layers.get("stop-limit", value::duration)? else {
        return Ok(asked);
    };
    r.record("stop-limit", show_duration(&limit), source);
    let left = limit
        .saturating_sub(worker_grace + STOP_MARGIN)
        .max(Duration::from_millis(1));
    if left >= asked {
        return Ok(asked);
    }
    let shown = r.effective.iter_mut();
    for one in shown.filter(|one| one.key == "drain-timeout") {
        one.value = show_duration(&left);
        one.source = Source::Derived;
    }
    Ok(left)
}

fn config_file(settings: &Settings, around: &Surroundings) -> Result<Option<File>, ConfigError> {
    let path = match &settings.config {
        Some(path) => path,
        None => match environment(settings, around).get("DISPATCHER_CONFIG") {
            Some(path) => path,
            None => match around.config_path() {
                path if path.is_file() => &path.to_string_lossy().into_owned(),
                _ => return Ok(None),
            },
        },
    };
    let text = read_text(Path::new(path)).map_err(|error| ConfigError::File {
        path: path.clone(),
        problem: error.to_string(),
    })?;
    File::parse(path, &text).map(Some)
}

fn read_text(path: &Path) -> io::Result<String> {
    let length = std::fs::metadata(path)?.len();
    if length > FILE_BYTES_MAX {
        return Err(io::Error::other(format!(
            "it has {length} bytes, more than {FILE_BYTES_MAX}"
        )));
    }
    std::fs::read_to_string(path)
}

fn choose_model(
    r: &mut Resolver<'_>,
    around: &Surroundings,
) -> Result<(EngineKind, Option<PathBuf>), ConfigError> {
    let engine = r.layers.get("engine", value::engine)?;
    let named = r.layers.get("model", value::text)?;
    let scripted = r.layers.get("scripted", value::text)?;
    if scripted.is_some() || matches!(engine, Some((EngineKind::Scripted, _))) {
        if let Some((other, _)) = &engine
            && *other != EngineKind::Scripted
        {
            return Err(ConfigError::Conflict(format!(
                "--scripted is for the engine `scripted`, not for `{other}`"
            )));
        }
        let source = engine.map_or(Source::Derived, |(_, source)| source);
        r.record("engine", quote("scripted"), source);
        return Ok((EngineKind::Scripted, None));
    }
    let directory = r.or(
        "models-dir",
        around.models_directory(),
        |text| value::text(text).map(PathBuf::from),
        |path| quote(&path.to_string_lossy()),
    )?;
    let wanted = engine.as_ref().map(|(engine, _)| *engine);
    let program = match r.layers.get("worker", value::text)? {
        Some((path, _)) => PathBuf::from(path),
        None => around.worker_beside(),
    };
    let available = Available {
        worker: &program,
        engines: engines_of(&program)?,
        is_mac: around.is_mac,
    };
    let Choice {
        engine: chosen,
        model,
    } = match &named {
        Some((model, _)) => discover::named(Path::new(model), wanted, &directory, available)?,
        None => {
            let found = discover::scan(&directory)?;
            discover::choose(&found, wanted, &directory, available)?
        }
    };
    let source = engine.map_or(Source::Derived, |(_, source)| source);
    r.record("engine", quote(chosen.as_str()), source);
    let source = named.map_or(Source::Derived, |(_, source)| source);
    r.record("model", quote(&model.to_string_lossy()), source);
    Ok((chosen, Some(model)))
}

fn read_header(model: &Path) -> Result<Header, ConfigError> {
    gguf::read(model).map_err(|cause| ConfigError::Header {
        model: model.to_path_buf(),
        cause,
    })
}

/// A file's name without `.gguf`, or a folder's.
fn model_name(model: &Path) -> String {
    let name = if model.extension().is_some_and(|suffix| suffix == "gguf") {
        model.file_stem()
    } else {
        model.file_name()
    };
    name.map_or("model".to_owned(), |name| {
        name.to_string_lossy().into_owned()
    })
}

fn context(r: &mut Resolver<'_>, size: Option<&ModelSize>) -> Result<u32, ConfigError> {
    let models = size.and_then(ModelSize::context_length);
    let parse = |text: &str| {
        let tokens = value::count32(text, 16, 1 << 24)?;
        match models {
            Some(models) if tokens > models => Err(format!(
                "is more than the model's own context of {models} tokens"
            )),
            _ => Ok(tokens),
        }
    };
    let default = models.unwrap_or(CONTEXT_DEFAULT).min(CONTEXT_DEFAULT);
    let (tokens, source) = r.layers.get("ctx-size", parse)?.unwrap_or((
        default,
        if models.is_some_and(|models| models < CONTEXT_DEFAULT) {
            Source::Derived
        } else {
            Source::Default
        },
    ));
    r.record("ctx-size", tokens.to_string(), source);
    Ok(tokens)
}

fn processors(
    r: &mut Resolver<'_>,
    instances: u32,
    cores: u32,
) -> Result<(u32, Option<u32>), ConfigError> {
    let parse = |text: &str| value::count32(text, 1, 1024);
    let (threads, source) = r
        .layers
        .get("threads", parse)?
        .unwrap_or(((cores / instances).max(1), Source::Derived));
    r.record("threads", threads.to_string(), source);
    let layers = r
        .layers
        .get("n-gpu-layers", |text| value::count32(text, 0, 100_000))?;
    if let Some((layers, source)) = &layers {
        r.record("n-gpu-layers", layers.to_string(), source.clone());
    }
    Ok((threads, layers.map(|(layers, _)| layers)))
}

fn fit(
    r: &mut Resolver<'_>,
    size: Option<&ModelSize>,
    model: Option<&Path>,
    demand: Demand<'_>,
    around: Limit,
) -> Result<(Limit, Option<Plan>), ConfigError> {
    let limit = match r.layers.get("memory-limit", value::size)? {
        Some((bytes, source)) => {
            r.record("memory-limit", bytes.to_string(), source);
            Limit {
                bytes,
                origin: LimitOrigin::Setting,
            }
        }
        None => around,
    };
    let costs = size.and_then(|size| size.costs(demand, around));
    let (Some(costs), Some(model)) = (costs, model) else {
        return Ok((limit, None));
    };
    let wanted = r.layers.get("slots", |text| value::count32(text, 1, 256))?;
    let refused = |cause| ConfigError::Memory {
        model: model.to_path_buf(),
        cause,
    };
    let mut slots = wanted.as_ref().map(|(slots, _)| *slots);
    if let Some(ModelSize::File(header)) = size
        && demand.offloaded
        && !demand.devices.is_empty()
    {
        let (fitting, _) = devices::fit(
            demand.devices,
            header,
            demand.instances,
            slots,
            demand.context_tokens,
        )
        .map_err(refused)?;
        slots = Some(fitting);
    }
    let plan = memory::plan(costs, limit, demand.instances, slots, demand.context_tokens)
        .map_err(refused)?;
    let source = wanted.map_or(Source::Derived, |(_, source)| source);
    r.record("slots", plan.slots.to_string(), source);
    Ok((limit, Some(plan)))
}

/// The devices that were named, all of which must be there.
fn devices(
    r: &mut Resolver<'_>,
    engine: EngineKind,
    around: &Surroundings,
) -> Result<Vec<Device>, ConfigError> {
    let parse = |text: &str| {
        let there = if engine == EngineKind::Scripted {
            devices::pretended()
        } else {
            (around.devices)()
        };
        devices::choose(text, &there)
    };
    let Some((chosen, source)) = r.layers.get("devices", parse)? else {
        return Ok(Vec::new());
    };
    let list: Vec<String> = chosen.iter().map(|one| one.index.to_string()).collect();
    r.record("devices", quote(&list.join(",")), source);
    Ok(chosen)
}

fn api_keys(r: &mut Resolver<'_>) -> Result<ApiKeys, ConfigError> {
    let (mut keys, source) = r.layers.api_keys();
    if let Some((path, source)) = r.layers.get("api-key-file", value::text)? {
        let text = read_text(Path::new(&path)).map_err(|error| ConfigError::File {
            path: path.clone(),
            problem: error.to_string(),
        })?;
        keys.extend(
            text.lines()
                .map(str::trim)
                .filter(|line| !line.is_empty() && !line.starts_with('#'))
                .map(str::to_owned),
        );
        if keys.is_empty() {
            return Err(ConfigError::File {
                path,
                problem: "it holds no key, and an open server is not what was asked for".to_owned(),
            });
        }
        r.record("api-key-file", quote(&path), source);
    } else if source != Source::Default && keys.iter().all(String::is_empty) {
        return Err(ConfigError::Conflict(format!(
            "an API key was given ({source}) that is empty: nobody could be told from anybody"
        )));
    }
    if keys.iter().any(String::is_empty) {
        return Err(ConfigError::Conflict(
            "one of the API keys is empty".to_owned(),
        ));
    }
    Ok(ApiKeys(keys))
}

fn run_dir(r: &mut Resolver<'_>, around: &Surroundings, port: u16) -> Result<PathBuf, ConfigError> {
    let directory = r.or(
        "run-dir",
        around.run_directory(port),
        |text| value::text(text).map(PathBuf::from),
        |path| quote(&path.to_string_lossy()),
    )?;
    let bytes = directory.as_os_str().len();
    if bytes > RUN_DIR_BYTES_MAX {
        return Err(ConfigError::Conflict(format!(
            "the run directory {} has a path of {bytes} bytes; sockets need at most \
             {RUN_DIR_BYTES_MAX}: choose a shorter one with `--run-dir`",
            directory.display()
        )));
    }
    Ok(directory)
}

fn worker(r: &mut Resolver<'_>, around: &Surroundings) -> Result<PathBuf, ConfigError> {
    let worker = r.or(
        "worker",
        around.worker_beside(),
        |text| value::text(text).map(PathBuf::from),
        |path| quote(&path.to_string_lossy()),
    )?;
    require_worker(&worker)?;
    Ok(worker)
}

fn require_worker(worker: &Path) -> Result<(), ConfigError> {
    if worker.is_file() {
        return Ok(());
    }
    Err(ConfigError::Conflict(format!(
        "the worker program {} does not exist: build it (`cargo build --release`), or say where it \
         is with `--worker`",
        worker.display()
    )))
}

/// What the worker program says it can run.
fn engines_of(worker: &Path) -> Result<Engines, ConfigError> {
    require_worker(worker)?;
    engines::ask(worker).map_err(|problem| {
        ConfigError::Conflict(format!(
            "the worker program {} cannot be used: {problem}; build it anew (`cargo build \
             --release`), or say with `--worker` where another one is",
            worker.display()
        ))
    })
}

fn show_duration(duration: &Duration) -> String {
    let ms = duration.as_millis();
    if ms.is_multiple_of(1000) {
        format!("\"{}s\"", ms / 1000)
    } else {
        format!("\"{ms}ms\"")
    }
}

/// A text as TOML writes it.
fn quote(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

#[cfg(test)]
mod tests;
