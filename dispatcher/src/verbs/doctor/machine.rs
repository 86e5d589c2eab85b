//! The machine: memory, cores, the GPU's other users, power, heat, limits.

use std::fs;
use std::process::Command;

use nix::sys::resource::{Resource, getrlimit};
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

use super::Finding;
use crate::config::Config;

const GIB: f64 = (1_u64 << 30) as f64;
/// Above this a processor slows itself down, or will soon.
const HOT_MILLIDEGREES: i64 = 90_000;
/// With fewer open files the default queue does not fit.
const OPEN_FILES_MIN: u64 = 2048;

pub(super) fn examine(config: Option<&Config>) -> Vec<Finding> {
    let mut all = memory(config);
    all.push(cores(config));
    all.push(graphics());
    all.push(power());
    all.push(heat());
    all.push(open_files());
    all
}

fn memory(config: Option<&Config>) -> Vec<Finding> {
    let refresh = RefreshKind::nothing().with_memory(MemoryRefreshKind::everything());
    let Ok(system) = System::new_with_specifics(refresh) else {
        return vec![Finding::unknown("memory", "the system does not say")];
    };
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / GIB);
    let mut all = Vec::new();
    let free = system.available_memory();
    let fact = format!("{} of {} are free", gib(free), gib(system.total_memory()));
    let plan = config.and_then(|config| config.plan.as_ref());
    all.push(match plan {
        Some(plan) if plan.footprint() > free => Finding::poor(
            "memory",
            format!(
                "{fact}, and the configuration wants {}",
                gib(plan.footprint())
            ),
            "end other programs, or ask for less: `--slots`, `--ctx-size`, a smaller model",
        ),
        _ => Finding::good("memory", fact),
    });
    all.push(match system.used_swap() {
        0 => Finding::good("swap", "none is in use"),
        used => Finding::poor(
            "swap",
            format!("{} are in use", gib(used)),
            "weights that are swapped out are read from disk at each step: end other programs",
        ),
    });
    all
}

/// What a command prints, where it can be run and succeeds.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then_some(text)
}

fn cores(config: Option<&Config>) -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    // Apple's: the fast ones. Elsewhere all count alike.
    let fast = cfg!(target_os = "macos")
        .then(|| output("sysctl", &["-n", "hw.perflevel0.physicalcpu"]))
        .flatten()
        .and_then(|text| text.trim().parse::<usize>().ok());
    let fact = match fast {
        Some(fast) => format!("{cores}, of which {fast} performance cores"),
        None => format!("{cores}"),
    };
    let threads = config.map_or(0, |config| {
        config.threads as usize * config.instances as usize
    });
    match fast {
        Some(fast) if threads > fast => Finding::poor(
            "cores",
            format!("{fact}; {threads} engine threads"),
            format!(
                "engine threads wait for the slowest: `--threads {fast}` keeps to the fast ones"
            ),
        ),
        _ if threads > cores => Finding::poor(
            "cores",
            format!("{fact}; {threads} engine threads"),
            "waiting threads spin: take fewer with `--threads`",
        ),
        _ => Finding::good("cores", fact),
    }
}

fn graphics() -> Finding {
    if cfg!(target_os = "macos") {
        return Finding::unknown(
            "GPU",
            "macOS does not say who else uses it; Activity Monitor's GPU history shows it",
        );
    }
    let query = [
        "--query-compute-apps=pid,process_name,used_memory",
        "--format=csv,noheader",
    ];
    let Some(users) = output("nvidia-smi", &query) else {
        return Finding::unknown("GPU", "no nvidia-smi here: none is looked at");
    };
    let others: Vec<&str> = users
        .lines()
        .filter(|line| !line.trim().is_empty() && !line.contains("dispatcher-worker"))
        .collect();
    if others.is_empty() {
        return Finding::good("GPU", "nobody else computes on it");
    }
    Finding::poor(
        "GPU",
        format!("others compute on it: {}", others.join("; ")),
        "they share its memory and its bus: end them, or expect less",
    )
}

fn power() -> Finding {
    if cfg!(target_os = "macos") {
        return match output("pmset", &["-g", "batt"]) {
            None => Finding::unknown("power", "pmset does not say"),
            Some(text) if text.contains("Battery Power") => Finding::poor(
                "power",
                "runs on its battery",
                "plug it in: macOS slows down and sleeps on battery",
            ),
            Some(_) => Finding::good("power", "runs on mains"),
        };
    }
    let supplies = fs::read_dir("/sys/class/power_supply").ok();
    let online: Vec<bool> = supplies
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path().join("online")).ok())
        .map(|text| text.trim() == "1")
        .collect();
    match (online.is_empty(), online.contains(&true)) {
        (true, _) => Finding::unknown("power", "the system does not say"),
        (false, true) => Finding::good("power", "runs on mains"),
        (false, false) => Finding::poor("power", "runs on its battery", "plug it in"),
    }
}

fn heat() -> Finding {
    if cfg!(target_os = "macos") {
        return match output("pmset", &["-g", "therm"]) {
            None => Finding::unknown("heat", "pmset does not say"),
            Some(text) if text.lines().any(is_slowed) => Finding::poor(
                "heat",
                "macOS slows the processor down",
                "let it cool: its figures now are not its own",
            ),
            Some(_) => Finding::good("heat", "no thermal limit is in force"),
        };
    }
    let zones = fs::read_dir("/sys/class/thermal").ok();
    let hottest = zones
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path().join("temp")).ok())
        .filter_map(|text| text.trim().parse::<i64>().ok())
        .max();
    match hottest {
        None => Finding::unknown("heat", "the system does not say"),
        Some(heat) if heat >= HOT_MILLIDEGREES => Finding::poor(
            "heat",
            format!("{} °C", heat / 1000),
            "it will slow down: let it cool",
        ),
        Some(heat) => Finding::good("heat", format!("{} °C", heat / 1000)),
    }
}

/// A line of `pmset -g therm` such as `CPU_Speed_Limit = 80`.
fn is_slowed(line: &str) -> bool {
    let Some((name, value)) = line.split_once('=') else {
        return false;
    };
    let value = value.trim().parse::<u32>();
    name.contains("Limit") && value.is_ok_and(|percent| percent < 100)
}

fn open_files() -> Finding {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Err(error) => Finding::unknown("open files", error.to_string()),
        Ok((_, hard)) if hard < OPEN_FILES_MIN => Finding::poor(
            "open files",
            format!("at most {hard}"),
            "each waiting request holds one: raise it (`ulimit -Hn`, systemd's LimitNOFILE=)",
        ),
        Ok((soft, hard)) if hard > 1 << 40 => {
            Finding::good("open files", format!("{soft} now, no upper limit"))
        }
        Ok((soft, hard)) => Finding::good("open files", format!("{soft} now, up to {hard}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slowed_processor_is_read_from_what_pmset_says() {
        assert!(is_slowed("\tCPU_Speed_Limit \t= 80"));
        assert!(!is_slowed("\tCPU_Speed_Limit \t= 100"));
        assert!(!is_slowed(
            "Note: No thermal warning level has been recorded"
        ));
    }
}
