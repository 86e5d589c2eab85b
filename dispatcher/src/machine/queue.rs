//! Who waits, in which order: fair between keys, aged priorities inside a key, FIFO inside a class.
//!
//! Between keys it is deficit round robin with the quantum taken to zero: each key has a counter of
//! tokens served, the least served key is next, and a key that comes back from idleness starts at
//! the level of the others, so that idleness saves nothing up. That is one ordered set, where a ring
//! of deficits would be walked many times for one long prompt.
//!
//! Requests that had a worker before (`again`) stand before all others: they are the heads of their
//! keys' queues, and their tokens are charged already, so they wait for no turn.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proto::RequestId;

use super::event::{KeyId, Priority};
use super::tick::Tick;

const CLASSES: usize = 3;

/// What stays the same about an entry as often as it waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ticket {
    pub(super) request: RequestId,
    pub(super) key: KeyId,
    pub(super) priority: Priority,
    /// Order of arrival over all keys.
    pub(super) sequence: u64,
    pub(super) received: Tick,
    pub(super) bytes: u64,
    /// Estimated tokens.
    pub(super) tokens: u64,
}

/// Whether an entry can be chosen now, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// For a slot.
    Slot,
    /// For a prompt thread.
    PromptThread,
    /// For nothing: it is being measured, pauses, or is held.
    Away,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    ticket: Ticket,
    again: bool,
    place: Place,
}

#[derive(Debug, Default)]
struct Key {
    /// Tokens served, on the scale of `Queue::floor`.
    served: u64,
    /// Requests that started and have not ended, those that wait again included.
    in_flight: u32,
    held: Held,
    classes: [BTreeMap<u64, RequestId>; CLASSES],
    unmeasured: BTreeMap<u64, RequestId>,
}

/// Entries, bytes and estimated tokens that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) entries: u64,
    pub(super) bytes: u64,
    pub(super) tokens: u64,
}

impl Held {
    fn add(&mut self, ticket: &Ticket) {
        self.entries += 1;
        self.bytes += ticket.bytes;
        self.tokens += ticket.tokens;
    }

    fn remove(&mut self, ticket: &Ticket) {
        self.entries -= 1;
        self.bytes -= ticket.bytes;
        self.tokens -= ticket.tokens;
    }
}

impl Key {
    fn has_work(&self) -> bool {
        self.held.entries > 0 || self.in_flight > 0
    }
}

#[derive(Debug)]
pub(super) struct Queue {
    aging: Duration,
    key_in_flight_max: u32,
    entries: BTreeMap<RequestId, Entry>,
    by_arrival: BTreeMap<u64, RequestId>,
    again: BTreeMap<u64, RequestId>,
    keys: BTreeMap<KeyId, Key>,
    /// Keys with a measured entry and room under their cap, least served first.
    turns: BTreeSet<(u64, KeyId)>,
    /// Keys with an entry for a prompt thread, taken round robin.
    unmeasured: BTreeSet<KeyId>,
    unmeasured_after: KeyId,
    /// Keys without work that were served beyond the floor: they are remembered until it reaches them.
    debtors: BTreeSet<(u64, KeyId)>,
    /// Where a key that comes back starts: what the last chosen key had been served.
    floor: u64,
    total: Held,
    /// Waiting entries of each priority.
    by_priority: [u64; CLASSES],
    keys_with_work: usize,
}

impl Queue {
    pub(super) fn new(aging: Duration, key_in_flight_max: Option<u32>) -> Self {
        Self {
            aging: aging.max(Duration::from_micros(1)),
            key_in_flight_max: key_in_flight_max.unwrap_or(u32::MAX),
            entries: BTreeMap::new(),
            by_arrival: BTreeMap::new(),
            again: BTreeMap::new(),
            keys: BTreeMap::new(),
            turns: BTreeSet::new(),
            unmeasured: BTreeSet::new(),
            unmeasured_after: KeyId(0),
            debtors: BTreeSet::new(),
            floor: 0,
            total: Held::default(),
            by_priority: [0; CLASSES],
            keys_with_work: 0,
        }
    }

