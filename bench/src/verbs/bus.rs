//! `bus`: read bandwidth by number of threads and of processes.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use super::say;
use crate::bus::{self, Plan};
use crate::cli::BusArgs;
use crate::error::BenchError;
use crate::statistics::{figure, interpolated};

pub(super) fn bus_verb(args: &BusArgs) -> Result<(), BenchError> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = if args.threads.is_empty() {
        up_to(cores)
    } else {
        args.threads.clone()
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
    if args.wait {
        say("ready");
        let mut line = String::new();
        // At its end the bench that started this one is gone, and nobody reads the figures.
        if std::io::stdin().lock().read_line(&mut line).unwrap_or(0) == 0 {
            return Ok(());
        }
    }
    for threads in threads {
        let found = bus::measure(Plan {
            threads,
            bytes,
            passes: args.passes,
        });
        let found = Read {
            processes: 1,
            threads: found.threads,
            bytes: found.bytes,
            gb_per_s: found.gb_per_s,
        };
        tell(args.json, &found);
    }
    for processes in &args.processes {
        let processes = (*processes).max(1);
        let each = (cores / processes).max(1);
        tell(
            args.json,
            &together(processes, each, bytes >> 20, args.passes)?,
        );
    }
    Ok(())
}

/// Each number up to 8, then the powers of two, and all.
fn up_to(cores: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (1..=cores.min(8)).collect();
    all.extend((4..).map(|power| 1 << power).take_while(|n| *n < cores));
    if cores > 8 {
        all.push(cores);
    }
    all
}

/// What one way of reading gave.
struct Read {
    processes: usize,
    /// Of all processes together.
    threads: usize,
    bytes: usize,
    /// Of each pass.
    gb_per_s: Vec<f64>,
}

fn tell(json: bool, found: &Read) {
    let Read {
        processes,
        threads,
        bytes,
        gb_per_s,
    } = found;
    if json {
        let value = serde_json::json!({
            "processes": processes, "threads": threads, "bytes": bytes, "gb_per_s": gb_per_s,
        });
        return say(&value.to_string());
    }
    let at = |q| interpolated(gb_per_s, q).map_or_else(|| "-".into(), figure);
    say(&format!(
        "processes={processes} threads={threads} bytes={bytes} passes={} read_gb_per_s best={} median={} worst={}",
        gb_per_s.len(),
        at(1.0),
        at(0.5),
        at(0.0)
    ));
}

/// A process of this same program, told to wait.
struct Reader {
    child: Child,
    output: BufReader<Box<dyn io::Read>>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The sum of `processes` that read at the same time, each its own array with `threads` threads.
fn together(
    processes: usize,
    threads: usize,
    mib: usize,
    passes: usize,
) -> Result<Read, BenchError> {
    let failed = |source: io::Error| BenchError::System {
        what: "measure the bus by several processes",
        source,
    };
    let program = std::env::current_exe().map_err(failed)?;
    let mut readers = Vec::new();
    for _ in 0..processes {
        let mut child = Command::new(&program)
            .args(["bus", "--json", "--wait", "--threads"])
            .arg(threads.to_string())
            .args(["--mib", &mib.to_string(), "--passes", &passes.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let output: Box<dyn io::Read> = match child.stdout.take() {
            Some(output) => Box::new(output),
            None => Box::new(io::empty()),
        };
        let output = BufReader::new(output);
        readers.push(Reader { child, output });
    }
    let mut line = String::new();
    for reader in &mut readers {
        line.clear();
        reader.output.read_line(&mut line).map_err(failed)?;
    }
    for reader in &mut readers {
        if let Some(input) = reader.child.stdin.as_mut() {
            input.write_all(b"\n").map_err(failed)?;
        }
    }
    let mut sum = Read {
        processes,
        threads: threads * processes,
        bytes: 0,
        gb_per_s: vec![0.0; passes],
    };
    for reader in &mut readers {
        line.clear();
        reader.output.read_line(&mut line).map_err(failed)?;
        let one: serde_json::Value = serde_json::from_str(&line)
            .map_err(|error| failed(io::Error::other(error.to_string())))?;
        sum.bytes += one["bytes"]
            .as_u64()
            .and_then(|bytes| usize::try_from(bytes).ok())
            .unwrap_or_default();
        let rates = one["gb_per_s"].as_array().into_iter().flatten();
        for (all, one) in sum.gb_per_s.iter_mut().zip(rates) {
            *all += one.as_f64().unwrap_or_default();
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_core_count_is_measured_and_above_eight_powers_of_two_and_all() {
        assert_eq!(up_to(2), [1, 2]);
        assert_eq!(up_to(20), [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]);
        assert_eq!(up_to(16).last(), Some(&16));
    }
}
