//! Open files: raises the process's limit, and says how many connections fit into it.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// More would only be more tables in the kernel: the connections below need no more.
const FILES_MAX: u64 = 65_536;
/// What macOS grants at least where it refuses more, whatever its hard limit says.
const FILES_GRANTED: u64 = 10_240;
/// Assumed where the limit cannot be read.
const FILES_ASSUMED: u64 = 256;

/// Files beside connections: the reserve of connections for health and metrics, logs, the runtime's own.
const FILES_OWN: u64 = 192;
/// A link, a pipe each for output and token, and those of its successor.
const FILES_PER_INSTANCE: u64 = 16;

const CONNECTIONS_MIN: u64 = 64;
/// Each may keep buffers in the kernel and in the front: this many are a server's, not an attack's.
const CONNECTIONS_MAX: u64 = 16_384;

/// Raises the soft limit of open files towards the hard one, and returns what holds then.
pub(crate) fn raise_limit() -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return FILES_ASSUMED;
    };
    for wanted in [FILES_MAX.min(hard), FILES_GRANTED.min(hard)] {
        if wanted <= soft {
            break;
        }
        match setrlimit(Resource::RLIMIT_NOFILE, wanted, hard) {
            Ok(()) => return wanted,
            Err(error) => {
                tracing::debug!(%error, wanted, "failed to raise the limit of open files")
            }
        }
    }
    soft
}

/// Connections of clients that a process with this limit can hold beside its `instances`.
pub(crate) fn connections_within(files: u64, instances: u32) -> usize {
    let own = FILES_OWN + FILES_PER_INSTANCE * u64::from(instances);
    let left = files.saturating_sub(own);
    usize::try_from(left.clamp(CONNECTIONS_MIN, CONNECTIONS_MAX)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_room_for_what_else_is_open() {
        assert_eq!(connections_within(1024, 1), 816);
        assert_eq!(connections_within(20_000, 4), 16_384);
        assert_eq!(connections_within(FILES_GRANTED, 1), 10_032);
        assert_eq!(connections_within(64, 256), 64);
    }

    #[test]
    fn the_limit_is_raised_once_and_never_lowered() {
        let (before, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        let raised = raise_limit();
        assert!(raised >= before && raised <= hard.max(before), "{raised}");
        assert_eq!(raise_limit(), raised);
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap().0, raised);
    }
}
