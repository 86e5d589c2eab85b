//! What is true after every event, checked.

use super::Dispatch;
use crate::machine::instance::State;
use crate::machine::request::{Phase, Request};
use crate::machine::timers::Owner;

impl Dispatch {
    /// Holds the machine against its invariants (`machine/mod.rs` has them in prose).
    ///
    /// # Panics
    ///
    /// Where one does not hold, with the words of it.
    pub fn check_invariants(&self) {
        self.check_requests();
        self.check_instances();
        self.queue.check();
        self.check_deadlines();
    }

    fn check_requests(&self) {
        let seated = self
            .requests
            .values()
            .filter(|request| request.seat().is_some())
            .count();
        assert_eq!(
            self.requests.len(),
            seated + usize::try_from(self.queue.len()).unwrap_or(usize::MAX),
            "accepted = queued + assigned + finished"
        );
        assert_eq!(
            self.counters.accepted,
            self.counters.ended_after_acceptance() + self.requests.len() as u64,
            "accepted = queued + assigned + finished"
        );
        let never_started = self
            .requests
            .values()
            .filter(|request| !request.has_started());
        assert!(
            never_started.count() <= self.policy.queue_entries_max as usize,
            "the queue holds no more than its bound, resumed requests apart"
        );
        for request in self.requests.values() {
            self.check_request(request);
        }
    }

    fn check_request(&self, request: &Request) {
        let id = request.id;
        match request.phase {
            Phase::Assigned { instance } | Phase::Streaming { instance } => {
                let place = &self.instances[instance.0 as usize];
                let seat = place.seats.get(&id);
                assert!(
                    seat.is_some_and(|seat| seat.attempt == request.attempt && !seat.cancelled),
                    "an assigned request has a seat of its newest attempt"
                );
                assert!(
                    !self.queue.contains(id),
                    "an assigned request does not wait"
                );
            }
            Phase::Measuring { instance } => {
                let place = &self.instances[instance.0 as usize];
                assert!(
                    place.measuring.contains_key(&id),
                    "a measuring request is at a prompt thread"
                );
            }
            Phase::Held { instance } => {
                let place = &self.instances[instance.0 as usize];
                assert!(
                    place.casualties.contains(&id),
                    "a held request is some death's casualty"
                );
            }
            Phase::Queued | Phase::Pausing { .. } => {
                assert!(self.queue.contains(id), "a waiting request is in the queue");
            }
        }
        let assigned = request.assigned.unwrap_or(request.received);
        let first_token = request.first_token.unwrap_or(assigned);
        assert!(
            request.received <= assigned && assigned <= first_token && first_token <= self.now,
            "received <= assigned <= first token <= now"
        );
        assert!(
            request.assigned.is_some() || request.queue_deadline > self.now,
            "a request that has waited too long is gone"
        );
        assert!(
            request.engine_deaths < self.policy.engine_deaths_max,
            "a request that killed too many engines is gone"
        );
    }

    fn check_instances(&self) {
        let mut lingering = 0;
        for place in &self.instances {
            let holds_work = matches!(
                place.state,
                State::Ready { .. } | State::Draining(_) | State::Terminating(_)
            );
            assert!(
                place.is_empty() || (holds_work && place.link_open),
                "work is only where a link is open and the engine was Ready"
            );
            assert!(
                place.seats.is_empty() || place.in_flight() <= place.slots(),
                "an instance's in-flight is no more than its slots"
            );
            if let Some(alone) = place.exclusive {
                let others = place
                    .seats
                    .keys()
                    .chain(place.measuring.keys())
                    .any(|id| *id != alone);
                assert!(!others, "a request that runs alone has no company");
            }
            for (id, seat) in &place.seats {
                lingering += usize::from(seat.cancelled);
                let live = self.requests.get(id).and_then(Request::seat) == Some(place.id);
                let ended = self.lingering.get(id) == Some(&place.id);
                assert!(
                    if seat.cancelled {
                        ended && !live
                    } else {
                        live && !ended
                    },
                    "a seat is a live request's, or waits for the answer to a cancel"
                );
            }
        }
        assert_eq!(
            lingering,
            self.lingering.len(),
            "each unanswered cancel has one seat"
        );
    }

    fn check_deadlines(&self) {
        let requests = self.requests.values();
        let requests =
            requests.map(|request| (Owner::Request(request.id), request.next_deadline()));
        let instances = self.instances.iter().map(|place| {
            let at = place.next_deadline(&self.policy, self.now);
            (Owner::Instance(place.id), at)
        });
        let mut earliest = self.timers.get(Owner::Shutdown);
        let mut armed = usize::from(earliest.is_some());
        for (owner, at) in requests.chain(instances) {
            assert_eq!(
                self.timers.get(owner),
                at,
                "the deadline of {owner:?} is armed"
            );
            armed += usize::from(at.is_some());
            earliest = [earliest, at].into_iter().flatten().min();
        }
        assert_eq!(
            self.timers.len(),
            armed,
            "no deadline is armed for what is gone"
        );
        assert_eq!(
            self.next_deadline(),
            earliest,
            "next_deadline is the minimum of all deadlines"
        );
    }
}
