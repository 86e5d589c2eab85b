//! The workers as the world knows them: each place's process, link and last words.

use std::collections::VecDeque;
use std::time::Duration;

use proto::to_dispatcher::Ready;
use proto::{Generation, InstanceId};

use crate::devices::Device;
use crate::effect::RATE_WINDOW;
use crate::input::Input;
use crate::link::{self, Expectations, LinkCommand, Token};
use crate::machine::Tick;
use crate::machine::event::{ModelHash, WorkerFacts};
use crate::memory::footprint::Footprint;
use crate::process::{Child, Processes, WorkerCommand};

/// One numbered place and what fills it now.
#[derive(Debug, Default)]
pub(crate) struct Place {
    pub(crate) generation: Generation,
    pub(crate) child: Option<Child>,
    pub(crate) link: Option<link::Handle>,
    pub(crate) ready: Option<Box<Ready>>,
    pub(crate) build: Option<String>,
    pub(crate) steps: u64,
    pub(crate) live_slots: u32,
    pub(crate) longest_step: Duration,
    pub(crate) footprint: Option<Footprint>,
    /// The device that its worker was given.
    pub(crate) device: Option<Device>,
    /// How far its worker has come in what it does before it is ready.
    pub(crate) progress_permille: u32,
    rates: VecDeque<RateSample>,
    tail: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
struct RateSample {
    at: Tick,
    tokens: u64,
    batch_sum: u64,
    /// Steps that decoded or prefilled, as frames told them.
    steps: u64,
    /// As the engine counted them.
    counted: u64,
    kv_tokens: u64,
    busy: Duration,
}

/// What a place did over the last seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    pub(crate) tokens_per_s: f64,
    /// As the engine counted them.
    pub(crate) steps_per_s: f64,
    pub(crate) batch_mean: f64,
    /// Cached tokens that rows read.
    pub(crate) kv_tokens_per_s: f64,
    /// The share of time that a step was running.
    pub(crate) busy: f64,
}

/// What is known of a worker that died.
#[derive(Clone, Debug, Default)]
pub(crate) struct PostMortem {
    pub(crate) engine: Option<String>,
    pub(crate) model: Option<String>,
    pub(crate) tail: Vec<String>,
}

impl Place {
    /// The machine's share of what a worker says when it is ready.
    pub(crate) fn facts(ready: &Ready) -> WorkerFacts {
        WorkerFacts {
            slots: ready.slots,
            context_tokens: ready.context_tokens,
            longest_token_bytes: ready.longest_token_bytes,
            model: ModelHash(ready.model.hash),
            start_up: Duration::from(ready.load) + Duration::from(ready.warm_up),
        }
    }

    pub(crate) fn rates(&self, now: Tick) -> Rates {
        let mut tokens = 0;
        let mut batch_sum = 0;
        let mut steps = 0;
        let mut counted = 0;
        let mut kv_tokens = 0;
        let mut busy = Duration::ZERO;
        for sample in self
            .rates
            .iter()
            .filter(|sample| now.since(sample.at) <= RATE_WINDOW)
        {
            tokens += sample.tokens;
            batch_sum += sample.batch_sum;
            steps += sample.steps;
            counted += sample.counted;
            kv_tokens += sample.kv_tokens;
            busy += sample.busy;
        }
        let window = RATE_WINDOW.as_secs_f64();
        Rates {
            tokens_per_s: tokens as f64 / window,
            steps_per_s: counted as f64 / window,
            kv_tokens_per_s: kv_tokens as f64 / window,
            busy: busy.as_secs_f64() / window,
            batch_mean: if steps == 0 {
                0.0
            } else {
                batch_sum as f64 / steps as f64
            },
        }
    }
}

/// All places of the pool, and the means to fill them.
pub(crate) struct Fleet {
    places: Vec<Place>,
    command: Box<CommandOf>,
    expectations: Expectations,
    processes: Processes,
}

/// How the worker of a place is started.
pub(crate) type CommandOf = dyn Fn(InstanceId, Generation) -> WorkerCommand + Send;

impl Fleet {
    pub(crate) fn new(
        instances: u32,
        command: Box<CommandOf>,
        expectations: Expectations,
        processes: Processes,
    ) -> Self {
        let places = (0..instances).map(|_| Place::default()).collect();
        Self {
            places,
            command,
            expectations,
            processes,
        }
    }

    /// Workers are started by `command` from now on.
    pub(crate) fn set_command(&mut self, command: Box<CommandOf>) {
        self.command = command;
    }

    pub(crate) fn places(&self) -> &[Place] {
        &self.places
    }

    pub(crate) fn places_mut(&mut self) -> &mut [Place] {
        &mut self.places
    }

    /// The place, if `generation` is the one that fills it.
    pub(crate) fn current(
        &mut self,
        instance: InstanceId,
        generation: Generation,
    ) -> Option<&mut Place> {
        self.places
            .get_mut(instance.0 as usize)
            .filter(|place| place.generation == generation)
    }

