//! Which part carries out which verb.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::arrival::Arrival;
use crate::bus;
use crate::cell::Measured;
use crate::chaos;
use crate::cli::{
    Args, BusArgs, ChaosArgs, CompareArgs, FloodArgs, LoadArgs, MatrixArgs, ReportArgs, Rules,
    ScaleArgs, SweepArgs, Verb,
};
use crate::client::Patience;
use crate::contract::Contract;
use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::flood::{self, Flood};
use crate::host::Surroundings;
use crate::record::{self, Run};
use crate::report::{markdown, svg};
use crate::sweep::{self, Arm, Matrix, Order, Place, Results, WarmUp};
use crate::synth;
use crate::target::{Launch, Size};
use crate::verdict;
use crate::workload::{OutputLength, Shape, Workload};

/// Carries out what was asked.
///
/// # Errors
/// Whatever kept it from measuring, or a promise that was measured broken.
pub fn run(args: Args) -> Result<(), BenchError> {
    match args.verb {
        Verb::Single(args) => run_single(&args),
        Verb::Sweep(args) => run_sweep(&args),
        Verb::Scale(args) => run_scale(&args, markdown::scale, "scale"),
        Verb::Surface(args) => run_scale(&args, markdown::surface, "surface"),
        Verb::Load(args) => run_load(&args),
        Verb::Compare(args) => run_compare(&args),
        Verb::Bus(args) => run_bus(&args),
        Verb::Synth(args) => {
            let bytes = synth::write(args.shapes, &args.tokenizer, args.seed, &args.out)?;
            say(&format!("{}: {bytes} bytes", args.out.display()));
            Ok(())
        }
        Verb::Report(args) => run_report(&args),
        Verb::Flood(args) => run_flood(&args),
        Verb::Chaos(args) => run_chaos(&args),
    }
}

fn run_flood(args: &FloodArgs) -> Result<(), BenchError> {
    let endpoint = args.target.endpoint()?;
    let shape = Shape {
        model: args.target.model.clone(),
        output: OutputLength::Fixed {
            tokens: args.max_tokens,
        },
        ignore_eos: true,
        extra: extra(args.extra.as_deref())?,
        ..Shape::study()
    };
    let count = usize::try_from(args.requests.min(4_096)).unwrap_or(1);
    let workload = Workload::random(
        count,
        (args.prompt_words, args.prompt_words),
        shape,
        args.seed,
    );
    let flooded = flood::run(
        &endpoint,
        &workload,
        Flood {
            readers: args.readers,
            requests: args.requests,
            threads: args.threads,
            pace: Duration::from_micros(args.pace_us),
        },
    )?;
    if args.json {
        say(&serde_json::to_string(&flooded).unwrap_or_default());
    } else {
        say(&flooded.to_string());
    }
    if flooded.completed == 0 {
        return Err(BenchError::Unreachable {
            target: args.target.url.clone(),
            reason: flooded.messages.into_iter().next().unwrap_or_default(),
        });
    }
    Ok(())
}

fn run_chaos(args: &ChaosArgs) -> Result<(), BenchError> {
    let endpoint = args.target.endpoint()?;
    let shape = Shape {
        model: args.target.model.clone(),
        output: OutputLength::Fixed {
            tokens: args.max_tokens,
        },
        temperature: args.temperature,
        sampling_seed: (args.temperature > 0.0).then_some(args.seed),
        ignore_eos: !args.respect_eos,
        extra: extra(args.extra.as_deref())?,
    };
    let workload = Workload::random(
        args.prompts.max(1) as usize,
        (args.prompt_words, args.prompt_words),
        shape,
        args.seed,
    );
    let plan = chaos::Plan {
        streams: args.streams,
        requests: args.requests,
        kills: args.kills,
        abort: args.abort,
        verify: args.verify,
        learn_alone: args.learn_alone,
        seed: args.seed,
        dispatcher_pid: args.dispatcher_pid,
        stop: args.stop,
        silence: Duration::from_secs(args.silence_s),
    };
    let found = runtime()?.block_on(chaos::run(endpoint, workload, plan, args.out.as_deref()))?;
    if args.json {
        say(&serde_json::to_string(&found).unwrap_or_default());
    } else {
        say(&found.to_string());
    }
    found.verdict().map_err(BenchError::Broken)
}

