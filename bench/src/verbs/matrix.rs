//! The verbs that run a matrix of cells: what each asks, and how arguments become servers and workloads.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use super::{extra, runtime, say};
use crate::arrival::Arrival;
use crate::cli::{LoadArgs, MatrixArgs, Rules, ScaleArgs, Span, SweepArgs};
use crate::client::Patience;
use crate::contract::Contract;
use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::host::Surroundings;
use crate::plan;
use crate::record::{Recorded, Run};
use crate::report;
use crate::report::markdown::Slo;
use crate::sweep::{self, Arm, Matrix, Order, Place, WarmUp};
use crate::target::{Launch, Size};
use crate::workload::{OutputLength, Shape, Workload};

const ONE: Size = Size {
    instances: 1,
    slots: 1,
};

/// By how much `load --ramp` raises the rate.
const RAMP_FACTOR: f64 = 1.5;
/// … and how often: 1.5^20 is more than 3,000.
const RAMP_STEPS: i32 = 20;

/// What a verb measures, beside what the arguments say for all of them.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) verb: &'static str,
    /// The verb that this one is a part of.
    pub(super) suite: Option<&'static str>,
    /// Rules of a name of their own.
    pub(super) rules: Option<&'static str>,
    pub(super) sizes: Vec<Size>,
    pub(super) loads: Vec<Arrival>,
    pub(super) requests: u64,
    pub(super) max_tokens: u32,
    pub(super) warm_up: WarmUp,
    pub(super) order: Option<Order>,
    pub(super) repeats: Option<u32>,
    pub(super) until_saturated: bool,
    /// Instead of those of the arguments.
    pub(super) arms: Option<Vec<Arm>>,
}

impl Asked {
    /// One server of one instance and slot, 16 requests of 256 tokens at most.
    pub(super) fn of(verb: &'static str) -> Self {
        Self {
            verb,
            suite: None,
            rules: None,
            sizes: vec![ONE],
            loads: Vec::new(),
            requests: 16,
            max_tokens: 256,
            warm_up: WarmUp::EachCell(4),
            order: None,
            repeats: None,
            until_saturated: false,
            arms: None,
        }
    }

    /// The study's first table.
    pub(super) fn single() -> Self {
        Self {
            loads: closed(&[1]),
            requests: 20,
            warm_up: WarmUp::EachCell(3),
            ..Self::of("single")
        }
    }

    /// The study's second: 2 warm-ups of each instance.
    pub(super) fn scale(verb: &'static str, instances: &[u32], slots: &[u32]) -> Self {
        let sizes = instances.iter().flat_map(|&instances| {
            let size = move |&slots: &u32| Size { instances, slots };
            slots.iter().map(size)
        });
        Self {
            sizes: sizes.collect(),
            loads: closed(&[16]),
            warm_up: WarmUp::EachInstance(2),
            ..Self::of(verb)
        }
    }
}

pub(super) fn closed(concurrencies: &[u32]) -> Vec<Arrival> {
    let closed = |concurrency: &u32| Arrival::Closed {
        concurrency: *concurrency,
    };
    concurrencies.iter().map(closed).collect()
}

pub(super) fn single_verb(args: &MatrixArgs) -> Result<(), BenchError> {
    let found = measure(args, &Asked::single())?;
    say(&report::markdown(&found, Slo::default()));
    Ok(())
}

pub(super) fn sweep_verb(args: &SweepArgs) -> Result<(), BenchError> {
    let asked = Asked {
        sizes: vec![Size {
            instances: args.instances,
            slots: args.slots,
        }],
        loads: closed(&args.concurrency),
        ..Asked::of("sweep")
    };
    let found = measure(&args.matrix, &asked)?;
    say(&report::markdown(&found, Slo::default()));
    Ok(())
}

pub(super) fn scale_verb(args: &ScaleArgs) -> Result<(), BenchError> {
    let asked = Asked {
        loads: closed(&args.concurrency),
        ..Asked::scale("scale", &args.instances, &args.slots)
    };
    let found = measure(&args.matrix, &asked)?;
    say(&report::markdown(&found, Slo::default()));
    Ok(())
}

pub(super) fn surface_verb(args: &ScaleArgs) -> Result<(), BenchError> {
    let asked = Asked {
        loads: closed(&args.concurrency),
        order: Some(Order::Shuffled),
        ..Asked::scale("surface", &args.instances, &args.slots)
    };
    let found = measure(&args.matrix, &asked)?;
    say(&report::markdown(&found, Slo::default()));
    Ok(())
}

