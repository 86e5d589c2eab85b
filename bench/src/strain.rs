//! Whether the machine itself slowed a measurement down: heat, a CPU quota, or a neighbour on the same host.

use serde::{Deserialize, Serialize};

/// More than this share of the CPU time taken by the host, and a cell is marked.
pub const STOLEN_SHARE_MAX: f64 = 0.05;

/// What the machine took away while a cell ran. A member is `None` where the system does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Strain {
    /// Times that a core was slowed down for heat (Linux).
    pub heat_events: Option<u64>,
    /// Times that the cgroup's quota stopped this process's group (Linux).
    pub quota_events: Option<u64>,
    /// Share of all CPU time that the host gave to somebody else, 0 to 1 (Linux guests).
    pub stolen_share: Option<f64>,
    /// Speed that heat allowed at the end, percent (macOS).
    pub speed_limit_percent: Option<u64>,
}

impl Strain {
    /// In words, where it spoils a figure.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        let times = |count: Option<u64>| count.filter(|count| *count > 0);
        if let Some(count) = times(self.heat_events) {
            return Some(format!("a core was slowed down for heat {count} times"));
        }
        if let Some(count) = times(self.quota_events) {
            return Some(format!("the CPU quota stopped the group {count} times"));
        }
        if let Some(share) = self.stolen_share.filter(|share| *share > STOLEN_SHARE_MAX) {
            return Some(format!(
                "the host took {:.0} % of the CPU time",
                share * 100.0
            ));
        }
        let limit = self.speed_limit_percent.filter(|percent| *percent < 100)?;
        Some(format!("heat allowed {limit} % of the speed"))
    }
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Watch {
    heat: Option<u64>,
    quota: Option<u64>,
    /// Stolen and all CPU time, clock ticks.
    ticks: Option<(u64, u64)>,
}

impl Watch {
    /// Now.
    #[must_use]
    pub fn start() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).ok();
        Self {
            heat: heat_events(),
            quota: read("/sys/fs/cgroup/cpu.stat").and_then(|text| quota_events(&text)),
            ticks: read("/proc/stat").and_then(|text| ticks(&text)),
        }
    }

    /// What changed since.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "ticks are far below 2^52")]
    pub fn end(self) -> Strain {
        let now = Self::start();
        let since = |before: Option<u64>, after: Option<u64>| {
            before
                .zip(after)
                .map(|(before, after)| after.saturating_sub(before))
        };
        let stolen_share = self.ticks.zip(now.ticks).and_then(|(before, after)| {
            let all = after.1.saturating_sub(before.1);
            (all > 0).then(|| after.0.saturating_sub(before.0) as f64 / all as f64)
        });
        Strain {
            heat_events: since(self.heat, now.heat),
            quota_events: since(self.quota, now.quota),
            stolen_share,
            speed_limit_percent: speed_limit(),
        }
    }
}

fn heat_events() -> Option<u64> {
    let cores = std::fs::read_dir("/sys/devices/system/cpu").ok()?;
    let counts = cores.flatten().filter_map(|core| {
        let path = core.path().join("thermal_throttle/core_throttle_count");
        std::fs::read_to_string(path)
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    });
    counts.reduce(|sum, count| sum + count)
}

fn quota_events(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("nr_throttled"))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal, …
fn ticks(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<u64> = line
        .split_ascii_whitespace()
        .take(8)
        .filter_map(|word| word.parse().ok())
        .collect();
    Some((*fields.get(7)?, fields.iter().sum()))
}

/// `pmset -g therm` prints `CPU_Speed_Limit = 100`, on Macs that tell.
#[cfg(target_os = "macos")]
fn speed_limit() -> Option<u64> {
    let output = std::process::Command::new("pmset")
        .args(["-g", "therm"])
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find(|line| line.contains("CPU_Speed_Limit"))?;
    line.split_once('=')?.1.trim().parse().ok()
}

#[cfg(not(target_os = "macos"))]
fn speed_limit() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calm_machine_has_no_fault_and_each_kind_of_strain_has_words() {
        let calm = Strain {
            heat_events: Some(0),
            quota_events: Some(0),
            stolen_share: Some(0.02),
            speed_limit_percent: Some(100),
        };
        assert_eq!(calm.fault(), None);
        assert_eq!(Strain::default().fault(), None);
        let words = |strain: Strain| strain.fault().unwrap();
        let heat = Strain {
            heat_events: Some(3),
            ..calm
        };
        assert!(words(heat).contains("heat 3 times"));
        let quota = Strain {
            quota_events: Some(2),
            ..calm
        };
        assert!(words(quota).contains("quota"));
        let stolen = Strain {
            stolen_share: Some(0.31),
            ..calm
        };
        assert!(words(stolen).contains("31 %"));
        let slow = Strain {
            speed_limit_percent: Some(70),
            ..calm
        };
        assert!(words(slow).contains("70 %"));
    }

    #[test]
    fn the_systems_counters_are_understood() {
        let stat = "cpu  10 0 5 80 0 0 1 4 0 0\ncpu0 1 2 3\n";
        assert_eq!(ticks(stat), Some((4, 100)));
        assert_eq!(ticks("nonsense"), None);
        let quota = "usage_usec 5\nnr_periods 9\nnr_throttled 7\nthrottled_usec 3\n";
        assert_eq!(quota_events(quota), Some(7));
        let strain = Watch::start().end();
        assert!(strain.stolen_share.is_none_or(|share| share <= 1.0));
    }
}
