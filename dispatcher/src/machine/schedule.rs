//! Which instance takes a request: a total function of what the instances look like.

use std::collections::{BTreeMap, VecDeque};

use proto::{Generation, InstanceId};

/// Prefixes whose last instance is remembered.
const PREFIXES_MAX: usize = 4096;

/// One instance as the choice sees it. Only those that could take the request are shown as `open`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) instance: InstanceId,
    pub(super) in_flight: u32,
    pub(super) slots: u32,
    /// It may take this request now.
    pub(super) open: bool,
}

/// The open candidate with the least load (in-flight / slots), ties to the lowest number; but the
/// one that holds the prefix, unless its load would be above `load_percent` of the mean.
pub(super) fn choose(
    candidates: &[Candidate],
    affine: Option<InstanceId>,
    load_percent: u32,
) -> Option<InstanceId> {
    let open = || candidates.iter().filter(|candidate| candidate.open);
    if let Some(affine) = affine
        && let Some(candidate) = open().find(|candidate| candidate.instance == affine)
        && is_within_bound(candidate, candidates, load_percent)
    {
        return Some(affine);
    }
    open()
        .min_by(|a, b| {
            let a_load = u64::from(a.in_flight) * u64::from(b.slots);
            let b_load = u64::from(b.in_flight) * u64::from(a.slots);
            a_load.cmp(&b_load).then(a.instance.cmp(&b.instance))
        })
        .map(|candidate| candidate.instance)
}

/// Consistent hashing with bounded loads: with this request, the candidate holds at most its share
/// of all in-flight requests × the bound, rounded up.
fn is_within_bound(candidate: &Candidate, all: &[Candidate], load_percent: u32) -> bool {
    let in_flight: u64 = all.iter().map(|other| u64::from(other.in_flight)).sum();
    let slots: u64 = all.iter().map(|other| u64::from(other.slots)).sum();
    let share = (in_flight + 1) * u64::from(candidate.slots) * u64::from(load_percent);
    let bound = share.div_ceil(slots.max(1) * 100);
    u64::from(candidate.in_flight) < bound
}

/// Which instance last held a prefix. Bounded: the longest remembered is forgotten first.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    last: BTreeMap<u64, (InstanceId, Generation)>,
    order: VecDeque<u64>,
}

impl Prefixes {
    pub(super) fn remember(&mut self, prefix: u64, instance: InstanceId, generation: Generation) {
        if self.last.insert(prefix, (instance, generation)).is_none() {
            self.order.push_back(prefix);
            if self.order.len() > PREFIXES_MAX
                && let Some(oldest) = self.order.pop_front()
            {
                self.last.remove(&oldest);
            }
        }
    }

    pub(super) fn holder(&self, prefix: u64) -> Option<(InstanceId, Generation)> {
        self.last.get(&prefix).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(instance: u32, in_flight: u32, slots: u32) -> Candidate {
        Candidate {
            instance: InstanceId(instance),
            in_flight,
            slots,
            open: in_flight < slots,
        }
    }

    #[test]
    fn the_least_loaded_takes_it_and_ties_go_to_the_lowest_number() {
        let pool = [candidate(0, 2, 4), candidate(1, 1, 4), candidate(2, 1, 4)];
        assert_eq!(choose(&pool, None, 125), Some(InstanceId(1)));
        let pool = [candidate(0, 1, 2), candidate(1, 3, 8)];
        assert_eq!(choose(&pool, None, 125), Some(InstanceId(1)));
    }

    #[test]
    fn a_full_pool_takes_nothing() {
        assert_eq!(
            choose(&[candidate(0, 4, 4)], Some(InstanceId(0)), 125),
            None
        );
    }

    #[test]
    fn the_holder_of_the_prefix_takes_it_until_its_load_is_above_the_bound() {
        let pool = [candidate(0, 0, 8), candidate(1, 0, 8)];
        assert_eq!(choose(&pool, Some(InstanceId(1)), 125), Some(InstanceId(1)));
        let pool = [candidate(0, 0, 8), candidate(1, 3, 8)];
        assert_eq!(choose(&pool, Some(InstanceId(1)), 125), Some(InstanceId(0)));
        let pool = [candidate(0, 3, 8), candidate(1, 3, 8)];
        assert_eq!(choose(&pool, Some(InstanceId(1)), 125), Some(InstanceId(1)));
    }

    #[test]
    fn remembered_prefixes_are_bounded() {
        let mut prefixes = Prefixes::default();
        for prefix in 0..10_000 {
            prefixes.remember(prefix, InstanceId(0), Generation(1));
        }
        assert_eq!(prefixes.last.len(), PREFIXES_MAX);
        assert_eq!(prefixes.holder(0), None);
        assert!(prefixes.holder(9_999).is_some());
    }
}