fn extra(text: Option<&str>) -> Result<serde_json::Map<String, serde_json::Value>, BenchError> {
    let Some(text) = text else {
        return Ok(serde_json::Map::new());
    };
    serde_json::from_str(text)
        .map_err(|error| BenchError::Usage(format!("--extra is no JSON object: {error}")))
}

/// One thread: it is not the client that is to be fast, and what it leaves belongs to the server.
fn runtime() -> Result<tokio::runtime::Runtime, BenchError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| BenchError::System {
            what: "start the event loop",
            source,
        })
}

#[expect(clippy::print_stdout, reason = "the result of a command line tool")]
fn say(text: &str) {
    println!("{text}");
}

/// What a verb measures, beside what the arguments say for all of them.
struct Asked {
    verb: &'static str,
    sizes: Vec<Size>,
    loads: Vec<Arrival>,
    requests: u64,
    warm_up: WarmUp,
    order: Option<Order>,
    repeats: Option<u32>,
}

fn run_single(args: &MatrixArgs) -> Result<(), BenchError> {
    let asked = Asked {
        verb: "single",
        sizes: vec![Size {
            instances: 1,
            slots: 1,
        }],
        loads: vec![Arrival::Closed { concurrency: 1 }],
        requests: 20,
        warm_up: WarmUp::EachCell(3),
        order: None,
        repeats: None,
    };
    let (run, results) = measure(args, asked)?;
    tell_table(&run, &markdown::single(&results.cells, &results.failures));
    Ok(())
}

fn run_sweep(args: &SweepArgs) -> Result<(), BenchError> {
    let asked = Asked {
        verb: "sweep",
        sizes: vec![Size {
            instances: args.instances,
            slots: args.slots,
        }],
        loads: closed(&args.concurrency),
        requests: 16,
        warm_up: WarmUp::EachCell(4),
        order: None,
        repeats: None,
    };
    let (run, results) = measure(&args.matrix, asked)?;
    tell_table(&run, &markdown::sweep(&results.cells, &results.failures));
    Ok(())
}

fn closed(concurrencies: &[u32]) -> Vec<Arrival> {
    let closed = |concurrency: &u32| Arrival::Closed {
        concurrency: *concurrency,
    };
    concurrencies.iter().map(closed).collect()
}

fn run_scale(
    args: &ScaleArgs,
    table: fn(&[Measured], &[String]) -> String,
    verb: &'static str,
) -> Result<(), BenchError> {
    let sizes = args.instances.iter().flat_map(|&instances| {
        let size = move |&slots: &u32| Size { instances, slots };
        args.slots.iter().map(size)
    });
    let asked = Asked {
        verb,
        sizes: sizes.collect(),
        loads: closed(&[args.concurrency]),
        requests: 16,
        warm_up: WarmUp::EachInstance(2),
        order: None,
        repeats: None,
    };
    let (run, results) = measure(&args.matrix, asked)?;
    tell_table(&run, &table(&results.cells, &results.failures));
    Ok(())
}

fn run_load(args: &LoadArgs) -> Result<(), BenchError> {
    let load = |&per_s: &f64| match args.burstiness {
        0.0 => Arrival::Constant { per_s },
        1.0 => Arrival::Poisson { per_s },
        burstiness => Arrival::Gamma { per_s, burstiness },
    };
    let loads: Vec<Arrival> = args.rate.iter().map(load).collect();
    loads.iter().try_for_each(Arrival::check)?;
    let asked = Asked {
        verb: "load",
        sizes: vec![Size {
            instances: args.instances,
            slots: args.slots,
        }],
        loads,
        requests: 100,
        warm_up: WarmUp::EachInstance(2),
        order: None,
        repeats: Some(1),
    };
    let (run, results) = measure(&args.matrix, asked)?;
    let table = markdown::load(
        &results.cells,
        &results.failures,
        args.slo_ttft_ms,
        args.slo_tpot_ms,
    );
    tell_table(&run, &table);
    Ok(())
}

