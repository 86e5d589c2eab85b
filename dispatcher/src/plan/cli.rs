//! The verb `plan`.

use std::io::Write as _;
use std::path::Path;

use clap::Args;

use super::calibration::Calibrations;
use super::error::PlanError;
use super::measure;
use super::model::ModelFacts;
use super::predict::{Workload, predict};
use super::prepare::{self, Prepared, prepare};
use super::recommend::recommend;
use super::table;
use crate::bus::Machine;
use crate::cli::Settings;
use crate::config::{Config, Sizing, Surroundings};
use crate::model::discover;
use crate::process::engines;

/// Instances and slots of the table, beside those that the settings name.
const INSTANCES: [u32; 3] = [1, 2, 3];
const SLOTS: [u32; 6] = [1, 2, 4, 8, 16, 32];

/// What `plan` is told.
#[derive(Clone, Debug, Args)]
pub struct PlanArgs {
    /// A GGUF file or an MLX folder: a path, or a name in the models directory.
    #[arg(value_name = "MODEL")]
    pub which: Option<String>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Load the model and time its steps first, for under a minute; the times are kept for later plans.
    #[arg(long)]
    pub measure: bool,
    /// Measure this machine's memory again.
    #[arg(long)]
    pub remeasure: bool,
    /// Plan for memory of this bandwidth instead of this machine's, in GB/s.
    #[arg(long, value_name = "GB/s", conflicts_with_all = ["measure", "remeasure"])]
    pub bandwidth: Option<f64>,
    /// Tokens of each prompt.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub prompt_tokens: u32,
    /// Tokens of each answer.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub output_tokens: u32,
}

/// Makes the plan and returns what to print.
///
/// # Errors
/// Where there is no such model, a setting is wrong, or `--measure` cannot load the model.
pub fn run(
    args: &PlanArgs,
    settings: &Settings,
    around: &Surroundings,
) -> Result<String, PlanError> {
    if let Some(bandwidth) = args.bandwidth
        && !(bandwidth.is_finite() && bandwidth > 0.0)
    {
        return Err(PlanError::Argument(
            "--bandwidth must be more than 0 GB/s".to_owned(),
        ));
    }
    let sizing = Config::sizing(settings, around)?;
    let machine = Machine::probe();
    let model = find(args, &sizing)?;
    let mut notes = Vec::new();
    if args.remeasure {
        prepare::measured(&sizing, &machine, true, &mut notes);
    }
    let workload = Workload {
        prompt_tokens: args.prompt_tokens,
        output_tokens: args.output_tokens.max(1),
    };
    let make = || prepare(model.clone(), &sizing, &machine, workload, args.bandwidth);
    let mut prepared = make();
    if args.measure {
        calibrate(&prepared, &sizing)?;
        prepared = make();
    }
    notes.retain(|note| !prepared.notes.contains(note));
    prepared.notes.extend(notes);
    let devices = u32::try_from(sizing.devices.len()).unwrap_or(u32::MAX);
    let instances = listed(&INSTANCES, [sizing.instances, Some(devices)]);
    let slots = listed(&SLOTS, [sizing.slots, None]);
    let cells = predict(&prepared.question, &instances, &slots);
    let recommendation = recommend(&cells);
    Ok(if args.json {
        table::json(&prepared, &cells, recommendation.as_ref())
    } else {
        table::text(&prepared, &cells, recommendation.as_ref())
    })
}

/// The usual values, and those that were named.
fn listed(usual: &[u32], named: [Option<u32>; 2]) -> Vec<u32> {
    let mut all: Vec<u32> = usual
        .iter()
        .copied()
        .chain(named.into_iter().flatten())
        .filter(|value| *value > 0)
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The named model, or the only one there is.
fn find(args: &PlanArgs, sizing: &Sizing) -> Result<ModelFacts, PlanError> {
    let directory = &sizing.models_directory;
    if let Some(name) = args.which.as_ref().or(sizing.model.as_ref()) {
        return Ok(ModelFacts::find(Path::new(name), directory)?);
    }
    let found = discover::scan(directory)?;
    let all: Vec<_> = found.gguf.iter().chain(&found.mlx).collect();
    match all.as_slice() {
        [one] => Ok(ModelFacts::read(one)?),
        [] => Err(PlanError::Argument(format!(
            "there is no model in {}: name one (`dispatcher plan MODEL`)",
            directory.display()
        ))),
        several => {
            let list: Vec<String> = several
                .iter()
                .map(|path| format!("\n  dispatcher plan {}", discover::shell_word(path)))
                .collect();
            Err(PlanError::Argument(format!(
                "which model? {} holds {}:{}",
                directory.display(),
                several.len(),
                list.concat()
            )))
        }
    }
}

/// Times the steps and keeps what was found.
fn calibrate(prepared: &Prepared, sizing: &Sizing) -> Result<(), PlanError> {
    let model = &prepared.model;
    let engines = engines::ask(&sizing.worker).map_err(|problem| {
        let worker = sizing.worker.display();
        PlanError::Argument(format!(
            "--measure loads the model by {worker}, which cannot be used: {problem}"
        ))
    })?;
    if !engines.has(model.engine) {
        return Err(PlanError::Argument(format!(
            "--measure loads the model, and {} has no engine `{}`",
            sizing.worker.display(),
            model.engine
        )));
    }
    let fits = |instances: u32, slots: u32| {
        let cells = predict(&prepared.question, &[instances], &[slots]);
        cells.iter().all(|cell| cell.fits)
    };
    let slots = SLOTS.into_iter().rev().find(|slots| fits(1, *slots));
    let mut tell = |line: &str| {
        // Progress is for people: a closed stream is no error.
        let _ = writeln!(std::io::stderr(), "{line}");
    };
    let calibration = measure::measure(model, sizing, slots.unwrap_or(1), fits(2, 4), &mut tell)?;
    let kept = Calibrations::new(&sizing.cache_directory);
    kept.put(&prepared.key, &calibration)
        .map_err(|cause| PlanError::Keep {
            path: sizing.cache_directory.display().to_string(),
            cause,
        })
}
