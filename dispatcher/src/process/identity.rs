//! Tells whether a pid is still the process it was: by when it started and what it executes.

/// What a process is beside its number, which the system gives out again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// When it started, in the system's own unit: clock ticks since boot on Linux, seconds since
    /// 1970 elsewhere.
    pub(super) started: u64,
    /// The file name of what it executes.
    pub(super) executable: String,
}

/// The identity of a living process; `None`: there is none, or it is not ours to look at.
#[cfg(target_os = "linux")]
pub(super) fn of(pid: u32) -> Option<Identity> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let executable = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    let name = executable.file_name()?.to_str()?;
    Some(Identity {
        started: start_time(&stat)?,
        // An upgrade on disk replaces the file under a running process.
        executable: name.strip_suffix(" (deleted)").unwrap_or(name).to_owned(),
    })
}

#[cfg(not(target_os = "linux"))]
pub(super) fn of(pid: u32) -> Option<Identity> {
    use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System, UpdateKind};
    let pid = Pid::from_u32(pid);
    let mut system = System::new().ok()?;
    system.refresh_processes_specifics(
        ProcessesToUpdate::Some(&[pid]),
        true,
        ProcessRefreshKind::nothing().with_exe(UpdateKind::Always),
    );
    let process = system.process(pid)?;
    Some(Identity {
        started: process.start_time(),
        executable: process.exe()?.file_name()?.to_str()?.to_owned(),
    })
}

/// Field 22 of `/proc/<pid>/stat`. The second field is a name in parentheses that may hold
/// anything, parentheses and spaces too: fields are counted from the last of them.
#[cfg(target_os = "linux")]
fn start_time(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(") ")?;
    after_name.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_stays_itself_and_is_not_another() {
        let own = of(std::process::id()).unwrap();
        assert_eq!(of(std::process::id()).unwrap(), own);
        let name = std::env::current_exe().unwrap();
        assert_eq!(own.executable, name.file_name().unwrap().to_str().unwrap());
        assert_ne!(of(1), Some(own));
        assert_eq!(of(u32::MAX), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_start_time_is_found_behind_any_name() {
        let fields = "S 1 2 2 0 -1 4194560 1 0 0 0 5 6 0 0 20 0 1 0 987654 1000 10";
        for name in ["worker", "a) b (c", ") R 1 2"] {
            assert_eq!(start_time(&format!("42 ({name}) {fields}")), Some(987_654));
        }
        assert_eq!(start_time("42 (worker) S 1"), None);
        assert_eq!(start_time(""), None);
    }
}