fn run_compare(args: &CompareArgs) -> Result<(), BenchError> {
    let seed = args.matrix.seed;
    if let [a, b] = args.files.as_slice() {
        let last = |path: &std::path::PathBuf| -> Result<record::Recorded, BenchError> {
            let mut runs = record::read(path)?;
            runs.pop()
                .ok_or_else(|| BenchError::Usage(format!("{} holds no run", path.display())))
        };
        let (one, other) = (last(a)?, last(b)?);
        one.run.contract.require_same(&other.run.contract)?;
        let name = |path: &std::path::PathBuf| {
            let stem = path.file_stem().unwrap_or_default();
            stem.to_string_lossy().into_owned()
        };
        let mut keys: Vec<Key> = Vec::new();
        for key in one.cells.iter().filter(|one| !one.cell.cold).map(key) {
            let common = !warm(&other.cells, None, Some(key)).is_empty();
            if common && !keys.contains(&key) {
                keys.push(key);
            }
        }
        if keys.is_empty() {
            return Err(BenchError::Usage(
                "the files have no cell of the same size and load".into(),
            ));
        }
        for key in keys {
            let a_cells = warm(&one.cells, None, Some(key));
            let b_cells = warm(&other.cells, None, Some(key));
            let compared = verdict::compare(&a_cells, &b_cells, false, seed);
            let (size, load) = key;
            let size = size.map_or_else(String::new, |size| {
                format!("{} instances × {} slots, ", size.instances, size.slots)
            });
            say(&format!("{size}{}\n", markdown::load_words(&load)));
            say(&verdict::markdown(&name(a), &name(b), &compared));
        }
        return Ok(());
    }
    if args.matrix.arm.len() != 2 {
        return Err(BenchError::Usage(
            "compare takes --arm twice, or --files".into(),
        ));
    }
    let asked = Asked {
        verb: "compare",
        sizes: vec![Size {
            instances: args.instances,
            slots: args.slots,
        }],
        loads: closed(&[args.concurrency]),
        requests: 16,
        warm_up: WarmUp::EachCell(4),
        order: Some(Order::Alternating),
        repeats: Some(5),
    };
    let (run, results) = measure(&args.matrix, asked)?;
    tell_table(&run, &markdown::sweep(&results.cells, &results.failures));
    let arms = arms(&args.matrix)?;
    let (a, b) = (&arms[0].name, &arms[1].name);
    let (cells_a, cells_b) = (
        warm(&results.cells, Some(a), None),
        warm(&results.cells, Some(b), None),
    );
    say(&verdict::markdown(
        a,
        b,
        &verdict::compare(&cells_a, &cells_b, true, seed),
    ));
    Ok(())
}

/// What two files' cells must have in common.
type Key = (Option<Size>, Arrival);

fn key(measured: &Measured) -> Key {
    (measured.cell.size, measured.cell.arrival)
}

/// The warm cells of an arm, or of a size and load, by repeat.
fn warm<'a>(cells: &'a [Measured], arm: Option<&str>, only: Option<Key>) -> Vec<&'a Measured> {
    let wanted = |one: &&Measured| {
        !one.cell.cold
            && arm.is_none_or(|arm| one.cell.arm == arm)
            && only.is_none_or(|only| key(one) == only)
    };
    let mut mine: Vec<&Measured> = cells.iter().filter(wanted).collect();
    mine.sort_by_key(|one| one.cell.repeat);
    mine
}

fn run_bus(args: &BusArgs) -> Result<(), BenchError> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = match args.threads.as_slice() {
        [] if cores == 1 => vec![1],
        [] => vec![1, cores],
        some => some.to_vec(),
    };
    let cache = bus::last_level_cache_bytes();
    let bytes = args.mib.map_or_else(
        || (cache.unwrap_or(64 << 20) * 4).max(512 << 20),
        |mib| mib << 20,
    );
    if !args.json {
        let cache = cache.map_or_else(|| "unknown".into(), |bytes| format!("{} MiB", bytes >> 20));
        say(&format!("largest cache {cache}, array {} MiB", bytes >> 20));
    }
    for threads in threads {
        let found = bus::measure(bus::Plan {
            threads,
            bytes,
            passes: args.passes,
        });
        if args.json {
            say(&serde_json::to_string(&found).unwrap_or_default());
        } else {
            say(&found.to_string());
        }
    }
    Ok(())
}

fn run_report(args: &ReportArgs) -> Result<(), BenchError> {
    let mut drawn = Vec::new();
    for path in &args.files {
        for recorded in record::read(path)? {
            let (cells, mut failures) = (&recorded.cells, recorded.failures.clone());
            if recorded.unfinished > 0 {
                failures.push(format!(
                    "{} cells were cut off; what they have is shown",
                    recorded.unfinished
                ));
            }
            let table = match recorded.run.verb.as_str() {
                "single" => markdown::single(cells, &failures),
                "scale" => markdown::scale(cells, &failures),
                "surface" => markdown::surface(cells, &failures),
                "load" => markdown::load(cells, &failures, args.slo_ttft_ms, args.slo_tpot_ms),
                _ => markdown::sweep(cells, &failures),
            };
            tell_table(&recorded.run, &table);
            drawn.extend(recorded.cells);
        }
    }
    if let Some(path) = &args.svg {
        std::fs::write(path, svg::throughput(&drawn)).map_err(|source| BenchError::File {
            path: path.clone(),
            source,
        })?;
    }
    Ok(())
}

