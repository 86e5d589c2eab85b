//! Waiting requests to prompt threads and slots.

use proto::RequestId;

use super::Dispatch;
use crate::machine::action::{Action, Denied, Failure, Outcome};
use crate::machine::admission;
use crate::machine::event::{MemoryPressure, ModelHash};
use crate::machine::instance::{Instance, Seat};
use crate::machine::queue::Place;
use crate::machine::request::{Phase, Request};
use crate::machine::schedule::{self, Candidate};

/// Prompts that one worker is asked to count at a time: half of what its prompt thread lets wait.
const MEASURING_MAX: usize = 8;

impl Dispatch {
    /// Gives slots away: first to what had one before, then by the keys' turns.
    pub(super) fn place_waiting(&mut self) {
        if !self
            .instances
            .iter()
            .any(|place| place.takes_work(&self.policy, self.now))
        {
            return;
        }
        if self.queue.has_again() {
            let again: Vec<_> = self.queue.again().collect();
            for id in again {
                self.place_again(id);
            }
        }
        if self.memory != MemoryPressure::None {
            return;
        }
        while self.has_open_slot() {
            let Some(id) = self.queue.next(self.now) else {
                return;
            };
            if self.refuse_if_poisonous(id) {
                continue;
            }
            let Some(request) = self.requests.get(&id) else {
                return;
            };
            match self.choose(request, |model| request.is_measured_for(model)) {
                Some(index) => self.assign(id, index),
                // Its ids are another model's: what is free must count it anew.
                None => match self.choose_prompt_thread() {
                    Some(index) => self.measure(id, index),
                    None => return,
                },
            }
        }
    }

    /// Gives the prompt threads their next prompts.
    pub(super) fn measure_waiting(&mut self) {
        while self.queue.has_unmeasured() {
            let Some(index) = self.choose_prompt_thread() else {
                return;
            };
            let Some(id) = self.queue.next_unmeasured() else {
                return;
            };
            if !self.refuse_if_poisonous(id) {
                self.measure(id, index);
            }
        }
    }

    fn place_again(&mut self, id: RequestId) {
        if self.refuse_if_poisonous(id) {
            return;
        }
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        // A suspect that never had a slot comes first, but it is new work all the same.
        let ticket = request.ticket;
        let held_back = self.memory != MemoryPressure::None || self.queue.is_capped(ticket.key);
        if held_back && !request.has_started() {
            return;
        }
        if !request.alone && self.reserved.is_some_and(|(_, reserved)| reserved == id) {
            self.reserved = None;
        }
        if request.tokens > 0 && self.is_complete(request) {
            let reason = proto::FinishReason::Length;
            self.end(id, Outcome::Completed { reason });
        } else if request.alone {
            self.place_alone(id);
        } else if request.prompt_tokens.is_some()
            && let Some(index) = self.choose(request, |model| request.is_measured_for(model))
        {
            self.assign(id, index);
        } else if request.bound_to().is_none()
            && (request.prompt_tokens.is_none() || self.has_open_slot())
            && let Some(index) = self.choose_prompt_thread()
        {
            self.measure(id, index);
        }
    }

    /// Nothing is left to be produced: its last worker died between the last token and its end.
    fn is_complete(&self, request: &Request) -> bool {
        let model = request.model;
        let context = self.instances.iter().filter_map(|place| place.facts);
        context
            .filter(|facts| Some(facts.model) == model)
            .map(|facts| facts.context_tokens)
            .max()
            .is_some_and(|context| request.tokens_left(context) == 0)
    }

    /// An instance without any other request, or one that is emptied for it: one at a time, and
    /// never the last that serves the others.
    fn place_alone(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(&id) else {
            return;
        };
        let responsive = self.instances.iter();
        let responsive = responsive.filter(|place| place.is_responsive(&self.policy, self.now));
        let taken = self
            .instances
            .iter()
            .filter(|place| place.exclusive.is_some())
            .count();
        let reserved_by_other = self.reserved.is_some_and(|(_, reserved)| reserved != id);
        let allowed = responsive.count().saturating_sub(1).max(1);
        if taken + usize::from(reserved_by_other) >= allowed {
            return;
        }
        let bound_to = request.bound_to();
        let able = |place: &Instance| {
            place.takes_work(&self.policy, self.now)
                && place
                    .facts
                    .is_some_and(|facts| bound_to.is_none_or(|model| model == facts.model))
                && self
                    .reserved
                    .is_none_or(|(instance, reserved)| reserved == id || instance != place.id)
        };
        let fewest = self
            .instances
            .iter()
            .enumerate()
            .filter(|(_, place)| able(place))
            .min_by_key(|(_, place)| {
                (!place.is_empty(), place.seats.len() + place.measuring.len())
            });
        let Some((index, place)) = fewest else {
            return;
        };
        if !place.is_empty() {
            if self.reserved.is_none() {
                self.reserved = Some((place.id, id));
            }
            return;
        }
        if self.reserved.is_some_and(|(_, reserved)| reserved == id) {
            self.reserved = None;
        }
        let measured = request.prompt_tokens.is_some()
            && place
                .facts
                .is_some_and(|facts| request.is_measured_for(facts.model));
        self.instances[index].exclusive = Some(id);
        if measured {
            self.assign(id, index);
        } else {
            self.measure(id, index);
        }
    }

