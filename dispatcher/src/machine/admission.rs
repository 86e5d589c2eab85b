//! Accept a request, or say why not.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::action::{Denied, QueueBound};
use super::event::{Arrival, Fingerprint, WorkerFacts};
use super::policy::Policy;
use super::queue::Held;
use super::tick::Tick;

const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// Assumed of a start-up that was never measured.
const START_UP_ASSUMED: Duration = Duration::from_secs(5);
/// Assumed of a service that was never measured.
const SERVICE_ASSUMED: Duration = Duration::from_secs(1);

/// The queue as an arrival finds it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) total: Held,
    /// The arriving key's own entries.
    pub(super) own: Held,
    /// Another key waits or runs.
    pub(super) others_have_work: bool,
    pub(super) retry_after: Duration,
}

/// The queue's bounds, then those that the model sets.
pub(super) fn check(
    policy: &Policy,
    arrival: &Arrival,
    tokens: u64,
    room: &Room,
    facts: Option<&WorkerFacts>,
) -> Result<(), Denied> {
    let bounds = [
        (
            QueueBound::Entries,
            room.total.entries,
            room.own.entries,
            1,
            u64::from(policy.queue_entries_max),
        ),
        (
            QueueBound::Bytes,
            room.total.bytes,
            room.own.bytes,
            arrival.bytes,
            policy.queue_bytes_max,
        ),
        (
            QueueBound::Tokens,
            room.total.tokens,
            room.own.tokens,
            tokens,
            policy.queue_tokens_max,
        ),
    ];
    for (bound, total, own, more, limit) in bounds {
        if total.saturating_add(more) > limit {
            return Err(full(bound, total, limit, room.retry_after));
        }
        let free = limit - total;
        if room.others_have_work && own.saturating_add(more) > free {
            return Err(full(QueueBound::KeyShare, own, free, room.retry_after));
        }
    }
    let Some(facts) = facts else {
        return Ok(());
    };
    check_bytes(arrival.prompt_bytes, facts)?;
    match arrival.prompt_tokens {
        Some(prompt_tokens) => check_length(prompt_tokens, facts.context_tokens),
        None => Ok(()),
    }
}

/// A text of more bytes than the longest tokens of a whole context need not be counted.
pub(super) fn check_bytes(bytes: u64, facts: &WorkerFacts) -> Result<(), Denied> {
    let limit_bytes = u64::from(facts.context_tokens) * u64::from(facts.longest_token_bytes);
    if bytes > limit_bytes {
        return Err(Denied::PromptTooLarge { bytes, limit_bytes });
    }
    Ok(())
}

/// A prompt must leave room for one token.
pub(super) fn check_length(prompt_tokens: u32, context_tokens: u32) -> Result<(), Denied> {
    if prompt_tokens >= context_tokens {
        return Err(Denied::PromptTooLong {
            prompt_tokens,
            context_tokens,
        });
    }
    Ok(())
}

fn full(bound: QueueBound, depth: u64, limit: u64, retry_after: Duration) -> Denied {
    Denied::QueueFull {
        bound,
        depth,
        limit,
        retry_after,
    }
}

/// How long a slot is held, as an exponentially weighted mean over the last requests.
#[derive(Debug, Default)]
pub(super) struct ServiceRate {
    mean: Option<Duration>,
}

impl ServiceRate {
    pub(super) fn ended(&mut self, held: Duration) {
        self.mean = Some(match self.mean {
            Some(mean) => (mean * 15 + held) / 16,
            None => held,
        });
    }

    /// When a refused client should come back: after the time in which `slots` serve a quarter of
    /// the queue, so that a crowd that comes back finds room. Without slots: after a start-up.
    pub(super) fn retry_after(
        &self,
        depth: u64,
        slots: u32,
        start_up: Option<Duration>,
    ) -> Duration {
        let after = if slots == 0 {
            start_up.unwrap_or(START_UP_ASSUMED)
        } else {
            let quarter = u32::try_from(depth / 4).unwrap_or(u32::MAX).max(1);
            let mean = self.mean.unwrap_or(SERVICE_ASSUMED);
            mean.saturating_mul(quarter) / slots
        };
        after.clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX)
    }
}

/// Fingerprints of prompts that killed their engines. Bounded; the one that would leave first makes room.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    until: BTreeMap<Fingerprint, Tick>,
    order: BTreeSet<(Tick, Fingerprint)>,
}

impl Quarantine {
    pub(super) fn insert(&mut self, fingerprint: Fingerprint, policy: &Policy, now: Tick) {
        let until = now.after(policy.quarantine);
        if let Some(before) = self.until.insert(fingerprint, until) {
            self.order.remove(&(before, fingerprint));
        }
        self.order.insert((until, fingerprint));
        if self.until.len() > policy.quarantine_entries_max as usize
            && let Some((_, first)) = self.order.pop_first()
        {
            self.until.remove(&first);
        }
    }

