//! What the system says of processes: this one's CPU time, another's memory and open files, whether one lives.

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{Signal, kill};
use nix::sys::time::TimeValLike;
use nix::unistd::Pid;

/// CPU time of this process so far, all threads, user and system.
#[must_use]
pub fn cpu_time() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else {
        return Duration::ZERO;
    };
    let total = usage.user_time() + usage.system_time();
    Duration::from_micros(u64::try_from(total.num_microseconds()).unwrap_or_default())
}

/// One moment of a process. A member is `None` where the system does not tell (all of them but on Linux).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Footprint {
    pub open_files: Option<u64>,
    pub resident_kib: Option<u64>,
    pub peak_resident_kib: Option<u64>,
    /// Clock ticks of CPU, user and system.
    pub cpu_ticks: Option<u64>,
    pub threads: Option<u64>,
}

/// What `pid` holds now.
#[must_use]
pub fn footprint(pid: u32) -> Footprint {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name))?;
        line.split_ascii_whitespace().nth(1)?.parse().ok()
    };
    Footprint {
        open_files: std::fs::read_dir(format!("/proc/{pid}/fd"))
            .ok()
            .map(|entries| entries.count() as u64),
        resident_kib: field("VmRSS:"),
        peak_resident_kib: field("VmHWM:"),
        threads: field("Threads:"),
        cpu_ticks: stat_fields(pid).and_then(|fields| {
            Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
        }),
    }
}

/// A process that cannot be mistaken for a later one of the same number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    pub pid: u32,
    /// Start time in clock ticks since boot; empty where the system does not tell.
    started: String,
}

impl Identity {
    /// Of the process that has this number now.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        Self {
            pid,
            started: started(pid).unwrap_or_default(),
        }
    }

    /// Whether it still runs. A zombie does not: it holds nothing but its number.
    #[must_use]
    pub fn lives(&self) -> bool {
        let Some(fields) = stat_fields(self.pid) else {
            // No /proc: all that can be asked is whether somebody has the number.
            return !cfg!(target_os = "linux") && send(self.pid, None).is_ok();
        };
        fields
            .first()
            .is_none_or(|state| state != "Z" && state != "X")
            && started(self.pid).is_some_and(|started| started == self.started)
    }
}

/// Field 3 (state) and the following of /proc/PID/stat; the name before them may hold blanks.
fn stat_fields(pid: u32) -> Option<Vec<String>> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    Some(
        rest.split_ascii_whitespace()
            .map(ToOwned::to_owned)
            .collect(),
    )
}

fn started(pid: u32) -> Option<String> {
    stat_fields(pid)?.get(19).cloned()
}

/// A process and all that descend from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    root: u32,
    below: Vec<u32>,
}

/// Memory of a server's processes, KiB. `None` where the system does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Memory {
    /// Sum of the peak resident sizes: the study's column. Weights that are shared count once for each process.
    /// Of the sizes now, where the system tells no peak (macOS).
    pub peak_resident_sum_kib: Option<u64>,
    /// Sum of the proportional sizes now: shared pages count once in all.
    pub proportional_sum_kib: Option<u64>,
    pub processes: u32,
}

impl Tree {
    /// As it stands now.
    #[must_use]
    pub fn below(root: u32) -> Self {
        let listed = listed();
        let parents: Vec<(u32, u32)> = if listed.is_empty() {
            told_by_ps()
                .iter()
                .map(|one| (one.pid, one.parent))
                .collect()
        } else {
            listed
        };
        let mut below: Vec<u32> = Vec::new();
        let mut generation = vec![root];
        while !generation.is_empty() {
            let children = parents
                .iter()
                .filter(|(_, parent)| generation.contains(parent));
            generation = children
                .map(|(pid, _)| *pid)
                .filter(|pid| *pid != root && !below.contains(pid))
                .collect();
            below.extend(&generation);
        }
        Self { root, below }
    }

