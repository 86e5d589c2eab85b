//! Which machine this is, as far as its memory bus is concerned: what was measured on one is not believed on another.

use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::cache;

/// What decides how fast memory is read, as the system tells it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    pub os: String,
    pub architecture: String,
    /// The processor's name.
    pub chip: String,
    /// Cores that this process may use.
    pub cores: u32,
    pub memory_bytes: u64,
    /// Last-level caches together; `None` where the system does not tell.
    pub cache_bytes: Option<u64>,
    /// Of this installation; hashed before it is written anywhere.
    #[serde(skip)]
    pub installation: String,
}

impl Machine {
    /// This one.
    #[must_use]
    pub fn probe() -> Self {
        let refresh = sysinfo::RefreshKind::nothing()
            .with_memory(sysinfo::MemoryRefreshKind::nothing().with_ram());
        let memory = sysinfo::System::new_with_specifics(refresh);
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            os: std::env::consts::OS.to_owned(),
            architecture: std::env::consts::ARCH.to_owned(),
            chip: chip().unwrap_or_else(|| "unknown".to_owned()),
            cores: u32::try_from(cores).unwrap_or(u32::MAX),
            memory_bytes: memory.map_or(0, |system| system.total_memory()),
            cache_bytes: cache::last_level_bytes(),
            installation: std::fs::read_to_string("/etc/machine-id").unwrap_or_default(),
        }
    }

    /// Under which its measurements are kept: another machine on the same home directory has another.
    #[must_use]
    pub fn key(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for part in [
            self.os.as_str(),
            &self.architecture,
            &self.chip,
            &self.cores.to_string(),
            &self.memory_bytes.to_string(),
            &format!("{:?}", self.cache_bytes),
            self.installation.trim(),
        ] {
            hasher.update(part.as_bytes());
            hasher.update(&[0]);
        }
        hasher.finalize().to_hex()[..16].to_owned()
    }
}

fn chip() -> Option<String> {
    let linux = std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("model name"))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        });
    linux.or_else(|| tell("sysctl", &["-n", "machdep.cpu.brand_string"]))
}

/// What a small program of the system prints. Only asked where no file tells.
#[must_use]
pub fn tell(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_machine_has_another_key() {
        let this = Machine::probe();
        assert_ne!(this.chip, "");
        assert!(this.cores > 0 && this.memory_bytes > 0, "{this:?}");
        assert_eq!(this.key(), Machine::probe().key());
        let more = Machine {
            memory_bytes: this.memory_bytes * 2,
            ..this.clone()
        };
        let other = Machine {
            installation: "other".to_owned(),
            ..this.clone()
        };
        assert_ne!(this.key(), more.key());
        assert_ne!(this.key(), other.key());
    }
}