    /// How long it is still kept out; `None`: it may come in.
    pub(super) fn left(&self, fingerprint: Fingerprint, now: Tick) -> Option<Duration> {
        let left = self.until.get(&fingerprint)?.since(now);
        (!left.is_zero()).then_some(left)
    }
}

#[cfg(test)]
mod tests {
    use proto::RequestId;

    use super::*;
    use crate::machine::event::{KeyId, ModelHash, Priority};

    fn arrival(bytes: u64) -> Arrival {
        Arrival {
            request: RequestId(1),
            received: Tick::ZERO,
            key: KeyId(0),
            priority: Priority::Normal,
            fingerprint: Fingerprint(1),
            bytes,
            prompt_bytes: bytes,
            prompt_tokens: None,
            max_tokens: None,
            deadline: None,
            affinity: None,
        }
    }

    fn held(entries: u64) -> Held {
        Held {
            entries,
            bytes: entries,
            tokens: entries,
        }
    }

    fn room(total: u64, own: u64, others_have_work: bool) -> Room {
        Room {
            total: held(total),
            own: held(own),
            others_have_work,
            retry_after: RETRY_AFTER_MIN,
        }
    }

    fn bound(result: Result<(), Denied>) -> Option<QueueBound> {
        match result {
            Err(Denied::QueueFull { bound, .. }) => Some(bound),
            _ => None,
        }
    }

    #[test]
    fn the_entry_above_the_bound_is_refused_and_the_one_at_it_is_not() {
        let policy = Policy::default();
        let ask = |total| check(&policy, &arrival(1), 1, &room(total, total, false), None);
        assert_eq!(ask(1023), Ok(()));
        assert_eq!(bound(ask(1024)), Some(QueueBound::Entries));
    }

    #[test]
    fn bytes_and_tokens_are_bounds_of_their_own() {
        let policy = Policy::default();
        let empty = room(0, 0, false);
        let bytes = check(
            &policy,
            &arrival(policy.queue_bytes_max + 1),
            1,
            &empty,
            None,
        );
        assert_eq!(bound(bytes), Some(QueueBound::Bytes));
        let tokens = check(
            &policy,
            &arrival(1),
            policy.queue_tokens_max + 1,
            &empty,
            None,
        );
        assert_eq!(bound(tokens), Some(QueueBound::Tokens));
    }

    #[test]
    fn a_key_alone_may_hold_all_and_one_of_several_no_more_than_is_free() {
        let policy = Policy::default();
        let ask = |others| check(&policy, &arrival(1), 1, &room(600, 600, others), None);
        assert_eq!(ask(false), Ok(()));
        assert_eq!(bound(ask(true)), Some(QueueBound::KeyShare));
        let newcomer = check(&policy, &arrival(1), 1, &room(1000, 10, true), None);
        assert_eq!(newcomer, Ok(()));
    }

    #[test]
    fn a_prompt_that_cannot_fit_is_refused_by_its_bytes() {
        let facts = WorkerFacts {
            slots: 1,
            context_tokens: 100,
            longest_token_bytes: 10,
            model: ModelHash::default(),
            start_up: Duration::ZERO,
        };
        let empty = room(0, 0, false);
        let ask = |bytes| check(&Policy::default(), &arrival(bytes), 1, &empty, Some(&facts));
        assert_eq!(ask(1000), Ok(()));
        let limit_bytes = 1000;
        let bytes = 1001;
        assert_eq!(
            ask(1001),
            Err(Denied::PromptTooLarge { bytes, limit_bytes })
        );
    }

    #[test]
    fn a_prompt_must_leave_room_for_one_token() {
        assert_eq!(check_length(99, 100), Ok(()));
        assert!(check_length(100, 100).is_err());
    }

    #[test]
    fn retry_after_follows_the_measured_service_rate() {
        let mut rate = ServiceRate::default();
        for _ in 0..100 {
            rate.ended(Duration::from_secs(8));
        }
        let eight = rate.retry_after(64, 16, None);
        assert_eq!(eight, Duration::from_secs(8));
        assert_eq!(rate.retry_after(64, 4, None), Duration::from_secs(32));
        assert_eq!(rate.retry_after(1_000_000, 1, None), RETRY_AFTER_MAX);
        let start_up = Some(Duration::from_secs(40));
        assert_eq!(rate.retry_after(1, 0, start_up), Duration::from_secs(40));
    }

    #[test]
    fn a_quarantined_fingerprint_comes_in_again_after_its_time() {
        let policy = Policy::default();
        let mut quarantine = Quarantine::default();
        quarantine.insert(Fingerprint(1), &policy, Tick::ZERO);
        assert!(
            quarantine
                .left(Fingerprint(1), Tick::from_micros(1))
                .is_some()
        );
        assert_eq!(quarantine.left(Fingerprint(2), Tick::from_micros(1)), None);
        assert_eq!(
            quarantine.left(Fingerprint(1), Tick::ZERO.after(policy.quarantine)),
            None
        );
        for other in 10..5000 {
            quarantine.insert(Fingerprint(other), &policy, Tick::from_micros(other));
        }
        assert_eq!(quarantine.until.len(), 1024);
    }
}
