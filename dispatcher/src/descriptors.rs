//! Shares the process's file descriptors out: first to what serves, the rest to connections.

use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Listeners, signals, the runtime, the lock, standard streams, a log line's and a record's file.
const OWN: u64 = 40;
/// Pipes, link and process handle of a worker, and of the one that replaces it.
const PER_INSTANCE: u64 = 12;
/// However few there are, so many connections are served, or nobody could ask why.
const CONNECTIONS_MIN: u64 = 8;

/// How many connections there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Connections {
    /// Served in full.
    pub(crate) max: usize,
    /// Beyond those, answered about health, status and metrics alone.
    pub(crate) reserve: usize,
}

/// Raises the soft limit as far as is wanted and allowed, and says how many of `wanted` connections
/// there is room for: a flood of clients must never leave a worker without its pipes.
///
/// # Errors
///
/// Where the system does not say its limit.
pub(crate) fn make_room(instances: u32, wanted: Connections) -> io::Result<Connections> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let all = wanted.max as u64 + wanted.reserve as u64 + own(instances);
    let raised = all.min(hard).max(soft);
    let limit = match setrlimit(Resource::RLIMIT_NOFILE, raised, hard) {
        Ok(()) => raised,
        // Some systems have a lower bound of their own: what there is must do.
        Err(_) => soft,
    };
    let room = share(limit, instances, wanted);
    if room != wanted {
        tracing::warn!(
            descriptors = limit,
            connections = room.max,
            "fewer connections than usual: the limit of open files is low (`ulimit -n`)"
        );
    }
    Ok(room)
}

fn own(instances: u32) -> u64 {
    OWN + PER_INSTANCE * u64::from(instances)
}

fn share(limit: u64, instances: u32, wanted: Connections) -> Connections {
    let left = limit.saturating_sub(own(instances)).max(CONNECTIONS_MIN);
    let left = usize::try_from(left).unwrap_or(usize::MAX);
    if left >= wanted.max.saturating_add(wanted.reserve) {
        return wanted;
    }
    let reserve = wanted.reserve.min(left / 4);
    Connections {
        max: left - reserve,
        reserve,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Connections = Connections {
        max: 4096,
        reserve: 64,
    };

    #[test]
    fn workers_have_their_descriptors_before_connections_have_theirs() {
        assert_eq!(share(1 << 20, 1, WANTED), WANTED);
        // 1024, a usual limit: 40 of our own and 12 for each of 3 workers.
        let usual = Connections {
            max: 884,
            reserve: 64,
        };
        assert_eq!(share(1024, 3, WANTED), usual);
        let small = Connections {
            max: 33,
            reserve: 11,
        };
        assert_eq!(share(96, 1, WANTED), small);
    }

    #[test]
    fn with_hardly_any_descriptors_somebody_can_still_ask_why() {
        let least = Connections { max: 6, reserve: 2 };
        for limit in [0, 20, 52, 60] {
            assert_eq!(share(limit, 1, WANTED), least, "{limit}");
        }
    }
}