    /// Its worker has come so far in what it does before it is ready.
    pub(crate) fn advanced(&mut self, instance: InstanceId, generation: Generation, permille: u32) {
        if let Some(place) = self.current(instance, generation) {
            place.progress_permille = permille;
        }
    }

    fn find(&self, instance: InstanceId, generation: Generation) -> Option<&Place> {
        self.places
            .get(instance.0 as usize)
            .filter(|place| place.generation == generation)
    }

    /// Fills a place with a new process. `Err(true)`: it can never work.
    ///
    /// Called on the driver's own thread: a worker dies with the thread that spawned it.
    pub(crate) fn spawn(
        &mut self,
        instance: InstanceId,
        generation: Generation,
    ) -> Result<(), bool> {
        let command = (self.command)(instance, generation);
        let launch = command.launch();
        let Some(place) = self.places.get_mut(instance.0 as usize) else {
            return Err(true);
        };
        *place = Place {
            generation,
            device: command.device,
            ..Place::default()
        };
        let token = match Token::generate() {
            Ok(token) => token,
            Err(error) => {
                tracing::error!(%error, "failed to draw a token for a worker");
                place.tail = vec![error.to_string()];
                return Err(false);
            }
        };
        let bytes = *token.as_bytes();
        let expectations = &self.expectations;
        let register = |pid| expectations.expect(instance, generation, pid, token);
        match self
            .processes
            .spawn(instance, generation, &launch, &bytes, register)
        {
            Ok(child) => {
                tracing::info!(%instance, %generation, pid = child.pid(), "worker spawned");
                place.child = Some(child);
                Ok(())
            }
            Err(error) => {
                tracing::error!(%instance, %generation, %error, "failed to spawn a worker");
                place.tail = vec![error.to_string()];
                Err(error.permanent())
            }
        }
    }

    pub(crate) fn terminate(&self, instance: InstanceId, generation: Generation) {
        if let Some(child) = self
            .find(instance, generation)
            .and_then(|place| place.child.as_ref())
        {
            // A process that is gone already needs no signal.
            let _ = child.terminate();
        }
    }

    pub(crate) fn kill(&self, instance: InstanceId, generation: Generation) {
        if let Some(child) = self
            .find(instance, generation)
            .and_then(|place| place.child.as_ref())
        {
            let _ = child.kill();
        }
    }

    /// `false`: there is no link any more.
    pub(crate) fn send(
        &self,
        instance: InstanceId,
        generation: Generation,
        command: LinkCommand,
    ) -> bool {
        self.find(instance, generation)
            .and_then(|place| place.link.as_ref())
            .is_some_and(|link| link.send(command))
    }

    pub(crate) fn context_tokens(&self, instance: InstanceId, generation: Generation) -> u32 {
        self.find(instance, generation)
            .and_then(|place| place.ready.as_ref())
            .map_or(0, |ready| ready.context_tokens)
    }

    /// Books an `Input::Progress`.
    pub(crate) fn progress(&mut self, input: &Input, now: Tick) {
        let &Input::Progress {
            instance,
            generation,
            steps,
            live_slots,
            longest_step,
            tokens,
            batch_sum,
            steps_done,
            kv_tokens,
            busy,
            ..
        } = input
        else {
            return;
        };
        let Some(place) = self.current(instance, generation) else {
            return;
        };
        let counted = steps.saturating_sub(place.steps);
        place.steps = steps;
        place.live_slots = live_slots;
        place.longest_step = longest_step;
        if steps_done > 0 || counted > 0 {
            place.rates.push_back(RateSample {
                at: now,
                tokens,
                batch_sum,
                steps: steps_done,
                counted,
                kv_tokens,
                busy,
            });
        }
        while place
            .rates
            .front()
            .is_some_and(|sample| now.since(sample.at) > RATE_WINDOW)
        {
            place.rates.pop_front();
        }
    }

    pub(crate) fn exited(
        &mut self,
        instance: InstanceId,
        generation: Generation,
        tail: Vec<String>,
    ) {
        self.expectations.forget(instance, generation);
        if let Some(place) = self.current(instance, generation) {
            place.child = None;
            place.footprint = None;
            place.tail = tail;
        }
    }

    /// The last line that the newest worker of any place said, for a start that failed everywhere.
    pub(crate) fn last_words(&self) -> Option<String> {
        self.places
            .iter()
            .rev()
            .find_map(|place| place.tail.last().cloned())
    }

    pub(crate) fn post_mortem(&self, instance: InstanceId, generation: Generation) -> PostMortem {
        self.find(instance, generation)
            .map_or_else(PostMortem::default, |place| PostMortem {
                engine: place.ready.as_ref().map(|ready| ready.engine.clone()),
                model: place.ready.as_ref().map(|ready| ready.model.name.clone()),
                tail: place.tail.clone(),
            })
    }
}