    /// Of the descendants: the workers. Of the root where it has none.
    #[must_use]
    pub fn memory(&self) -> Memory {
        let root = [self.root];
        let pids: &[u32] = if self.below.is_empty() {
            &root
        } else {
            &self.below
        };
        let sum = |of: fn(u32) -> Option<u64>| pids.iter().map(|pid| of(*pid)).sum();
        let peak: Option<u64> = sum(|pid| footprint(pid).peak_resident_kib);
        let resident = || {
            let told = told_by_ps();
            let mine = told.iter().filter(|one| pids.contains(&one.pid));
            (!told.is_empty()).then(|| mine.map(|one| one.resident_kib).sum())
        };
        Memory {
            peak_resident_sum_kib: peak.or_else(resident),
            proportional_sum_kib: sum(proportional_kib),
            processes: u32::try_from(pids.len()).unwrap_or(u32::MAX),
        }
    }
}

/// Every process and its parent, by /proc.
fn listed() -> Vec<(u32, u32)> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, stat_fields(pid)?.get(1)?.parse().ok()?))
    });
    processes.collect()
}

struct Told {
    pid: u32,
    parent: u32,
    resident_kib: u64,
}

/// The same, with sizes, by `ps`: for systems without /proc.
fn told_by_ps() -> Vec<Told> {
    let output = std::process::Command::new("ps")
        .args(["-axo", "pid=,ppid=,rss="])
        .output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let text = text.unwrap_or_default();
    let told = text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        Some(Told {
            pid: words.next()?.parse().ok()?,
            parent: words.next()?.parse().ok()?,
            resident_kib: words.next()?.parse().ok()?,
        })
    });
    told.collect()
}

fn proportional_kib(pid: u32) -> Option<u64> {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = rollup.lines().find(|line| line.starts_with("Pss:"))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Sends `signal` to `pid`; `None` only asks whether it is there.
///
/// # Errors
/// There is no such process, or it is somebody else's.
pub fn send(pid: u32, signal: Option<Signal>) -> std::io::Result<()> {
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 1);
    let pid = pid.ok_or_else(|| std::io::Error::other("no such process number"))?;
    kill(Pid::from_raw(pid), signal).map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_lives_until_it_is_killed_and_its_zombie_does_not() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let identity = Identity::of(child.id());
        assert!(identity.lives());
        send(child.id(), Some(Signal::SIGKILL)).unwrap();
        child.wait().unwrap();
        assert!(!identity.lives());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_has_files_memory_and_threads() {
        let found = footprint(std::process::id());
        assert!(found.open_files.unwrap() > 2);
        assert!(found.resident_kib.unwrap() > 100);
        assert!(found.peak_resident_kib >= found.resident_kib);
        assert!(found.threads.unwrap() >= 1);
        assert!(found.cpu_ticks.is_some());
        assert_eq!(footprint(u32::MAX), Footprint::default());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_tree_has_its_grandchildren_and_their_memory() {
        let mut shell = std::process::Command::new("sh")
            .args(["-c", "sleep 60 & sleep 60 & echo started; wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0; 8];
        std::io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut line).unwrap();
        let tree = Tree::below(shell.id());
        let memory = tree.memory();
        assert_eq!(memory.processes, 2);
        assert!(memory.peak_resident_sum_kib.unwrap() > 100);
        assert!(
            Tree::below(std::process::id())
                .below
                .contains(&tree.below[0])
        );
        for pid in tree.below {
            send(pid, Some(Signal::SIGKILL)).unwrap();
        }
        shell.wait().unwrap();
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn ps_tells_the_same_parents_as_proc() {
        let told = told_by_ps();
        // A machine without ps has /proc.
        if let Some(me) = told.iter().find(|one| one.pid == std::process::id()) {
            assert!(listed().contains(&(me.pid, me.parent)));
            assert!(me.resident_kib > 100);
        }
    }

    #[test]
    fn no_signal_goes_to_everybody() {
        assert!(send(0, None).is_err());
        assert!(send(1, None).is_err());
        assert!(send(u32::MAX, None).is_err());
    }
}