    pub(super) fn push(&mut self, ticket: Ticket, again: bool, place: Place) {
        self.with_key(ticket.key, |key, floor| {
            if key.held.entries == 0 {
                key.served = key.served.max(floor);
            }
            key.held.add(&ticket);
        });
        self.total.add(&ticket);
        self.by_priority[ticket.priority as usize] += 1;
        self.by_arrival.insert(ticket.sequence, ticket.request);
        let entry = Entry {
            ticket,
            again,
            place: Place::Away,
        };
        self.entries.insert(ticket.request, entry);
        self.set_place(ticket.request, place);
    }

    pub(super) fn set_place(&mut self, request: RequestId, place: Place) {
        let Some(entry) = self.entries.get_mut(&request) else {
            return;
        };
        let before = *entry;
        entry.place = place;
        let ticket = before.ticket;
        let class = ticket.priority as usize;
        if before.again {
            match place {
                Place::Away => self.again.remove(&ticket.sequence),
                Place::Slot | Place::PromptThread => self.again.insert(ticket.sequence, request),
            };
            return;
        }
        self.with_key(ticket.key, |key, _| {
            match before.place {
                Place::Slot => key.classes[class].remove(&ticket.sequence),
                Place::PromptThread => key.unmeasured.remove(&ticket.sequence),
                Place::Away => None,
            };
            match place {
                Place::Slot => key.classes[class].insert(ticket.sequence, request),
                Place::PromptThread => key.unmeasured.insert(ticket.sequence, request),
                Place::Away => None,
            };
        });
    }

    /// Takes an entry out, wherever it is.
    pub(super) fn remove(&mut self, request: RequestId) -> Option<Ticket> {
        self.set_place(request, Place::Away);
        let ticket = self.entries.remove(&request)?.ticket;
        self.by_arrival.remove(&ticket.sequence);
        self.total.remove(&ticket);
        self.by_priority[ticket.priority as usize] -= 1;
        self.with_key(ticket.key, |key, _| key.held.remove(&ticket));
        Some(ticket)
    }

    /// From now on it stands before all that had no worker yet.
    pub(super) fn set_again(&mut self, request: RequestId) {
        let Some(place) = self.entries.get(&request).map(|entry| entry.place) else {
            return;
        };
        self.set_place(request, Place::Away);
        if let Some(entry) = self.entries.get_mut(&request) {
            entry.again = true;
        }
        self.set_place(request, place);
    }

    /// Requests that had a worker before, oldest first.
    pub(super) fn again(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.again.values().copied()
    }

    pub(super) fn has_again(&self) -> bool {
        !self.again.is_empty()
    }

    /// The measured entry whose turn it is.
    pub(super) fn next(&self, now: Tick) -> Option<RequestId> {
        let (_, key) = self.turns.first()?;
        let key = self.keys.get(key)?;
        let heads = key.classes.iter().enumerate();
        heads
            .filter_map(|(class, waiting)| {
                let (sequence, request) = waiting.first_key_value()?;
                let received = self.entries.get(request)?.ticket.received;
                let risen = now.since(received).as_micros() / self.aging.as_micros();
                let risen = usize::try_from(risen).unwrap_or(usize::MAX);
                Some((class.saturating_sub(risen), *sequence, *request))
            })
            .min()
            .map(|(_, _, request)| request)
    }

    /// The entry that a prompt thread should count next: keys in turn, oldest first inside a key.
    pub(super) fn next_unmeasured(&mut self) -> Option<RequestId> {
        let after = KeyId(self.unmeasured_after.0.wrapping_add(1));
        let key = self
            .unmeasured
            .range(after..)
            .next()
            .or_else(|| self.unmeasured.first())
            .copied()?;
        self.unmeasured_after = key;
        let (_, request) = self.keys.get(&key)?.unmeasured.first_key_value()?;
        Some(*request)
    }

