//! How much of the machine's and the cgroup's memory is used now.

use super::pressure::Reading;
use super::{Limit, LimitOrigin};

/// What the machine and, where there is one, the cgroup say. A machine that says nothing bounds nothing.
#[must_use]
pub fn read() -> Vec<Reading> {
    let refresh = sysinfo::RefreshKind::nothing()
        .with_memory(sysinfo::MemoryRefreshKind::nothing().with_ram());
    let system = sysinfo::System::new_with_specifics(refresh).ok();
    let machine = system
        .filter(|system| system.total_memory() > 0)
        .map(|system| Reading {
            used: system
                .total_memory()
                .saturating_sub(system.available_memory()),
            limit: Limit {
                bytes: system.total_memory(),
                origin: LimitOrigin::Machine,
            },
        });
    machine.into_iter().chain(cgroup()).collect()
}

#[cfg(target_os = "linux")]
fn cgroup() -> Vec<Reading> {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    super::cgroup_path(&own)
        .map(|path| bounds(std::path::Path::new("/sys/fs/cgroup"), path))
        .unwrap_or_default()
}

#[cfg(not(target_os = "linux"))]
fn cgroup() -> Vec<Reading> {
    Vec::new()
}

/// Every bound from `root`/`path` up to `root`. What is used is the working set: file pages that have
/// not been touched for long are given up before anything is killed.
#[cfg(any(target_os = "linux", test))]
fn bounds(root: &std::path::Path, path: &str) -> Vec<Reading> {
    let leaf = root.join(path);
    leaf.ancestors()
        .take_while(|directory| directory.starts_with(root))
        .filter_map(|directory| {
            let text = |name| std::fs::read_to_string(directory.join(name)).ok();
            // `max` is no number, and no bound.
            let bytes = text("memory.max")?.trim().parse().ok()?;
            let current: u64 = text("memory.current")?.trim().parse().ok()?;
            let inactive = text("memory.stat")
                .and_then(|stat| {
                    let line = stat
                        .lines()
                        .find_map(|line| line.strip_prefix("inactive_file "));
                    line?.trim().parse().ok()
                })
                .unwrap_or(0);
            Some(Reading {
                used: current.saturating_sub(inactive),
                limit: Limit {
                    bytes,
                    origin: LimitOrigin::Cgroup,
                },
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_says_how_much_is_used() {
        let readings = read();
        assert!(
            readings
                .iter()
                .all(|one| one.limit.bytes > 0 && one.used > 0),
            "{readings:?}"
        );
        assert_eq!(readings[0].limit.origin, LimitOrigin::Machine);
    }

    #[test]
    fn every_bound_above_a_cgroup_is_read_and_old_file_pages_are_not_counted() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("a/b/memory.max", "max\n");
        write("a/b/memory.current", "300\n");
        write("a/memory.max", "1000\n");
        write("a/memory.current", "700\n");
        write(
            "a/memory.stat",
            "anon 500\ninactive_file 150\nactive_file 50\n",
        );
        let found = bounds(root.path(), "a/b");
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].used, found[0].limit.bytes), (550, 1000));
        write("a/b/memory.max", "100\n");
        assert_eq!(bounds(root.path(), "a/b").len(), 2);
        assert_eq!(bounds(root.path(), "c"), []);
    }
}
