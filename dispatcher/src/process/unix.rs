//! What only the system can say or do: signals to a group, wait statuses, the cgroup's OOM count,
//! descriptors that must not be inherited.

use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::machine::event::ExitStatus;

/// Signals the group that `leader` leads. `false`: nobody is left in it.
pub(super) fn signal_group(leader: u32, signal: Signal) -> bool {
    let Ok(leader) = i32::try_from(leader) else {
        return false;
    };
    // 0 and 1 would be our own group and everyone's.
    if leader <= 1 {
        return false;
    }
    match killpg(Pid::from_raw(leader), signal) {
        Ok(()) => true,
        Err(Errno::ESRCH) => false,
        Err(error) => {
            tracing::warn!(%error, leader, %signal, "signalling a worker failed");
            false
        }
    }
}

/// Marks every open descriptor but the standard three close-on-exec.
///
/// What this process opens is so already. What it was given is not: a listening socket by socket
/// activation, a make's job server. In a worker such a socket would keep the port taken after the
/// dispatcher's death.
pub(super) fn keep_descriptors_from_children() {
    // Linux has it as a link to /proc/self/fd.
    let Ok(entries) = std::fs::read_dir("/dev/fd") else {
        return;
    };
    let open: Vec<RawFd> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|descriptor| *descriptor > 2)
        .collect();
    for descriptor in open {
        #[expect(
            unsafe_code,
            reason = "descriptors that nobody in this process owns can only be named by number"
        )]
        // SAFETY: the borrow ends with the call, and the call touches no memory. A descriptor that
        // was closed since it was listed (the listing's own, for one) is an EBADF.
        let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let _ = fcntl(borrowed, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
    }
}

/// A wait status in the machine's words.
pub(super) fn exit_status(status: std::process::ExitStatus, oom: bool) -> ExitStatus {
    match (status.code(), status.signal()) {
        (Some(code), _) => ExitStatus::Code(code),
        (None, Some(signal)) => ExitStatus::Signal { signal, oom },
        // A stopped or continued process is not waited for; were one reported, it is not an exit 0.
        (None, None) => ExitStatus::Code(-1),
    }
}

/// Tells kills by the kernel's OOM killer from other SIGKILLs, by the cgroup's own count.
///
/// The count says how many processes of the cgroup were killed, not which. Each kill explains one
/// SIGKILL of a worker that lived when it was counted.
#[derive(Clone, Debug)]
pub(super) struct OomWatch {
    events: Option<PathBuf>,
    /// Kills that have explained a death already.
    explained: Arc<Mutex<u64>>,
}

impl OomWatch {
    /// Watches this process's own cgroup, which children inherit. Without cgroup v2 it sees none.
    pub(super) fn new() -> Self {
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::at(cgroup_events(&own))
    }

    fn at(events: Option<PathBuf>) -> Self {
        let explained = events.as_deref().map_or(0, oom_kills);
        Self {
            events,
            explained: Arc::new(Mutex::new(explained)),
        }
    }

    /// The count now, to be kept from a worker's spawn to its death.
    pub(super) fn count(&self) -> u64 {
        self.events.as_deref().map_or(0, oom_kills)
    }

    /// Whether a death by SIGKILL just now is an OOM kill; `at_spawn` is the count of its spawn.
    pub(super) fn explains_kill(&self, at_spawn: u64) -> bool {
        let now = self.count();
        let mut explained = self
            .explained
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let from = (*explained).max(at_spawn);
        let rose = now > from;
        if rose {
            *explained = from + 1;
        }
        rose
    }
}

/// `memory.events` of the cgroup v2 named in the text of `/proc/self/cgroup`.
fn cgroup_events(own: &str) -> Option<PathBuf> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new("/sys/fs/cgroup").join(path).join("memory.events"))
}

fn oom_kills(events: &Path) -> u64 {
    std::fs::read_to_string(events)
        .ok()
        .and_then(|text| {
            text.lines()
                .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, kills: u64) {
        let text = format!("low 0\nhigh 3\nmax 9\noom 5\noom_kill {kills}\noom_group_kill 0\n");
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn a_rise_of_the_count_explains_one_kill() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("memory.events");
        write(&path, 7);
        let watch = OomWatch::at(Some(path.clone()));
        let spawned = watch.count();
        assert_eq!(spawned, 7);
        assert!(!watch.explains_kill(spawned), "nothing rose");
        write(&path, 8);
        assert!(watch.explains_kill(spawned));
        assert!(!watch.explains_kill(spawned), "it was another's");
    }

    #[test]
    fn two_kills_at_once_explain_two_deaths() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("memory.events");
        write(&path, 0);
        let watch = OomWatch::at(Some(path.clone()));
        write(&path, 2);
        assert!(watch.explains_kill(0));
        assert!(watch.explains_kill(0));
        assert!(!watch.explains_kill(0));
    }

    #[test]
    fn a_kill_before_the_spawn_explains_nothing() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("memory.events");
        write(&path, 0);
        let watch = OomWatch::at(Some(path.clone()));
        write(&path, 1);
        let spawned = watch.count();
        assert!(!watch.explains_kill(spawned));
    }

    #[test]
    fn without_the_file_no_kill_is_an_oom_kill() {
        let watch = OomWatch::at(Some("/nonexistent/memory.events".into()));
        assert!(!watch.explains_kill(watch.count()));
        assert!(!OomWatch::at(None).explains_kill(0));
    }

    #[test]
    fn the_cgroup_is_found_by_its_v2_line() {
        let text = "4:memory:/old\n0::/user.slice/app.scope\n";
        assert_eq!(
            cgroup_events(text).unwrap(),
            Path::new("/sys/fs/cgroup/user.slice/app.scope/memory.events")
        );
        assert_eq!(
            cgroup_events("0::/\n").unwrap(),
            Path::new("/sys/fs/cgroup/memory.events")
        );
        assert_eq!(cgroup_events("4:memory:/old\n"), None);
    }

    #[test]
    fn groups_that_are_not_a_workers_are_never_signalled() {
        for leader in [0, 1, u32::MAX] {
            assert!(!signal_group(leader, Signal::SIGTERM));
        }
    }
}