    pub(super) fn has_unmeasured(&self) -> bool {
        !self.unmeasured.is_empty()
    }

    /// A request has its first slot: its estimate is charged to its key.
    pub(super) fn started(&mut self, key: KeyId, tokens: u64) {
        let mut floor = 0;
        self.with_key(key, |key, _| {
            floor = key.served;
            key.served = key.served.saturating_add(tokens);
            key.in_flight += 1;
        });
        self.raise_floor(floor);
    }

    /// A request that had started has ended: its true tokens replace what was charged.
    pub(super) fn ended(&mut self, key: KeyId, charged: u64, used: u64) {
        self.with_key(key, |key, _| {
            key.served = key.served.saturating_add(used).saturating_sub(charged);
            key.in_flight -= 1;
        });
    }

    fn raise_floor(&mut self, floor: u64) {
        self.floor = self.floor.max(floor);
        while let Some(&(served, key)) = self.debtors.first() {
            if served > self.floor {
                break;
            }
            self.debtors.pop_first();
            self.keys.remove(&key);
        }
    }

    /// Changes a key and keeps every index over keys true.
    fn with_key(&mut self, id: KeyId, change: impl FnOnce(&mut Key, u64)) {
        let key = self.keys.entry(id).or_default();
        let had_work = key.has_work();
        let served_before = key.served;
        change(key, self.floor);
        let has_work = key.has_work();
        let waits = key.in_flight < self.key_in_flight_max
            && key.classes.iter().any(|class| !class.is_empty());
        let served = key.served;
        let unmeasured = !key.unmeasured.is_empty();
        self.turns.remove(&(served_before, id));
        if waits {
            self.turns.insert((served, id));
        }
        if unmeasured {
            self.unmeasured.insert(id);
        } else {
            self.unmeasured.remove(&id);
        }
        match (had_work, has_work) {
            (false, true) => {
                self.keys_with_work += 1;
                self.debtors.remove(&(served_before, id));
            }
            (true, false) => {
                self.keys_with_work -= 1;
                if served > self.floor {
                    self.debtors.insert((served, id));
                } else {
                    self.keys.remove(&id);
                }
            }
            _ => {}
        }
        if self.keys_with_work == 0 {
            self.keys.clear();
            self.debtors.clear();
            self.floor = 0;
        }
    }

    /// The key has as many requests in flight as it may.
    pub(super) fn is_capped(&self, key: KeyId) -> bool {
        let in_flight = self.keys.get(&key).map_or(0, |key| key.in_flight);
        in_flight >= self.key_in_flight_max
    }

    pub(super) fn len(&self) -> u64 {
        self.total.entries
    }

    pub(super) fn total(&self) -> Held {
        self.total
    }

    /// Waiting entries of priority high, normal and low.
    pub(super) fn by_priority(&self) -> [u64; CLASSES] {
        self.by_priority
    }

    /// The keys with the most waiting entries, at most `max`, the most first.
    pub(super) fn fullest(&self, max: usize) -> Vec<(KeyId, u64)> {
        let waiting = |(id, key): (&KeyId, &Key)| (*id, key.held.entries);
        let mut all: Vec<_> = self.keys.iter().map(waiting).collect();
        all.retain(|(_, entries)| *entries > 0);
        all.sort_by_key(|(_, entries)| std::cmp::Reverse(*entries));
        all.truncate(max);
        all
    }

    pub(super) fn held_by(&self, key: KeyId) -> Held {
        self.keys.get(&key).map(|key| key.held).unwrap_or_default()
    }

    /// Whether a key other than this one waits or runs.
    pub(super) fn others_have_work(&self, key: KeyId) -> bool {
        let own = self.keys.get(&key).is_some_and(Key::has_work);
        self.keys_with_work > usize::from(own)
    }

