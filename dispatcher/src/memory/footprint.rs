//! What one process takes of the machine's memory, as the system counts it.

#[cfg(target_os = "macos")]
mod macos;

/// Bytes of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// With its share of what it has in common with others: the sum over all processes is what they
    /// take together.
    pub proportional: u64,
    /// What would come free with it.
    pub private: u64,
}

/// Asks the system; `None` where the process is gone or the system will not say.
///
/// On Linux this walks the process's page tables: microseconds for a small one, many milliseconds for
/// one with tens of gigabytes.
#[cfg(target_os = "linux")]
#[must_use]
pub fn measure(pid: u32) -> Option<Footprint> {
    parse(&std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?)
}

/// On macOS: the physical footprint, which the activity monitor shows too. Mapped files are not in it.
#[cfg(target_os = "macos")]
#[must_use]
pub fn measure(pid: u32) -> Option<Footprint> {
    let bytes = macos::physical_footprint(pid)?;
    Some(Footprint {
        proportional: bytes,
        private: bytes,
    })
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
#[must_use]
pub fn measure(_pid: u32) -> Option<Footprint> {
    None
}

/// Reads the text of `smaps_rollup`.
#[cfg(any(target_os = "linux", test))]
fn parse(text: &str) -> Option<Footprint> {
    let field = |name: &str| -> Option<u64> {
        let mut words = text
            .lines()
            .find_map(|line| line.strip_prefix(name))?
            .split_ascii_whitespace();
        let kib: u64 = words.next()?.parse().ok()?;
        Some(kib.saturating_mul(1024))
    };
    let private = ["Private_Clean:", "Private_Dirty:", "Private_Hugetlb:"]
        .into_iter()
        .filter_map(field)
        .fold(0, u64::saturating_add);
    Some(Footprint {
        proportional: field("Pss:")?,
        private,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_rollup_is_read_and_anything_else_is_none() {
        let text = "55-7f ---p 00000000 00:00 0   [rollup]\nRss:  1748 kB\nPss:   191 kB\n\
                    Pss_Dirty: 112 kB\nShared_Clean: 1596 kB\nPrivate_Clean: 40 kB\n\
                    Private_Dirty: 112 kB\n";
        let expected = Footprint {
            proportional: 191 << 10,
            private: 152 << 10,
        };
        assert_eq!(parse(text), Some(expected));
        assert_eq!(parse(""), None);
        assert_eq!(parse("Pss: many kB\n"), None);
        assert_eq!(
            parse("Pss: 18446744073709551615 kB\n").map(|one| one.proportional),
            Some(u64::MAX)
        );
    }

    #[test]
    fn this_process_has_a_footprint_and_a_process_that_is_not_there_has_none() {
        let own = measure(std::process::id()).unwrap();
        assert!(
            own.private > 0 && own.proportional >= own.private,
            "{own:?}"
        );
        assert_eq!(measure(u32::MAX), None);
    }
}
