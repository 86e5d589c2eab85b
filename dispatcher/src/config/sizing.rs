//! The settings that planning needs, and no others: a plan is made where nothing could be served yet.

use std::path::PathBuf;

use super::{Config, ConfigError, Resolver, Surroundings, config_file, layers::Layers, value};
use crate::cli::Settings;
use crate::devices::{self, Device};
use crate::memory::{Limit, LimitOrigin};

/// What was said of sizes, and where things are.
#[derive(Clone, Debug)]
pub struct Sizing {
    pub models_directory: PathBuf,
    pub cache_directory: PathBuf,
    pub worker: PathBuf,
    /// `--model`, if anything.
    pub model: Option<String>,
    pub context_tokens: Option<u32>,
    pub threads: Option<u32>,
    pub slots: Option<u32>,
    pub instances: Option<u32>,
    pub memory: Limit,
    pub devices: Vec<Device>,
    pub is_mac: bool,
}

impl Config {
    /// What `settings` say of sizes.
    ///
    /// # Errors
    /// As [`Config::resolve`], for the settings that are read.
    pub fn sizing(settings: &Settings, around: &Surroundings) -> Result<Sizing, ConfigError> {
        let resolver = Resolver {
            layers: Layers {
                typed: settings,
                environment: &around.environment,
                file: config_file(settings, around)?,
            },
            effective: Vec::new(),
        };
        let layers = &resolver.layers;
        let path = |key| -> Result<Option<PathBuf>, ConfigError> {
            let found = layers.get(key, |text| value::text(text).map(PathBuf::from))?;
            Ok(found.map(|(path, _)| path))
        };
        let count = |key, min, max| -> Result<Option<u32>, ConfigError> {
            let found = layers.get(key, |text| value::count32(text, min, max))?;
            Ok(found.map(|(count, _)| count))
        };
        let named = layers.get("devices", |text| devices::choose(text, &(around.devices)()))?;
        let memory = layers.get("memory-limit", value::size)?;
        Ok(Sizing {
            models_directory: path("models-dir")?.unwrap_or_else(|| around.models_directory()),
            cache_directory: around.cache_directory(),
            worker: path("worker")?.unwrap_or_else(|| around.worker_beside()),
            model: layers.get("model", value::text)?.map(|(model, _)| model),
            context_tokens: count("ctx-size", 16, 1 << 24)?,
            threads: count("threads", 1, 1024)?,
            slots: count("slots", 1, 256)?,
            instances: count("instances", 1, 256)?,
            memory: memory.map_or(around.memory, |(bytes, _)| Limit {
                bytes,
                origin: LimitOrigin::Setting,
            }),
            devices: named.map(|(devices, _)| devices).unwrap_or_default(),
            is_mac: around.is_mac,
        })
    }
}
