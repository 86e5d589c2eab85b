//! The machine that a run was made on.

use dispatcher::bus::machine::{Machine, tell};
use serde::{Deserialize, Serialize};

/// What decides how fast a machine is. Part of the contract: results of two machines are not compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct System {
    pub os: String,
    pub architecture: String,
    pub chip: String,
    pub cores: u32,
    /// Of the machine, not of the cgroup.
    pub memory_gib: u64,
}

/// What may explain a figure, and is no part of the contract.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Surroundings {
    pub kernel: String,
    /// One, five and fifteen minutes.
    pub load: String,
    /// Seconds since 1970.
    pub unix_s: u64,
    pub bench_version: String,
    /// Whether it was on the mains, where the system tells.
    pub power: Option<String>,
}

impl System {
    /// Of this machine.
    #[must_use]
    pub fn this() -> Self {
        let machine = Machine::probe();
        Self {
            os: machine.os,
            architecture: machine.architecture,
            chip: machine.chip,
            cores: machine.cores,
            memory_gib: machine.memory_bytes >> 30,
        }
    }
}

impl Surroundings {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            kernel: read("/proc/sys/kernel/osrelease")
                .or_else(|| tell("uname", &["-r"]))
                .unwrap_or_default(),
            load: read("/proc/loadavg")
                .or_else(|| tell("sysctl", &["-n", "vm.loadavg"]))
                .unwrap_or_default(),
            unix_s: since.map_or(0, |since| since.as_secs()),
            bench_version: env!("CARGO_PKG_VERSION").into(),
            power: tell("pmset", &["-g", "batt"])
                .and_then(|text| text.lines().next().map(ToOwned::to_owned)),
        }
    }
}

fn read(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_chip_cores_and_memory() {
        let system = System::this();
        assert_ne!(system.chip, "");
        assert!(system.cores > 0);
        assert!(system.memory_gib > 0, "{system:?}");
        assert_ne!(Surroundings::now().kernel, "");
    }
}
