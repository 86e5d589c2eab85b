//! One instance's lifecycle: which worker fills the place, how far it is, how it ends.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::{Attempt, Generation, InstanceId, RequestId};

use super::event::{ExitStatus, WorkerFacts};
use super::liveness::Liveness;
use super::measurement::ExitCause;
use super::policy::Policy;
use super::restart::{Life, Restart};
use super::tick::Tick;

/// A worker's exit code for "configuration, do not retry".
const EXIT_PERMANENT: i32 = 78;
const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

#[derive(Clone, Debug)]
pub(super) enum State {
    /// A process was asked for; no handshake yet.
    Spawning {
        connect_by: Tick,
    },
    Loading {
        permille: u32,
        stalled_at: Tick,
    },
    Warming {
        done: u32,
        pulse: u64,
        stalled_at: Tick,
    },
    Ready {
        liveness: Liveness,
    },
    /// It takes no new work; what it has may run on.
    Draining(Draining),
    /// It is ending, or has ended in part: link and process each end for themselves.
    Terminating(Death),
    /// No process; the next one is spawned at `until`.
    Backoff {
        until: Tick,
        reason: String,
    },
    /// No process, and none will come soon; `None`: not before a reload.
    Quarantined {
        until: Option<Tick>,
        reason: String,
    },
    /// No process, and none will come: the dispatcher is leaving.
    Stopped,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Draining {
    /// Its requests may run until then; afterwards they are resumed elsewhere.
    Emptying { until: Tick },
    /// It was told to drain and has until then to exit.
    Asked { until: Tick },
}

impl Draining {
    pub(super) fn until(self) -> Tick {
        match self {
            Self::Emptying { until } | Self::Asked { until } => until,
        }
    }
}

/// Why a worker ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// We wanted it: reload, drain, stop.
    Planned,
    /// No step while work was pending.
    Stalled,
    /// It did not connect, load or warm up in time.
    SlowStart,
    /// Its link ended first.
    LinkLost,
    /// Its process ended first.
    Exited,
}

#[derive(Clone, Debug)]
pub(super) struct Death {
    pub(super) why: Why,
    /// When SIGKILL is due; `None`: it was sent, or the process is gone.
    pub(super) kill_at: Option<Tick>,
    pub(super) killed: bool,
    /// When its requests wait no longer for the exit status.
    pub(super) judge_at: Option<Tick>,
    /// When the link of an exited process is closed from our side.
    pub(super) close_at: Option<Tick>,
    pub(super) exit: Option<ExitStatus>,
}

impl Death {
    pub(super) fn new(why: Why, kill_at: Option<Tick>) -> Self {
        Self {
            why,
            kill_at,
            killed: false,
            judge_at: None,
            close_at: None,
            exit: None,
        }
    }

    /// What is known of the cause by now: our own reason, or the wait status. `None`: nothing yet.
    pub(super) fn cause(&self) -> Option<ExitCause> {
        match self.why {
            Why::Stalled | Why::SlowStart => Some(ExitCause::Engine),
            Why::Planned => Some(self.exit.map_or(ExitCause::Planned, planned)),
            // A worker that closed its link and lived on had to be killed: that is its own fault.
            Why::LinkLost if self.killed => Some(match self.exit {
                Some(ExitStatus::Code(EXIT_PERMANENT)) => ExitCause::Permanent,
                _ => ExitCause::Engine,
            }),
            Why::LinkLost | Why::Exited => self.exit.map(unplanned),
        }
    }
}

fn is_external(signal: i32) -> bool {
    matches!(signal, SIGHUP | SIGINT | SIGKILL | SIGTERM)
}

fn planned(status: ExitStatus) -> ExitCause {
    match status {
        ExitStatus::Signal { signal, oom } if oom || !is_external(signal) => ExitCause::Engine,
        _ => ExitCause::Planned,
    }
}

fn unplanned(status: ExitStatus) -> ExitCause {
    match status {
        ExitStatus::Code(EXIT_PERMANENT) => ExitCause::Permanent,
        ExitStatus::Signal { signal, oom: false } if is_external(signal) => ExitCause::External,
        _ => ExitCause::Engine,
    }
}

/// One sequence's place in the worker's batch, from the assignment until the worker gave it up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    pub(super) attempt: Attempt,
    /// The request has ended for its client; the worker has not said so yet.
    pub(super) cancelled: bool,
}

