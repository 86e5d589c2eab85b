//! Many requests of many keys: who is served when.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use proto::RequestId;

use super::{Rig, arrival, assigned, facts};
use crate::machine::action::Outcome;
use crate::machine::event::{Event, KeyId};
use crate::machine::policy::Policy;

fn wide() -> Policy {
    Policy {
        queue_entries_max: 100_000,
        queue_bytes_max: u64::MAX,
        queue_tokens_max: u64::MAX,
        queue_timeout: Duration::from_secs(1_000_000),
        ..Policy::default()
    }
}

/// Serves `count` requests of `keys` keys through one instance of four slots; returns in which
/// order they started.
fn serve(count: u64, keys: u64) -> Vec<u64> {
    let mut rig = Rig::new(wide());
    for id in 0..count {
        let mut arrival = arrival(id);
        arrival.key = KeyId(id % keys);
        arrival.deadline = Some(Duration::from_secs(100_000 + id));
        rig.machine
            .handle(Event::Arrived(Box::new(arrival)), rig.now);
    }
    let mut running = VecDeque::from(assigned(&rig.bring_up(0, facts(4, 0))));
    let mut order = Vec::new();
    while let Some((id, _)) = running.pop_front() {
        order.push(id);
        rig.now = rig.now.after(Duration::from_millis(1));
        rig.machine.handle(
            Event::Finished {
                request: RequestId(id),
                attempt: proto::Attempt(1),
                reason: proto::FinishReason::Stop,
                tokens: 100,
            },
            rig.now,
        );
        while let Some(action) = rig.machine.poll_action() {
            running.extend(assigned(std::slice::from_ref(&action)));
            if let crate::machine::action::Action::End { outcome, .. } = action {
                assert!(matches!(outcome, Outcome::Completed { .. }));
            }
        }
    }
    rig.machine.check_invariants();
    order
}

#[test]
fn all_keys_are_served_alike_and_each_in_its_order() {
    let order = serve(300, 10);
    let mut last: BTreeMap<u64, u64> = BTreeMap::new();
    for (turn, id) in (0u64..).zip(&order) {
        let served = last.insert(id % 10, *id);
        assert!(
            served.is_none_or(|before| before < *id),
            "first come, first served"
        );
        assert!(
            id / 10 <= turn / 10 + 2,
            "request {id} came in turn {turn}: no key is far behind"
        );
    }
}