pub(super) fn load_verb(args: &LoadArgs) -> Result<(), BenchError> {
    let load = |per_s: f64| match args.burstiness {
        _ if args.matrix.trace.is_some() => Arrival::Trace { speed: per_s },
        0.0 => Arrival::Constant { per_s },
        1.0 => Arrival::Poisson { per_s },
        burstiness => Arrival::Gamma { per_s, burstiness },
    };
    let rates: Vec<f64> = match args.rate.as_slice() {
        [first] if args.ramp => (0..RAMP_STEPS)
            .map(|step| {
                // Two decimals: a rate is to be read, and its cell to be found again.
                (first * RAMP_FACTOR.powi(step) * 100.0).round() / 100.0
            })
            .collect(),
        _ if args.ramp => {
            return Err(BenchError::Usage(
                "--ramp begins at one --rate, and several were given".into(),
            ));
        }
        rates => rates.to_vec(),
    };
    let loads: Vec<Arrival> = rates.into_iter().map(load).collect();
    loads.iter().try_for_each(Arrival::check)?;
    let asked = Asked {
        sizes: vec![Size {
            instances: args.instances,
            slots: args.slots,
        }],
        loads,
        requests: 100,
        warm_up: WarmUp::EachInstance(2),
        repeats: Some(1),
        until_saturated: args.ramp,
        ..Asked::of("load")
    };
    let found = measure(&args.matrix, &asked)?;
    say(&report::markdown(&found, args.slo.into()));
    Ok(())
}

/// The dispatcher's program: named, beside this one, or on the path.
pub(super) fn dispatcher(args: &MatrixArgs) -> PathBuf {
    let beside = || {
        let program = std::env::current_exe().ok()?.with_file_name("dispatcher");
        program.exists().then_some(program)
    };
    let named = args.serve.dispatcher.clone();
    named
        .or_else(beside)
        .unwrap_or_else(|| PathBuf::from("dispatcher"))
}

/// The command that serves `model` by our own dispatcher, in the cell's size.
pub(super) fn serving(
    args: &MatrixArgs,
    model: &Path,
    engine: Option<&str>,
) -> Result<Launch, BenchError> {
    let quoted = |path: &Path| -> Result<String, BenchError> {
        let text = path.to_string_lossy();
        match text.contains('\'') {
            true => Err(BenchError::Usage(format!("{text} has a quote in it"))),
            false => Ok(format!("'{text}'")),
        }
    };
    let mut command = format!("{} --model {}", quoted(&dispatcher(args))?, quoted(model)?);
    if let Some(engine) = engine {
        command += &format!(" --engine {engine}");
    }
    command += " --instances {instances} --slots {slots} --port {port}";
    if let Some(flags) = &args.serve.dispatcher_flags {
        command += &format!(" {flags}");
    }
    launch(args, command)
}

/// What the dispatcher predicts for the sizes of `scale` and `surface`, where it is ours that is measured.
fn planned(args: &MatrixArgs, asked: &Asked) -> Option<serde_json::Value> {
    let model = args.serve.serve.as_deref()?;
    let tokens = args.max_tokens.map_or(asked.max_tokens, |span| span.high);
    matches!(asked.verb, "scale" | "surface")
        .then(|| plan::ask(&dispatcher(args), model, tokens))
        .flatten()
}

fn launch(args: &MatrixArgs, command: String) -> Result<Launch, BenchError> {
    let launch = Launch {
        command,
        ready_within: Duration::from_secs(args.ready_within_s),
        log: args.log.clone(),
        api_key: args.target.api_key.clone(),
    };
    launch.words(ONE, 1)?;
    Ok(launch)
}

pub(super) fn arms(args: &MatrixArgs) -> Result<Vec<Arm>, BenchError> {
    let arm = |name: &str, place: &str| -> Result<Arm, BenchError> {
        let place = if place.starts_with("http://") || place.starts_with("https://") {
            Place::Url(Endpoint::parse(place, args.target.api_key.clone())?)
        } else {
            Place::Exec(launch(args, place.to_owned())?)
        };
        Ok(Arm {
            name: name.to_owned(),
            place,
        })
    };
    if args.arm.is_empty() {
        if let Some(model) = &args.serve.serve {
            return Ok(vec![Arm {
                name: "dispatcher".into(),
                place: Place::Exec(serving(args, model, None)?),
            }]);
        }
        let place = args.exec.as_deref().unwrap_or(args.target.url());
        return Ok(vec![arm("server", place)?]);
    }
    let mut arms: Vec<Arm> = Vec::new();
    for text in &args.arm {
        let (name, place) = text
            .split_once('=')
            .ok_or_else(|| BenchError::Usage(format!("--arm {text} is not NAME=WHERE")))?;
        if arms.iter().any(|one| one.name == name) {
            return Err(BenchError::Usage(format!("two arms are called {name}")));
        }
        arms.push(arm(name, place)?);
    }
    Ok(arms)
}