#[derive(Debug)]
pub(super) struct Instance {
    pub(super) id: InstanceId,
    /// Of the newest worker, living or dead.
    pub(super) generation: Generation,
    pub(super) state: State,
    /// The handshake is done and the link not fenced.
    pub(super) link_open: bool,
    /// Of this generation, once it was Ready.
    pub(super) facts: Option<WorkerFacts>,
    pub(super) seats: BTreeMap<RequestId, Seat>,
    /// Requests whose prompts this worker counts, and since when; a cancelled one stays until the answer.
    pub(super) measuring: BTreeMap<RequestId, Tick>,
    /// This request, running or measured, bears no company.
    pub(super) exclusive: Option<RequestId>,
    /// Requests held until the death's cause is known.
    pub(super) casualties: Vec<RequestId>,
    /// Requests that went on before it was known, as suspects.
    pub(super) unjudged: Vec<RequestId>,
    /// Requests that went on before the exit, because our own reason for it was enough.
    pub(super) parted: Vec<RequestId>,
    /// Requests that were assigned when the worker died, for the record.
    pub(super) batch: Vec<RequestId>,
    pub(super) restart: Restart,
    pub(super) spawned_at: Tick,
    pub(super) ready_at: Option<Tick>,
    /// No new work until then: it refused some just now.
    pub(super) refuses_until: Option<Tick>,
    pub(super) restarts: u64,
    pub(super) crashes: u64,
}

impl Instance {
    pub(super) fn new(id: InstanceId) -> Self {
        Self {
            id,
            generation: Generation(0),
            state: State::Stopped,
            link_open: false,
            facts: None,
            seats: BTreeMap::new(),
            measuring: BTreeMap::new(),
            exclusive: None,
            casualties: Vec::new(),
            unjudged: Vec::new(),
            parted: Vec::new(),
            batch: Vec::new(),
            restart: Restart::default(),
            spawned_at: Tick::ZERO,
            ready_at: None,
            refuses_until: None,
            restarts: 0,
            crashes: 0,
        }
    }

    pub(super) fn slots(&self) -> u32 {
        self.facts.map_or(0, |facts| facts.slots)
    }

    pub(super) fn in_flight(&self) -> u32 {
        u32::try_from(self.seats.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn is_ready(&self) -> bool {
        matches!(self.state, State::Ready { .. })
    }

    /// Ready, and no silence that makes it doubtful.
    pub(super) fn is_responsive(&self, policy: &Policy, now: Tick) -> bool {
        match &self.state {
            State::Ready { liveness } => liveness.unready_at(policy).is_none_or(|at| now < at),
            _ => false,
        }
    }

    /// May new work be given to it at all?
    pub(super) fn takes_work(&self, policy: &Policy, now: Tick) -> bool {
        self.link_open
            && self.exclusive.is_none()
            && self.refuses_until.is_none()
            && self.is_responsive(policy, now)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.seats.is_empty() && self.measuring.is_empty()
    }

    /// A process may exist: the place and its memory are taken.
    pub(super) fn has_process(&self) -> bool {
        !matches!(
            self.state,
            State::Backoff { .. } | State::Quarantined { .. } | State::Stopped
        )
    }

    /// No worker will fill it before its time, or an operator's word.
    pub(super) fn is_parked(&self) -> bool {
        matches!(self.state, State::Quarantined { .. } | State::Stopped)
    }

    pub(super) fn life(&self, now: Tick, external: bool) -> Life {
        Life {
            start_up: self.ready_at.unwrap_or(now).since(self.spawned_at),
            ready_for: self.ready_at.map(|ready_at| now.since(ready_at)),
            external,
        }
    }

    /// The moment at which an unanswered prompt shows that the worker is stalled.
    pub(super) fn prompt_thread_stalled_at(&self, policy: &Policy) -> Option<Tick> {
        let oldest = self.measuring.values().min()?;
        self.is_ready().then(|| oldest.after(policy.measure_stall))
    }

    /// The earliest moment at which something is due here.
    pub(super) fn next_deadline(&self, policy: &Policy, now: Tick) -> Option<Tick> {
        let of_state = match &self.state {
            State::Spawning { connect_by } => Some(*connect_by),
            State::Loading { stalled_at, .. } | State::Warming { stalled_at, .. } => {
                Some(*stalled_at)
            }
            State::Ready { liveness } => {
                // The turn to unready is no event of its own, but somebody must look at that moment.
                let unready = liveness.unready_at(policy).filter(|at| *at > now);
                [unready, liveness.stalled_at(policy)]
                    .into_iter()
                    .flatten()
                    .min()
            }
            State::Draining(draining) => Some(draining.until()),
            State::Terminating(death) => [death.kill_at, death.judge_at, death.close_at]
                .into_iter()
                .flatten()
                .min(),
            State::Backoff { until, .. } => Some(*until),
            State::Quarantined { until, .. } => *until,
            State::Stopped => None,
        };
        let prompt_thread = self.prompt_thread_stalled_at(policy);
        let all = [of_state, self.refuses_until, prompt_thread];
        all.into_iter().flatten().min()
    }

    /// The dispatcher itself slept: moves what would take that for the worker's silence.
    pub(super) fn forgive(&mut self, lateness: Duration) {
        for since in self.measuring.values_mut() {
            *since = since.after(lateness);
        }
        match &mut self.state {
            State::Spawning { connect_by: at }
            | State::Loading { stalled_at: at, .. }
            | State::Warming { stalled_at: at, .. } => *at = at.after(lateness),
            State::Ready { liveness } => liveness.forgive(lateness),
            State::Draining(Draining::Emptying { until } | Draining::Asked { until }) => {
                *until = until.after(lateness);
            }
            // An exit that could not be told yet must not look like a process that lives on.
            State::Terminating(death) => {
                for at in [&mut death.kill_at, &mut death.judge_at, &mut death.close_at] {
                    *at = at.map(|at| at.after(lateness));
                }
            }
            State::Backoff { .. } | State::Quarantined { .. } | State::Stopped => {}
        }
    }
}

impl State {
    /// The lifecycle's words.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Spawning { .. } => "spawning",
            Self::Loading { .. } => "loading",
            Self::Warming { .. } => "warming",
            Self::Ready { .. } => "ready",
            Self::Draining(_) => "draining",
            Self::Terminating(_) => "terminating",
            Self::Backoff { .. } => "backoff",
            Self::Quarantined { .. } => "quarantined",
            Self::Stopped => "stopped",
        }
    }
}

