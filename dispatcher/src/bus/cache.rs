//! The last-level cache: what is smaller than it is not read from memory.

use std::collections::BTreeMap;
use std::path::Path;

/// Bytes of all caches of the highest level together, where the system tells. A processor with
/// several dies has several of them, and a program that runs on all cores has the use of each.
#[must_use]
pub fn last_level_bytes() -> Option<u64> {
    of(Path::new("/sys/devices/system/cpu"))
}

/// Reads `root`/cpu*/cache/index*: level, size, and the cores that share it.
fn of(root: &Path) -> Option<u64> {
    let text = |path: &Path| Some(std::fs::read_to_string(path).ok()?.trim().to_owned());
    let mut caches: BTreeMap<(u32, String), u64> = BTreeMap::new();
    for cpu in std::fs::read_dir(root).ok()?.flatten() {
        for index in std::fs::read_dir(cpu.path().join("cache"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let file = |name: &str| text(&index.path().join(name));
            let (Some(level), Some(size)) = (file("level"), file("size")) else {
                continue;
            };
            let (Ok(level), Some(bytes)) = (level.parse::<u32>(), size_bytes(&size)) else {
                continue;
            };
            let shared = file("shared_cpu_list").unwrap_or_default();
            caches.insert((level, shared), bytes);
        }
    }
    let highest = caches.keys().map(|(level, _)| *level).max()?;
    let of_highest = caches.iter().filter(|((level, _), _)| *level == highest);
    Some(of_highest.map(|(_, bytes)| bytes).sum())
}

/// `32768K`, `32M`.
fn size_bytes(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let shift = match unit {
        "K" => 10,
        "M" => 20,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(root: &Path, cpu: u32, index: u32, level: u32, size: &str, shared: &str) {
        let folder = root.join(format!("cpu{cpu}/cache/index{index}"));
        std::fs::create_dir_all(&folder).unwrap();
        for (name, value) in [
            ("level", level.to_string()),
            ("size", size.to_owned()),
            ("shared_cpu_list", shared.to_owned()),
        ] {
            std::fs::write(folder.join(name), format!("{value}\n")).unwrap();
        }
    }

    #[test]
    fn the_caches_of_all_dies_count_and_each_of_them_once() {
        let root = tempfile::tempdir().unwrap();
        for cpu in 0..4 {
            cache(root.path(), cpu, 0, 1, "32K", &cpu.to_string());
            let die = if cpu < 2 { "0-1" } else { "2-3" };
            cache(root.path(), cpu, 1, 3, "32768K", die);
        }
        assert_eq!(of(root.path()), Some(64 << 20));
        assert_eq!(of(&root.path().join("none")), None);
    }

    #[test]
    fn a_size_without_a_known_unit_is_no_size() {
        assert_eq!(size_bytes("32M"), Some(32 << 20));
        for wrong in ["", "M", "12", "12G", "-1K"] {
            assert_eq!(size_bytes(wrong), None, "{wrong}");
        }
    }
}