    /// All entries, oldest first.
    pub(super) fn requests(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.by_arrival.values().copied()
    }

    pub(super) fn contains(&self, request: RequestId) -> bool {
        self.entries.contains_key(&request)
    }

    pub(super) fn check(&self) {
        let mut total = Held::default();
        let mut by_priority = [0; CLASSES];
        for entry in self.entries.values() {
            total.add(&entry.ticket);
            by_priority[entry.ticket.priority as usize] += 1;
        }
        assert_eq!(by_priority, self.by_priority, "each entry has one priority");
        assert_eq!(total, self.total, "the queue's totals are its entries'");
        assert_eq!(
            self.by_arrival.len(),
            self.entries.len(),
            "each entry has one place in the order"
        );
        let with_work = self.keys.values().filter(|key| key.has_work()).count();
        assert_eq!(with_work, self.keys_with_work, "keys with work are counted");
        for (served, id) in &self.turns {
            let key = self.keys.get(id);
            assert!(
                key.is_some_and(
                    |key| key.served == *served && key.in_flight < self.key_in_flight_max
                ),
                "a key's turn is where its served tokens put it"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket(request: u64, key: u64, priority: Priority, received_s: u64, tokens: u64) -> Ticket {
        Ticket {
            request: RequestId(request),
            key: KeyId(key),
            priority,
            sequence: request,
            received: Tick::from_micros(received_s * 1_000_000),
            bytes: 1,
            tokens,
        }
    }

    fn queue() -> Queue {
        Queue::new(Duration::from_secs(30), None)
    }

    /// Takes the next entry as the dispatcher does.
    fn take(queue: &mut Queue, now_s: u64) -> Option<u64> {
        let request = queue.next(Tick::from_micros(now_s * 1_000_000))?;
        let ticket = queue.remove(request)?;
        queue.started(ticket.key, ticket.tokens);
        queue.check();
        Some(request.0)
    }

    #[test]
    fn inside_a_class_the_first_come_is_the_first_served() {
        let mut queue = queue();
        for request in 1..=3 {
            queue.push(
                ticket(request, 0, Priority::Normal, 0, 1),
                false,
                Place::Slot,
            );
        }
        let order: Vec<_> = std::iter::from_fn(|| take(&mut queue, 0)).collect();
        assert_eq!(order, [1, 2, 3]);
    }

    #[test]
    fn a_key_with_long_requests_gets_as_many_tokens_and_not_as_many_requests() {
        let mut queue = queue();
        for request in 0..20 {
            queue.push(
                ticket(request, 1, Priority::Normal, 0, 1000),
                false,
                Place::Slot,
            );
        }
        for request in 20..120 {
            queue.push(
                ticket(request, 2, Priority::Normal, 0, 100),
                false,
                Place::Slot,
            );
        }
        let mut served = [0; 2];
        for _ in 0..55 {
            let request = take(&mut queue, 0).unwrap();
            served[usize::from(request >= 20)] += 1;
        }
        assert_eq!(served, [5, 50]);
    }

    #[test]
    fn a_key_that_was_idle_has_saved_nothing_up() {
        let mut queue = queue();
        for request in 0..10 {
            queue.push(
                ticket(request, 1, Priority::Normal, 0, 100),
                false,
                Place::Slot,
            );
        }
        for _ in 0..5 {
            take(&mut queue, 0);
        }
        for request in 10..20 {
            queue.push(
                ticket(request, 2, Priority::Normal, 0, 100),
                false,
                Place::Slot,
            );
        }
        let newcomers = (0..4)
            .filter(|_| take(&mut queue, 0).unwrap() >= 10)
            .count();
        assert!((2..=3).contains(&newcomers), "{newcomers} of 4 turns");
    }

    #[test]
    fn high_goes_first_and_low_rises_with_its_wait() {
        let mut queue = queue();
        queue.push(ticket(1, 0, Priority::Low, 0, 1), false, Place::Slot);
        queue.push(ticket(2, 0, Priority::High, 1, 1), false, Place::Slot);
        queue.push(ticket(3, 0, Priority::Normal, 1, 1), false, Place::Slot);
        assert_eq!(take(&mut queue, 2), Some(2));
        assert_eq!(take(&mut queue, 2), Some(3));
        queue.push(ticket(4, 0, Priority::High, 61, 1), false, Place::Slot);
        assert_eq!(take(&mut queue, 61), Some(1));
    }

    #[test]
    fn what_had_a_worker_before_stands_apart_and_in_the_order_of_arrival() {
        let mut queue = queue();
        queue.push(ticket(7, 0, Priority::Low, 0, 1), true, Place::Slot);
        queue.push(ticket(3, 1, Priority::Low, 0, 1), true, Place::Slot);
        assert_eq!(queue.next(Tick::ZERO), None);
        assert_eq!(
            queue.again().map(|request| request.0).collect::<Vec<_>>(),
            [3, 7]
        );
    }

    #[test]
    fn a_key_at_its_cap_is_passed_over_until_one_of_its_requests_ends() {
        let mut queue = Queue::new(Duration::from_secs(30), Some(1));
        queue.push(ticket(1, 1, Priority::Normal, 0, 1), false, Place::Slot);
        queue.push(ticket(2, 1, Priority::Normal, 0, 1), false, Place::Slot);
        queue.push(ticket(3, 2, Priority::Normal, 0, 50), false, Place::Slot);
        assert_eq!(take(&mut queue, 0), Some(1));
        assert_eq!(take(&mut queue, 0), Some(3));
        assert_eq!(take(&mut queue, 0), None);
        queue.ended(KeyId(1), 1, 1);
        assert_eq!(take(&mut queue, 0), Some(2));
    }

    #[test]
    fn true_counts_replace_the_estimate_in_the_keys_account() {
        let mut queue = queue();
        for request in 0..3 {
            queue.push(
                ticket(request, 1, Priority::Normal, 0, 100),
                false,
                Place::Slot,
            );
            queue.push(
                ticket(request + 10, 2, Priority::Normal, 0, 100),
                false,
                Place::Slot,
            );
        }
        assert_eq!(take(&mut queue, 0), Some(0));
        assert_eq!(take(&mut queue, 0), Some(10));
        queue.ended(KeyId(1), 100, 5000);
        assert_eq!(take(&mut queue, 0), Some(11));
        assert_eq!(take(&mut queue, 0), Some(12));
    }

    #[test]
    fn prompt_threads_serve_the_keys_in_turn() {
        let mut queue = queue();
        for request in 0..3 {
            queue.push(
                ticket(request, 1, Priority::Normal, 0, 1),
                false,
                Place::PromptThread,
            );
        }
        queue.push(
            ticket(9, 2, Priority::Normal, 0, 1),
            false,
            Place::PromptThread,
        );
        let mut order = Vec::new();
        while let Some(request) = queue.next_unmeasured() {
            queue.set_place(request, Place::Away);
            order.push(request.0);
        }
        assert_eq!(order, [0, 9, 1, 2]);
        assert!(!queue.has_unmeasured());
    }

    #[test]
    fn keys_without_work_are_forgotten() {
        let mut queue = queue();
        queue.push(ticket(0, 99, Priority::Normal, 0, 10), false, Place::Slot);
        for request in 1..1000 {
            queue.push(
                ticket(request, request, Priority::Normal, 0, 10),
                false,
                Place::Slot,
            );
            let id = RequestId(request);
            let ticket = queue.remove(id).unwrap();
            queue.started(ticket.key, ticket.tokens);
            queue.ended(ticket.key, 10, 10);
        }
        queue.check();
        assert!(queue.keys.len() < 1000);
        take(&mut queue, 0);
        queue.ended(KeyId(99), 10, 10);
        assert!(queue.keys.is_empty());
    }
}