/// Why a place is empty, in words.
pub(super) fn reason(why: Why, exit: Option<ExitStatus>) -> String {
    match (why, exit) {
        (Why::Stalled, _) => "stalled: work was pending and no step was made".to_owned(),
        (Why::SlowStart, _) => "did not start in time".to_owned(),
        (_, Some(ExitStatus::Code(EXIT_PERMANENT))) => {
            "exit code 78: its configuration cannot work".to_owned()
        }
        (_, Some(ExitStatus::Code(code))) => format!("exit code {code}"),
        (_, Some(ExitStatus::Signal { signal, oom: true })) => {
            format!("signal {signal}, out of memory")
        }
        (_, Some(ExitStatus::Signal { signal, oom: false })) => format!("signal {signal}"),
        (Why::Planned, None) => "asked to leave".to_owned(),
        (_, None) => "its link was lost".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn death(why: Why, killed: bool, exit: Option<ExitStatus>) -> Option<ExitCause> {
        Death {
            why,
            kill_at: None,
            killed,
            judge_at: None,
            close_at: None,
            exit,
        }
        .cause()
    }

    fn signal(signal: i32) -> Option<ExitStatus> {
        Some(ExitStatus::Signal { signal, oom: false })
    }

    #[test]
    fn a_signal_from_outside_is_external_and_every_other_end_is_the_engines() {
        for from_outside in [SIGHUP, SIGINT, SIGKILL, SIGTERM] {
            for why in [Why::LinkLost, Why::Exited] {
                assert_eq!(
                    death(why, false, signal(from_outside)),
                    Some(ExitCause::External)
                );
            }
        }
        for own in [4, 6, 8, 11] {
            assert_eq!(
                death(Why::Exited, false, signal(own)),
                Some(ExitCause::Engine)
            );
        }
        for code in [0, 1, 101] {
            let exit = Some(ExitStatus::Code(code));
            assert_eq!(death(Why::Exited, false, exit), Some(ExitCause::Engine));
        }
    }

    #[test]
    fn the_oom_killers_kill_is_the_engines() {
        let exit = Some(ExitStatus::Signal {
            signal: SIGKILL,
            oom: true,
        });
        assert_eq!(death(Why::LinkLost, false, exit), Some(ExitCause::Engine));
        assert_eq!(death(Why::Planned, false, exit), Some(ExitCause::Engine));
    }

    #[test]
    fn our_own_kill_is_the_engines_where_the_worker_was_at_fault_and_planned_where_not() {
        assert_eq!(
            death(Why::Stalled, true, signal(SIGKILL)),
            Some(ExitCause::Engine)
        );
        assert_eq!(
            death(Why::LinkLost, true, signal(SIGKILL)),
            Some(ExitCause::Engine)
        );
        assert_eq!(
            death(Why::Planned, true, signal(SIGKILL)),
            Some(ExitCause::Planned)
        );
        assert_eq!(
            death(Why::Planned, false, signal(11)),
            Some(ExitCause::Engine)
        );
    }

    #[test]
    fn a_lost_link_says_nothing_until_the_exit_or_the_kill() {
        assert_eq!(death(Why::LinkLost, false, None), None);
        assert_eq!(death(Why::LinkLost, true, None), Some(ExitCause::Engine));
    }

    #[test]
    fn exit_code_78_is_permanent() {
        let exit = Some(ExitStatus::Code(EXIT_PERMANENT));
        assert_eq!(death(Why::Exited, false, exit), Some(ExitCause::Permanent));
        assert_eq!(
            death(Why::LinkLost, false, exit),
            Some(ExitCause::Permanent)
        );
    }
}
