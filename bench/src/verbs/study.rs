//! `study`: the study's three tables for each engine that is here, with the line that it lacked.

use std::path::{Path, PathBuf};

use super::matrix::{Asked, arms, closed, measure, serving};
use super::report::write_pages;
use super::say;
use crate::cli::{MatrixArgs, StudyArgs};
use crate::error::BenchError;
use crate::record::Recorded;
use crate::report;
use crate::report::markdown::Slo;
use crate::sweep::{Arm, Place, WarmUp};
use crate::target::Size;

/// Concurrencies of the study's sweep.
const LEVELS: [u32; 5] = [1, 4, 8, 16, 32];

/// Requests of a level and tokens of an answer by `--quick`.
const QUICK: (u64, u32) = (4, 32);

pub(super) fn study_verb(args: &StudyArgs) -> Result<(), BenchError> {
    let slo = Slo::from(args.slo);
    let given = &args.matrix;
    let chosen = !given.arm.is_empty()
        || given.exec.is_some()
        || given.target.url.is_some()
        || given.serve.serve.is_some();
    let mut servers = if chosen { arms(given)? } else { engines(args)? };
    let mut runs: Vec<Recorded> = Vec::new();
    for mut asked in parts(args) {
        asked.arms = Some(servers.clone());
        // A server whose size is not ours to choose has one size.
        let found = measure(given, &asked)?;
        say(&report::markdown(&found, slo));
        // An engine that could not be run once will not be run by the other parts.
        servers.retain(|arm| found.cells.iter().any(|one| one.cell.arm == arm.name));
        runs.push(found);
    }
    say(&report::joint_verdict(&runs, slo));
    write_pages(&runs, slo, &args.pages)
}

/// Single, sweep and scale, by the study's counts or by the quick ones.
fn parts(args: &StudyArgs) -> Vec<Asked> {
    let levels: Vec<u32> = if args.quick {
        // With 4 requests a level there are never more in flight.
        vec![1, 2, 4]
    } else {
        LEVELS.to_vec()
    };
    let one = |slots| Size {
        instances: 1,
        slots,
    };
    let mut sizes = vec![one(1), one(args.slots.max(1))];
    sizes.dedup();
    let mut parts = [
        Asked::single(),
        Asked {
            sizes,
            loads: closed(&levels),
            ..Asked::of("sweep")
        },
        Asked::scale("scale", &args.instances, &[1]),
    ];
    for part in &mut parts {
        part.suite = Some("study");
        if args.quick {
            (part.requests, part.max_tokens) = QUICK;
            part.rules = Some("study-v1-quick");
            if part.verb == "scale" {
                part.loads = closed(&[4]);
            }
            part.warm_up = match part.warm_up {
                WarmUp::EachCell(_) => WarmUp::EachCell(1),
                WarmUp::EachInstance(_) => WarmUp::EachInstance(1),
            };
        }
    }
    parts.into()
}

/// The engines that there is a model for, each served by our own dispatcher.
fn engines(args: &StudyArgs) -> Result<Vec<Arm>, BenchError> {
    let models = [
        ("llama", args.llama.clone(), gguf as fn(&Path) -> bool),
        ("mlx", args.mlx.clone(), folder),
    ];
    let mut arms = Vec::new();
    for (engine, named, is_model) in models {
        let model = match named {
            Some(model) => Some(model),
            None => only(&args.models_dir, engine, is_model)?,
        };
        if let Some(model) = model {
            arms.push(arm(&args.matrix, engine, &model)?);
        }
    }
    if arms.is_empty() {
        return Err(BenchError::Usage(format!(
            "{} holds no model: name one with --llama or --mlx, fetch the small one with scripts/fetch-model, or give --url or --exec",
            args.models_dir.display()
        )));
    }
    Ok(arms)
}

fn arm(args: &MatrixArgs, engine: &str, model: &Path) -> Result<Arm, BenchError> {
    Ok(Arm {
        name: engine.to_owned(),
        place: Place::Exec(serving(args, model, Some(engine))?),
    })
}

fn gguf(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "gguf")
}

fn folder(path: &Path) -> bool {
    path.join("config.json").exists()
}

/// The only model of its kind in a folder; none where there is none.
fn only(
    directory: &Path,
    engine: &str,
    is_model: fn(&Path) -> bool,
) -> Result<Option<PathBuf>, BenchError> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut models: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| is_model(path))
        .collect();
    models.sort();
    if models.len() > 1 {
        let names: Vec<String> = models
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        return Err(BenchError::Usage(format!(
            "there are several models for {engine}: name one with --{engine}: {}",
            names.join(", ")
        )));
    }
    Ok(models.pop())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Args, Verb};

    fn study(arguments: &[&str]) -> StudyArgs {
        let words = ["dispatcher-bench", "study"];
        let parsed = Args::try_parse_from(words.iter().chain(arguments)).unwrap();
        let Verb::Study(args) = parsed.verb else {
            unreachable!()
        };
        args
    }

    #[test]
    fn the_parts_have_the_studys_counts_and_quick_has_its_own_contract() {
        let full = parts(&study(&[]));
        let counts: Vec<(u64, u32, usize)> = full
            .iter()
            .map(|part| (part.requests, part.max_tokens, part.loads.len()))
            .collect();
        assert_eq!(counts, [(20, 256, 1), (16, 256, 5), (16, 256, 1)]);
        assert_eq!(full[0].warm_up, WarmUp::EachCell(3));
        assert_eq!(full[2].warm_up, WarmUp::EachInstance(2));
        assert_eq!((full[1].sizes.len(), full[2].sizes.len()), (2, 3));
        for part in parts(&study(&["--quick"])) {
            assert_eq!((part.requests, part.max_tokens), (4, 32));
            assert_eq!(part.rules, Some("study-v1-quick"));
        }
    }

    #[test]
    fn engines_are_those_that_there_is_one_model_for() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let directory = folder.path().to_str().unwrap();
        let args = study(&["--models-dir", directory]);
        let error = engines(&args).unwrap_err().to_string();
        assert!(error.contains("no model"), "{error}");
        std::fs::write(at("a.gguf"), "").unwrap();
        std::fs::create_dir(at("m")).unwrap();
        std::fs::write(at("m/config.json"), "").unwrap();
        let names: Vec<String> = engines(&args)
            .unwrap()
            .into_iter()
            .map(|arm| arm.name)
            .collect();
        assert_eq!(names, ["llama", "mlx"]);
        std::fs::write(at("b.gguf"), "").unwrap();
        let error = engines(&args).unwrap_err().to_string();
        assert!(
            error.contains("--llama") && error.contains("b.gguf"),
            "{error}"
        );
        let named = study(&["--models-dir", directory, "--llama", "b.gguf"]);
        assert_eq!(engines(&named).unwrap().len(), 2);
    }
}
