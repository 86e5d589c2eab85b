//! The ordered index of all deadlines: one per owner, the earliest at hand.

use std::collections::{BTreeMap, BTreeSet};

use proto::{InstanceId, RequestId};

use super::tick::Tick;

/// Whose deadline it is. Each owner has one: the earliest of what it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Owner {
    Shutdown,
    Instance(InstanceId),
    Request(RequestId),
}

#[derive(Debug, Default)]
pub(super) struct Timers {
    due: BTreeSet<(Tick, Owner)>,
    armed: BTreeMap<Owner, Tick>,
}

impl Timers {
    /// Replaces the owner's deadline; `None` disarms it.
    pub(super) fn set(&mut self, owner: Owner, at: Option<Tick>) {
        let before = match at {
            Some(at) => self.armed.insert(owner, at),
            None => self.armed.remove(&owner),
        };
        if before == at {
            return;
        }
        if let Some(before) = before {
            self.due.remove(&(before, owner));
        }
        if let Some(at) = at {
            self.due.insert((at, owner));
        }
    }

    pub(super) fn get(&self, owner: Owner) -> Option<Tick> {
        self.armed.get(&owner).copied()
    }

    pub(super) fn next(&self) -> Option<Tick> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Disarms and returns all whose deadline has come, earliest first.
    pub(super) fn take_due(&mut self, now: Tick) -> Vec<Owner> {
        let mut owners = Vec::new();
        while let Some(&(at, owner)) = self.due.first() {
            if at > now {
                break;
            }
            self.due.pop_first();
            self.armed.remove(&owner);
            owners.push(owner);
        }
        owners
    }

    pub(super) fn len(&self) -> usize {
        debug_assert_eq!(self.due.len(), self.armed.len());
        self.armed.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_deadline_comes_first_and_a_replaced_one_never() {
        let mut timers = Timers::default();
        let (one, two) = (
            Owner::Instance(InstanceId(1)),
            Owner::Instance(InstanceId(2)),
        );
        timers.set(one, Some(Tick::from_micros(10)));
        timers.set(two, Some(Tick::from_micros(20)));
        timers.set(one, Some(Tick::from_micros(30)));
        assert_eq!(timers.next(), Some(Tick::from_micros(20)));
        assert_eq!(timers.take_due(Tick::from_micros(25)), [two]);
        timers.set(one, None);
        assert_eq!(timers.next(), None);
        assert_eq!(timers.len(), 0);
    }
}