fn tell_table(run: &Run, table: &str) {
    say(&format!("{}{table}", markdown::heading(run)));
}

fn arms(args: &MatrixArgs) -> Result<Vec<Arm>, BenchError> {
    let arm = |name: &str, place: &str| -> Result<Arm, BenchError> {
        let place = if place.starts_with("http://") || place.starts_with("https://") {
            Place::Url(Endpoint::parse(place, args.target.api_key.clone())?)
        } else {
            let launch = Launch {
                command: place.to_owned(),
                ready_within: Duration::from_secs(args.ready_within_s),
                log: args.log.clone(),
                api_key: args.target.api_key.clone(),
            };
            launch.words(
                Size {
                    instances: 1,
                    slots: 1,
                },
                1,
            )?;
            Place::Exec(launch)
        };
        Ok(Arm {
            name: name.to_owned(),
            place,
        })
    };
    if args.arm.is_empty() {
        let place = args.exec.as_deref().unwrap_or(&args.target.url);
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

fn workload(args: &MatrixArgs, requests: u64) -> Result<Workload, BenchError> {
    let shape = Shape {
        model: args.target.model.clone(),
        output: OutputLength::Fixed {
            tokens: args.max_tokens,
        },
        ignore_eos: args.ignore_eos,
        extra: extra(args.extra.as_deref())?,
        ..Shape::study()
    };
    let count = usize::try_from(requests)
        .unwrap_or(usize::MAX)
        .clamp(1, 65_536);
    Ok(match (args.random_prompts, args.shared_prefix) {
        (None, _) => Workload {
            shape,
            ..Workload::study()
        },
        (Some(own), Some(shared)) => Workload::shared_prefix(count, shared, own, shape, args.seed),
        (Some(tokens), None) => Workload::random(count, (tokens, tokens), shape, args.seed),
    })
}

fn measure(args: &MatrixArgs, asked: Asked) -> Result<(Run, Results), BenchError> {
    let requests = args.requests.unwrap_or(asked.requests);
    let workload = Arc::new(workload(args, requests)?);
    let arms = arms(args)?;
    let (rules, corrected) = match args.rules {
        Rules::StudyV1 => ("study-v1", false),
        Rules::V2 => ("v2", true),
    };
    let contract = Contract::new(rules, &workload, requests, &asked.warm_up.words());
    let shown = |arm: &Arm| match &arm.place {
        Place::Url(endpoint) => format!("http://{}{}", endpoint.authority(), endpoint.path),
        Place::Exec(launch) => launch.command.clone(),
    };
    let run = Run {
        verb: asked.verb.to_owned(),
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
    let repeats = args.repeats.or(asked.repeats);
    let matrix = Matrix {
        arms,
        sizes: asked.sizes,
        loads: asked.loads,
        repeats: repeats.unwrap_or(if corrected { 5 } else { 1 }).max(1),
        requests,
        warm_up: asked.warm_up,
        cold: corrected || asked.verb == "single",
        order: asked.order.unwrap_or(if corrected {
            Order::Shuffled
        } else {
            Order::AsGiven
        }),
        cool_down: Duration::from_secs(args.cool_down_s),
        patience: Patience {
            idle: Duration::from_secs(args.silence_s),
            ..Patience::default()
        },
        seed: args.seed,
        out: args.out.clone(),
    };
    let results = runtime()?.block_on(sweep::run(&matrix, &workload, run.clone(), note))?;
    Ok((run, results))
}

/// As typed, but for the key.
fn command_line(api_key: Option<&str>) -> Vec<String> {
    let hide = |word: String| match api_key {
        Some(key) if !key.is_empty() => word.replace(key, "***"),
        _ => word,
    };
    std::env::args().map(hide).collect()
}

/// Progress, apart from the result.
#[expect(clippy::print_stderr, reason = "progress of a command line tool")]
fn note(text: &str) {
    eprintln!("{text}");
}