fn workload(args: &MatrixArgs, requests: u64, asked: &Asked) -> Result<Workload, BenchError> {
    let span = args.max_tokens.unwrap_or(Span {
        low: asked.max_tokens,
        high: asked.max_tokens,
    });
    let output = if span.low == span.high {
        OutputLength::Fixed { tokens: span.low }
    } else {
        OutputLength::Uniform {
            low: span.low,
            high: span.high,
        }
    };
    let shape = Shape {
        model: args.target.model.clone(),
        output,
        ignore_eos: args.ignore_eos,
        extra: extra(args.extra.as_deref())?,
        ..Shape::study()
    };
    let count = usize::try_from(requests)
        .unwrap_or(usize::MAX)
        .clamp(1, 65_536);
    let seed = args.seed;
    if let Some(path) = &args.trace {
        return Workload::trace(path, shape, seed);
    }
    if let Some(tokens) = args.long_context {
        return Ok(Workload::long_context(count, tokens, shape, seed));
    }
    Ok(match (args.random_prompts, args.shared_prefix) {
        (None, _) => Workload {
            shape,
            // Only lengths that are drawn depend on it, and the study's have none.
            seed: if span.low == span.high { 0 } else { seed },
            ..Workload::study()
        },
        (Some(own), Some(shared)) => Workload::shared_prefix(count, shared, own.high, shape, seed),
        (Some(own), None) => Workload::random(count, (own.low, own.high), shape, seed),
    })
}

/// Runs what was asked, or what of it an earlier sitting left to do.
pub(super) fn measure(args: &MatrixArgs, asked: &Asked) -> Result<Recorded, BenchError> {
    let workload = workload(args, args.requests.unwrap_or(asked.requests), asked)?;
    let traced = workload.trace.len() as u64;
    let otherwise = if traced > 0 { traced } else { asked.requests };
    let requests = args.requests.unwrap_or(otherwise);
    let arms = match &asked.arms {
        Some(arms) => arms.clone(),
        None => arms(args)?,
    };
    let (rules, corrected) = match args.rules {
        Rules::StudyV1 => ("study-v1", false),
        Rules::V2 => ("v2", true),
    };
    let rules = asked.rules.unwrap_or(rules);
    let contract = Contract::new(rules, &workload, requests, &asked.warm_up.words());
    let shown = |arm: &Arm| match &arm.place {
        Place::Url(endpoint) => format!("http://{}{}", endpoint.authority(), endpoint.path),
        Place::Exec(launch) => launch.command.clone(),
    };
    let run = Run {
        verb: asked.verb.to_owned(),
        suite: asked.suite.map(ToOwned::to_owned),
        contract_hash: contract.hash(),
        contract,
        surroundings: Surroundings::now(),
        command: command_line(args.target.api_key.as_deref()),
        arms: arms
            .iter()
            .map(|arm| (arm.name.clone(), shown(arm)))
            .collect::<BTreeMap<_, _>>(),
        seed: args.seed,
    };
    let order = asked.order.unwrap_or(if corrected {
        Order::Shuffled
    } else {
        Order::AsGiven
    });
    let repeats = args.repeats.or(asked.repeats);
    let matrix = Matrix {
        arms,
        sizes: asked.sizes.clone(),
        loads: asked.loads.clone(),
        repeats: repeats.unwrap_or(if corrected { 5 } else { 1 }).max(1),
        requests,
        warm_up: asked.warm_up,
        cold: corrected || asked.verb == "single",
        until_saturated: asked.until_saturated,
        order,
        cool_down: Duration::from_secs(args.cool_down_s),
        patience: Patience {
            idle: Duration::from_secs(args.silence_s),
            ..Patience::default()
        },
        seed: args.seed,
        out: args.out.clone(),
        plan: planned(args, asked),
        resume: args.resume,
    };
    let workload = Arc::new(workload);
    runtime()?.block_on(async {
        let stop = stop()?;
        sweep::run(&matrix, &workload, run, stop).await
    })
}

/// Ends at SIGINT or SIGTERM.
fn stop() -> Result<impl Future<Output = ()>, BenchError> {
    let failed = |source| BenchError::System {
        what: "listen for signals",
        source,
    };
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// As typed, but for the key.
fn command_line(api_key: Option<&str>) -> Vec<String> {
    let hide = |word: String| match api_key {
        Some(key) if !key.is_empty() => word.replace(key, "***"),
        _ => word,
    };
    std::env::args().map(hide).collect()
}