    /// Another request with this prompt killed its engines meanwhile.
    fn refuse_if_poisonous(&mut self, id: RequestId) -> bool {
        let Some(request) = self.requests.get(&id) else {
            return false;
        };
        let Some(retry_after) = self.quarantine.left(request.fingerprint, self.now) else {
            return false;
        };
        let (oom, deaths) = (request.oom, request.engine_deaths);
        let outcome = if request.has_started() {
            Outcome::Failed(Failure::WorkerDied { oom, deaths })
        } else {
            Outcome::Denied(Denied::Quarantined { retry_after })
        };
        self.end(id, outcome);
        true
    }

    fn is_open(&self, place: &Instance) -> bool {
        place.takes_work(&self.policy, self.now)
            && self
                .reserved
                .is_none_or(|(instance, _)| instance != place.id)
    }

    fn has_open_slot(&self) -> bool {
        let mut places = self.instances.iter();
        places.any(|place| place.in_flight() < place.slots() && self.is_open(place))
    }

    fn choose(&self, request: &Request, fits: impl Fn(ModelHash) -> bool) -> Option<usize> {
        let bound_to = request.bound_to();
        let ready = self.instances.iter().filter(|place| place.is_ready());
        let candidates: Vec<_> = ready
            .map(|place| Candidate {
                instance: place.id,
                in_flight: place.in_flight(),
                slots: place.slots(),
                open: place.in_flight() < place.slots()
                    && self.is_open(place)
                    && place.facts.is_some_and(|facts| {
                        fits(facts.model) && bound_to.is_none_or(|model| model == facts.model)
                    }),
            })
            .collect();
        let affine = request
            .affinity
            .and_then(|prefix| self.prefixes.holder(prefix))
            .filter(|(instance, generation)| {
                self.instances[instance.0 as usize].generation == *generation
            })
            .map(|(instance, _)| instance);
        schedule::choose(&candidates, affine, self.policy.affinity_load_percent)
            .map(|instance| instance.0 as usize)
    }

    /// The worker with the fewest prompts to count, one with a free slot first.
    fn choose_prompt_thread(&self) -> Option<usize> {
        let places = self.instances.iter().enumerate();
        places
            .filter(|(_, place)| place.measuring.len() < MEASURING_MAX && self.is_open(place))
            .min_by_key(|(_, place)| (place.in_flight() >= place.slots(), place.measuring.len()))
            .map(|(index, _)| index)
    }

    fn measure(&mut self, id: RequestId, index: usize) {
        let place = &mut self.instances[index];
        let (instance, generation) = (place.id, place.generation);
        place.measuring.insert(id, self.now);
        if let Some(request) = self.requests.get_mut(&id) {
            request.phase = Phase::Measuring { instance };
            request.prompt_tokens = None;
        }
        self.queue.set_place(id, Place::Away);
        self.arm_request(id);
        self.act(Action::SendTokenise {
            request: id,
            instance,
            generation,
        });
    }

    fn assign(&mut self, id: RequestId, index: usize) {
        let place = &mut self.instances[index];
        let (instance, generation) = (place.id, place.generation);
        let (Some(facts), Some(request)) = (place.facts, self.requests.get_mut(&id)) else {
            return;
        };
        let prompt_tokens = request.prompt_tokens.unwrap_or(0);
        if let Err(denied) = admission::check_length(prompt_tokens, facts.context_tokens) {
            if place.exclusive == Some(id) {
                place.exclusive = None;
            }
            self.refuse(id, denied);
            return;
        }
        let first = !request.has_started();
        request.attempt = request.attempt.next();
        request.phase = Phase::Assigned { instance };
        request.model = Some(facts.model);
        request.instance = Some(instance);
        request.assigned.get_or_insert(self.now);
        let (attempt, ticket, affinity) = (request.attempt, request.ticket, request.affinity);
        place.seats.insert(
            id,
            Seat {
                attempt,
                cancelled: false,
            },
        );
        self.queue.remove(id);
        if first {
            self.queue.started(ticket.key, ticket.tokens);
        }
        if let Some(prefix) = affinity {
            self.prefixes.remember(prefix, instance, generation);
        }
        self.arm_request(id);
        self.act(Action::SendGenerate {
            request: id,
            attempt,
            instance,
            generation,
        });
    }
}
