//! Every limit and time-out of the machine in one struct, asserted against each other.

use std::time::Duration;

/// What the machine may do and for how long. Built from the configuration once.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Instances in the pool.
    pub instances: u32,
    /// Waiting entries, measuring ones included.
    pub queue_entries_max: u32,
    /// Bytes that waiting entries hold together.
    pub queue_bytes_max: u64,
    /// Estimated tokens of waiting entries together.
    pub queue_tokens_max: u64,
    /// Longest wait from arrival to the first assignment.
    pub queue_timeout: Duration,
    /// Requests one key may have assigned at a time; `None`: no cap.
    pub key_in_flight_max: Option<u32>,
    /// A waiting entry rises one priority class for each of these it has waited.
    pub priority_aging: Duration,

    /// From spawn to handshake.
    pub connect_timeout: Duration,
    /// Loading that does not advance for this long is stalled.
    pub load_stall: Duration,
    /// Warming that does not advance for this long is stalled.
    pub warm_stall: Duration,
    /// Stalled: no pulse for max(`stall_min`, `stall_factor` × the longest of the last steps), at most `stall_max`.
    pub stall_min: Duration,
    pub stall_factor: u32,
    pub stall_max: Duration,
    /// A prompt thread bounds its own work; one that has not answered for this long is stalled.
    pub measure_stall: Duration,
    /// Readiness turns false at max(`unready_min`, `unready_factor` × the longest step) without a pulse.
    pub unready_min: Duration,
    pub unready_factor: u32,
    /// When the driver wakes later than this, all liveness deadlines move by its lateness.
    pub clock_jump: Duration,
    /// From SIGTERM to SIGKILL of a worker.
    pub worker_grace: Duration,
    /// From the exit to the fence, where no EOF was read; and from EOF, so long do requests wait for
    /// the exit status, which says whether the death counts against them.
    pub link_grace: Duration,
    /// From EOF to SIGKILL, where the process lives on; its death is the engine's then. Long enough
    /// for an exit that gives a device's memory back.
    pub lost_link_grace: Duration,

    /// The first of the growing pauses; the very first restart has none.
    pub backoff_min: Duration,
    pub backoff_max: Duration,
    /// The longest pause after a Ready worker was killed from outside.
    pub backoff_external_max: Duration,
    /// More crashes than this in `crash_window` park the instance.
    pub crashes_max: u32,
    pub crash_window: Duration,
    /// A parked instance is tried again after this, doubling to `park_max`.
    pub park_min: Duration,
    pub park_max: Duration,

    /// External deaths after which a request runs alone.
    pub suspect_after: u32,
    /// Engine deaths that fail a request and quarantine its fingerprint.
    pub engine_deaths_max: u32,
    pub quarantine: Duration,
    pub quarantine_entries_max: u32,

    /// From SIGTERM of the dispatcher to the end of what still runs.
    pub drain_timeout: Duration,
    /// Replacement of a worker (reload) lets its requests run this long, then resumes them elsewhere.
    pub replace_timeout: Duration,
    /// A prefix-affine instance is chosen unless its load is above this × the mean load (in percent).
    pub affinity_load_percent: u32,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            instances: 1,
            queue_entries_max: 1024,
            queue_bytes_max: 256 << 20,
            queue_tokens_max: 16 << 20,
            queue_timeout: Duration::from_secs(600),
            key_in_flight_max: None,
            priority_aging: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(30),
            load_stall: Duration::from_secs(300),
            warm_stall: Duration::from_secs(300),
            stall_min: Duration::from_secs(30),
            stall_factor: 10,
            stall_max: Duration::from_secs(300),
            measure_stall: Duration::from_secs(60),
            unready_min: Duration::from_secs(10),
            unready_factor: 3,
            clock_jump: Duration::from_secs(1),
            worker_grace: Duration::from_secs(5),
            link_grace: Duration::from_millis(250),
            lost_link_grace: Duration::from_secs(3),
            backoff_min: Duration::from_millis(500),
            backoff_max: Duration::from_secs(30),
            backoff_external_max: Duration::from_secs(1),
            crashes_max: 5,
            crash_window: Duration::from_secs(60),
            park_min: Duration::from_secs(300),
            park_max: Duration::from_secs(3600),
            suspect_after: 5,
            engine_deaths_max: 2,
            quarantine: Duration::from_secs(3600),
            quarantine_entries_max: 1024,
            drain_timeout: Duration::from_secs(30),
            replace_timeout: Duration::from_secs(30),
            affinity_load_percent: 125,
        }
    }
}

impl Policy {
    /// Holds the limits against each other.
    ///
    /// # Errors
    ///
    /// The first contradiction, in words.
    pub fn check(&self) -> Result<(), &'static str> {
        let rules = [
            (self.instances > 0, "there must be at least one instance"),
            (
                self.queue_entries_max > 0,
                "the queue must hold at least one entry",
            ),
            (
                self.queue_bytes_max > 0,
                "the queue must hold at least one byte",
            ),
            (
                self.queue_tokens_max > 0,
                "the queue must hold at least one token",
            ),
            (
                self.key_in_flight_max != Some(0),
                "a key must be allowed one request in flight",
            ),
            (
                !self.priority_aging.is_zero(),
                "waiting must raise a priority at some time",
            ),
            (
                self.unready_min <= self.stall_min,
                "an instance must turn unready before it is stalled",
            ),
            (
                self.unready_factor <= self.stall_factor,
                "an instance must turn unready before it is stalled",
            ),
            (
                self.stall_min <= self.stall_max,
                "the shortest stall must not be longer than the longest",
            ),
            (
                self.clock_jump < self.stall_min,
                "a late wake-up must be forgiven before it looks like a stall",
            ),
            (
                self.link_grace <= self.lost_link_grace,
                "requests must not wait for an exit status longer than the process has to exit",
            ),
            (
                self.link_grace <= self.worker_grace,
                "a link must end no later than its process is killed",
            ),
            (
                !self.worker_grace.is_zero(),
                "a worker must have time between SIGTERM and SIGKILL",
            ),
            (
                !self.backoff_min.is_zero(),
                "restarts must not follow each other without a pause",
            ),
            (
                self.backoff_min <= self.backoff_max,
                "the first pause must not be longer than the longest",
            ),
            (
                self.backoff_max < Duration::from_secs(60),
                "requests wait for an instance in backoff: under 60 s",
            ),
            (
                !self.park_min.is_zero() && self.park_min <= self.park_max,
                "the first parking must not be longer than the longest",
            ),
            (
                !self.crash_window.is_zero(),
                "crashes must be counted over some time",
            ),
            (
                self.engine_deaths_max > 0,
                "some engine's death must fail a request",
            ),
            (
                self.suspect_after > 0,
                "a request must be allowed one death from outside",
            ),
            (
                self.affinity_load_percent >= 100,
                "an affine instance must be allowed the mean load",
            ),
        ];
        match rules.iter().find(|(holds, _)| !holds) {
            Some((_, contradiction)) => Err(contradiction),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_do_not_contradict_each_other() {
        assert_eq!(Policy::default().check(), Ok(()));
    }

    #[test]
    fn a_contradiction_is_told_in_words() {
        let policy = Policy {
            unready_min: Duration::from_secs(40),
            ..Policy::default()
        };
        let words = "an instance must turn unready before it is stalled";
        assert_eq!(policy.check(), Err(words));
    }
}
