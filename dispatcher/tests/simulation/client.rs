//! Clients: what they ask for, when, and what their relays hold at the end.

use dispatcher::machine::event::{Arrival, CancelCause, Fingerprint, KeyId, ModelHash, Priority};
use dispatcher::machine::{Failure, Outcome, Tick};
use proto::{Attempt, RequestId};

use crate::fault::Dice;
use crate::world::{CONTEXT_TOKENS, Happening, World};

/// Added to a request's number when its client sends it again.
const RETRIES_FROM: u64 = 1_000;

/// What a client wants, and what its relay has.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) arrival: Arrival,
    pub(crate) prompt_tokens: u32,
    /// Where the model ends the stream by itself.
    pub(crate) natural_end: u32,
    pub(crate) poison: bool,
    pub(crate) bad_template: bool,
    pub(crate) attempt: Attempt,
    pub(crate) tokens: Vec<u64>,
    pub(crate) ended: Option<Outcome>,
    /// The relay took the end together with the last token.
    pub(crate) end_relayed: bool,
}

impl Client {
    pub(crate) fn new(arrival: Arrival, dice: &mut Dice, poison: bool) -> Self {
        Self {
            prompt_tokens: u32::try_from(arrival.bytes / 4).unwrap(),
            arrival,
            natural_end: dice.between_u32(1, 80),
            poison,
            bad_template: dice.chance(200),
            attempt: Attempt(0),
            tokens: Vec::new(),
            ended: None,
            end_relayed: false,
        }
    }
}

/// The token that a model has at this index of a stream.
pub(crate) fn token(request: RequestId, index: u32, model: u8) -> u64 {
    (request.0 << 32) | (u64::from(index) << 8) | u64::from(model)
}

pub(crate) fn model_hash(model: u8) -> ModelHash {
    ModelHash([model; 32])
}

impl World {
    pub(crate) fn plan_clients(&mut self) {
        let count = self.dice.between(1, 60);
        let keys = self.dice.between(1, 4);
        let span = self.span();
        for id in 1..=count {
            let request = RequestId(id);
            let prompt_tokens = if self.dice.chance(300) {
                CONTEXT_TOKENS + 5
            } else {
                self.dice.between_u32(1, 200)
            };
            let ids = self.dice.chance(2000);
            let bytes = u64::from(prompt_tokens) * 4;
            let priorities = [Priority::High, Priority::Normal, Priority::Low];
            let arrival = Arrival {
                request,
                received: Tick::ZERO,
                key: KeyId(self.dice.between(1, keys)),
                priority: priorities[usize::try_from(self.dice.between(0, 2)).unwrap()],
                fingerprint: Fingerprint(id),
                bytes,
                prompt_bytes: if ids { 0 } else { bytes },
                prompt_tokens: ids.then_some(prompt_tokens),
                max_tokens: self.dice.chance(5000).then(|| self.dice.between_u32(1, 60)),
                deadline: self
                    .dice
                    .chance(self.faults.deadline)
                    .then(|| self.dice.millis(1, 20_000)),
                affinity: self.dice.chance(5000).then(|| self.dice.between(0, 3)),
            };
            let poison = self.dice.chance(self.faults.poison);
            let client = Client::new(arrival, &mut self.dice, poison);
            self.clients.insert(request, client);
            let at = self.now.after(self.dice.millis(0, span));
            self.put(at, Happening::Arrive(request));
            if self.dice.chance(self.faults.cancel) {
                let at = at.after(self.dice.micros(0, 5_000_000));
                self.put(at, Happening::Leave(request, CancelCause::ClientDisconnect));
            } else if self.dice.chance(self.faults.slow_reader) {
                let at = at.after(self.dice.micros(10_000, 3_000_000));
                self.put(at, Happening::Leave(request, CancelCause::SlowReader));
            }
        }
    }

    pub(crate) fn end(&mut self, request: RequestId, outcome: Outcome) {
        let client = self.clients.get_mut(&request).unwrap();
        if matches!(outcome, Outcome::Completed { .. }) {
            let room = CONTEXT_TOKENS - client.prompt_tokens;
            let asked = client.arrival.max_tokens.unwrap_or(u32::MAX).min(room);
            let expected = client.natural_end.min(asked);
            let got = u32::try_from(client.tokens.len()).unwrap();
            // A new model may count one or two prompt tokens more, and then has less room.
            assert!(
                got == expected || (got < expected && expected == room),
                "a completed stream is whole: {got} of {expected} tokens"
            );
        }
        let died_of_it = matches!(outcome, Outcome::Failed(Failure::WorkerDied { .. }));
        if client.poison && request.0 < RETRIES_FROM && died_of_it {
            let mut arrival = client.arrival.clone();
            arrival.request = RequestId(request.0 + RETRIES_FROM);
            self.retry(arrival);
        }
        let client = self.clients.get_mut(&request).unwrap();
        client.ended.get_or_insert(outcome);
    }

    /// A client that was failed by its own prompt sends it again.
    pub(crate) fn retry(&mut self, arrival: Arrival) {
        let request = arrival.request;
        let client = Client::new(arrival, &mut self.dice, true);
        self.clients.insert(request, client);
        let after = self.dice.millis(0, 5_000);
        self.put_after(after, Happening::Arrive(request));
    }
}
