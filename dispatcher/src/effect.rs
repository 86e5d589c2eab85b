//! Carries out each action of the machine, and turns what comes back into its events.

use std::collections::VecDeque;
use std::time::Duration;

use proto::to_dispatcher::PromptError;
use proto::{Attempt, Generation, InstanceId, RequestId};
use tokio::sync::mpsc;

use crate::budget::Budget;
use crate::bus::{Learned, usage::Known};
use crate::fleet::{Fleet, Place};
use crate::gateway::{Command, Submission};
use crate::input::{Input, LinkEnd};
use crate::ledger::{Assignment, Ledger};
use crate::link::LinkCommand;
use crate::machine::action::Action;
use crate::machine::event::{CancelCause, Event, TokenisedOutcome};
use crate::machine::measurement::Measurement;
use crate::machine::snapshot::Snapshot;
use crate::machine::{Outcome, Policy, Tick};
use crate::reconfigure::Reconfigure;
use crate::record::Recorder;
use crate::run::worker_command;
use crate::view::View;
use crate::{relay, sharing, view};

/// All that the machine acts on: the fleet of workers, the ledger of requests, the records.
pub(crate) struct World {
    fleet: Fleet,
    ledger: Ledger,
    recorder: Recorder,
    budget: Budget,
    reconfigure: Reconfigure,
    bus: Bus,
    /// Times that hold from now on.
    policy: Option<Policy>,
    /// What an action gave at once; handled before the next input.
    events: VecDeque<Event>,
    served_model: String,
    ever_ready: bool,
    stopped: bool,
}

/// What is known of the memory bus, and what serving teaches.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bus {
    pub(crate) known: Known,
    pub(crate) learned: Learned,
}

impl World {
    pub(crate) fn new(
        fleet: Fleet,
        ledger: Ledger,
        recorder: Recorder,
        budget: Budget,
        reconfigure: Reconfigure,
        bus: Bus,
        served_model: String,
    ) -> Self {
        Self {
            fleet,
            ledger,
            recorder,
            budget,
            reconfigure,
            bus,
            policy: None,
            events: VecDeque::new(),
            served_model,
            ever_ready: false,
            stopped: false,
        }
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stopped
    }

    /// Why nothing can ever start, where every instance failed for good and none ever served.
    pub(crate) fn hopeless(&self, snapshot: &Snapshot) -> Option<String> {
        let parked = snapshot
            .instances
            .iter()
            .all(|place| place.state == "quarantined" && place.next_try_in.is_none());
        if self.ever_ready || !parked {
            return None;
        }
        let reason = snapshot
            .instances
            .iter()
            .find_map(|place| place.reason.clone());
        let words = [self.fleet.last_words(), reason];
        Some(
            words
                .into_iter()
                .flatten()
                .next()
                .unwrap_or_else(|| "no cause is known".to_owned()),
        )
    }

    pub(crate) fn take_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// What the front asks for, as an event.
    pub(crate) fn command(&mut self, command: Command) -> Option<Event> {
        match command {
            Command::Submit {
                request,
                submission,
                relay,
            } => Some(self.submit(request, submission, relay)),
            Command::Cancel { request, cause } => Some(Event::ClientGone { request, cause }),
            Command::Reload => {
                self.reconfigure.begin();
                None
            }
            Command::Drain => Some(Event::Drain),
        }
    }

    fn submit(
        &mut self,
        request: RequestId,
        submission: Box<Submission>,
        relay: relay::Sender,
    ) -> Event {
        Event::Arrived(Box::new(self.ledger.admit(request, submission, relay)))
    }

    /// Books what came from a link, a process or a signal, and says it in the machine's words.
    pub(crate) fn observe(&mut self, input: Input, now: Tick) -> Option<Event> {
        Some(match input {
            Input::Connected {
                instance,
                generation,
                handle,
                build,
            } => {
                let place = self.fleet.current(instance, generation)?;
                place.link = Some(handle);
                place.build = Some(build);
                Event::Connected {
                    instance,
                    generation,
                }
            }
            Input::Loading {
                instance,
                generation,
                permille,
            } => {
                self.fleet.advanced(instance, generation, permille);
                Event::LoadProgress {
                    instance,
                    generation,
                    permille,
                }
            }
            Input::Warming {
                instance,
                generation,
                done,
                of,
            } => {
                let permille = u64::from(done) * 1000 / u64::from(of.max(1));
                let permille = u32::try_from(permille).unwrap_or(1000);
                self.fleet.advanced(instance, generation, permille);
                Event::WarmProgress {
                    instance,
                    generation,
                    done,
                    of,
                }
            }
            Input::Ready {
                instance,
                generation,
                ready,
            } => {
                let place = self.fleet.current(instance, generation)?;
                if let Some(device) = place
                    .device
                    .as_ref()
                    .filter(|_| ready.device.contains("CPU"))
                {
                    tracing::warn!(
                        %instance,
                        "was given the device {device} and computes on {}: the worker's build has no engine for it",
                        ready.device
                    );
                }
                let facts = Place::facts(&ready);
                tracing::info!(
                    %instance, %generation,
                    device = ready.device, slots = ready.slots, model = ready.model.name,
                    "worker ready on {}", ready.device
                );
                let device = ready.device.clone();
                place.ready = Some(ready);
                if !std::mem::replace(&mut self.ever_ready, true)
                    && let Some(remark) = sharing::remark(self.fleet.places().len(), &device)
                {
                    tracing::warn!("{remark}");
                }
                Event::Ready {
                    instance,
                    generation,
                    facts,
                }
            }
            Input::Tokenised {
                request,
                instance,
                generation,
                outcome,
            } => {
                let outcome = match outcome {
                    Ok(tokenised) => {
                        let count = u32::try_from(tokenised.ids.len()).unwrap_or(u32::MAX);
                        self.ledger.tokenised(request, tokenised.ids);
                        TokenisedOutcome::Tokens(count)
                    }
                    Err(error) => tokenise_failure(error),
                };
                Event::Tokenised {
                    request,
                    instance,
                    generation,
                    outcome,
                }
            }
            Input::Started {
                request,
                attempt,
                cached_tokens,
            } => {
                if let Some(relay) = self.ledger.relay(request) {
                    relay.started(attempt, cached_tokens);
                }
                Event::Started {
                    request,
                    attempt,
                    cached_tokens,
                }
            }
            Input::FirstToken { request, attempt } => Event::FirstToken { request, attempt },
            Input::Finished {
                request,
                attempt,
                reason,
                tokens,
            } => Event::Finished {
                request,
                attempt,
                reason,
                tokens,
            },
            Input::CancelDone { request, attempt } => Event::CancelDone { request, attempt },
            Input::RequestFailed {
                request,
                attempt,
                error,
            } => Event::RequestFailed {
                request,
                attempt,
                error,
            },
            Input::SlowReader { request } => Event::ClientGone {
                request,
                cause: CancelCause::SlowReader,
            },
            Input::Progress {
                instance,
                generation,
                pulse,
                longest_step,
                ..
            } => {
                self.fleet.progress(&input, now);
                Event::Progress {
                    instance,
                    generation,
                    pulse,
                    longest_step,
                }
            }
            Input::Drained {
                instance,
                generation,
            } => Event::Drained {
                instance,
                generation,
            },
            Input::AttemptEnded {
                instance,
                generation,
                accepted,
                cause,
            } => {
                if let LinkEnd::Protocol(words) = &cause {
                    tracing::error!(%instance, %generation, error = %words, "worker broke the protocol");
                }
                if let Some(place) = self.fleet.current(instance, generation) {
                    place.link = None;
                }
                Event::AttemptEnded {
                    instance,
                    generation,
                    accepted,
                }
            }
            Input::Stale { count } => {
                self.recorder.stale(count);
                return None;
            }
            Input::Exited {
                instance,
                generation,
                status,
                tail,
            } => {
                self.fleet.exited(instance, generation, tail);
                Event::Exited {
                    instance,
                    generation,
                    status,
                }
            }
            Input::Drain => Event::Drain,
            Input::Stop => Event::Stop,
            Input::Reload => {
                self.reconfigure.begin();
                return None;
            }
            Input::Reloaded(read) => {
                let count = self.reconfigure.count;
                let config = self.reconfigure.end(*read);
                if self.reconfigure.count > count {
                    self.recorder.event(match &config {
                        Some(_) => "the configuration was read again".to_owned(),
                        None => "a new configuration was refused".to_owned(),
                    });
                }
                let config = config?;
                let socket = self.reconfigure.socket.clone();
                self.fleet.set_command(worker_command(&config, socket));
                self.budget.replan(config.plan.as_ref());
                self.bus.known.weights = config.weights;
                self.bus.known.threads = config.threads;
                self.policy = Some(config.policy());
                Event::Reload
            }
            Input::Memory(pressure) => {
                self.budget.pressed(pressure);
                Event::Memory(pressure)
            }
            Input::BusMeasured(measurement) => {
                self.bus.known.measured = Some(*measurement);
                return None;
            }
            Input::Measured(report) => {
                self.budget.measured(*report, self.fleet.places_mut());
                return None;
            }
        })
    }

    /// Carries one action out. It never waits.
    pub(crate) fn act(&mut self, action: Action, now: Tick) {
        match action {
            Action::Spawn {
                instance,
                generation,
            } => {
                if let Err(words) = self.budget.room(instance, self.fleet.places()) {
                    tracing::info!(%instance, %generation, "a worker waits for memory: {words}");
                    self.budget.hold(instance, generation, now);
                } else {
                    self.start(instance, generation);
                }
            }
            Action::Terminate {
                instance,
                generation,
            } => {
                self.give_up(instance, generation);
                self.fleet.terminate(instance, generation);
            }
            Action::Kill {
                instance,
                generation,
            } => {
                self.give_up(instance, generation);
                self.fleet.kill(instance, generation);
                self.fleet.send(instance, generation, LinkCommand::Close);
            }
            Action::CloseLink {
                instance,
                generation,
            } => {
                self.fleet.send(instance, generation, LinkCommand::Close);
            }
            Action::SendDrain {
                instance,
                generation,
            } => {
                self.fleet.send(instance, generation, LinkCommand::Drain);
            }
            Action::SendTokenise {
                request,
                instance,
                generation,
            } => {
                self.tokenise(request, instance, generation);
            }
            Action::SendGenerate {
                request,
                attempt,
                instance,
                generation,
            } => {
                self.generate(request, attempt, instance, generation, now);
            }
            Action::SendCancel {
                request,
                attempt,
                instance,
                generation,
            } => {
                self.fleet.send(
                    instance,
                    generation,
                    LinkCommand::Cancel { request, attempt },
                );
            }
            Action::End { request, outcome } => self.end(request, outcome),
            Action::Record(measurement) => self.record(measurement),
            Action::Stopped => self.stopped = true,
        }
    }

    /// Times that a reload has changed, once.
    pub(crate) fn take_policy(&mut self) -> Option<Policy> {
        self.policy.take()
    }

    fn start(&mut self, instance: InstanceId, generation: Generation) {
        let event = match self.fleet.spawn(instance, generation) {
            Ok(()) => Event::Spawned {
                instance,
                generation,
            },
            Err(permanent) => Event::SpawnFailed {
                instance,
                generation,
                permanent,
            },
        };
        self.events.push_back(event);
    }

    /// Starts that found no memory free look again once; what still does not fit has failed.
    pub(crate) fn retry_held(&mut self, now: Tick) {
        while let Some((instance, generation)) = self.budget.due(now) {
            match self.budget.room(instance, self.fleet.places()) {
                Ok(()) => self.start(instance, generation),
                Err(words) => {
                    tracing::error!(%instance, %generation, "a worker was not started: {words}");
                    self.no_process(instance, generation);
                }
            }
        }
    }

    /// A start that waits for memory is not wanted any more.
    fn give_up(&mut self, instance: InstanceId, generation: Generation) {
        if self.budget.give_up(instance, generation) {
            self.no_process(instance, generation);
        }
    }

    fn no_process(&mut self, instance: InstanceId, generation: Generation) {
        self.events.push_back(Event::SpawnFailed {
            instance,
            generation,
            permanent: false,
        });
    }

    fn tokenise(&mut self, request: RequestId, instance: InstanceId, generation: Generation) {
        let sent = self.ledger.get(request).is_some_and(|entry| {
            let input = entry.submission.prompt.clone();
            self.fleet.send(
                instance,
                generation,
                LinkCommand::Tokenise { request, input },
            )
        });
        if !sent {
            self.events.push_back(Event::Tokenised {
                request,
                instance,
                generation,
                outcome: TokenisedOutcome::Unavailable,
            });
        }
    }

    fn generate(
        &mut self,
        request: RequestId,
        attempt: Attempt,
        instance: InstanceId,
        generation: Generation,
        now: Tick,
    ) {
        let context_tokens = self.fleet.context_tokens(instance, generation);
        match self
            .ledger
            .assign(request, attempt, instance, context_tokens, now)
        {
            Assignment::Send(generate, relay) => {
                // A link that is gone ends the attempt by its own AttemptEnded.
                self.fleet.send(
                    instance,
                    generation,
                    LinkCommand::Generate { generate, relay },
                );
            }
            Assignment::Complete(relay) => {
                let reason = proto::FinishReason::Length;
                relay.end(Outcome::Completed { reason });
                let tokens = relay.tokens();
                self.events.push_back(Event::Finished {
                    request,
                    attempt,
                    reason,
                    tokens,
                });
            }
            Assignment::Missing => {
                let words = "the dispatcher lost this request's prompt".to_owned();
                tracing::error!(%request, "assigned a request without prompt ids");
                let error = crate::machine::event::AttemptError::Engine(words);
                self.events.push_back(Event::RequestFailed {
                    request,
                    attempt,
                    error,
                });
            }
        }
    }

    fn end(&mut self, request: RequestId, outcome: Outcome) {
        if let Some(entry) = self.ledger.remove(request) {
            entry.relay.end(outcome);
        }
    }

    fn record(&mut self, measurement: Measurement) {
        if let Measurement::WorkerExit {
            instance,
            generation,
            batch,
            ..
        } = &measurement
        {
            let post_mortem = self.fleet.post_mortem(*instance, *generation);
            let fingerprints = batch
                .iter()
                .filter_map(|request| self.ledger.get(*request))
                .map(|entry| format!("{:016x}", entry.fingerprint.0))
                .collect();
            self.recorder
                .worker_exit(&measurement, post_mortem, fingerprints);
        } else {
            self.recorder.record(&measurement);
        }
    }

    /// How things stand, from the machine's snapshot and what the world knows beside it.
    pub(crate) fn view(&self, snapshot: &Snapshot, now: Tick) -> View {
        let beside = view::Beside {
            fleet: &self.fleet,
            memory: self.budget.view(),
            reconfigure: &self.reconfigure,
            bus: &self.bus,
            events: self.recorder.events(),
            served_model: &self.served_model,
        };
        view::compose(snapshot, beside, now)
    }
}

fn tokenise_failure(error: PromptError) -> TokenisedOutcome {
    match error {
        PromptError::Busy => TokenisedOutcome::Unavailable,
        // The next worker has the same template and would take as long.
        PromptError::TimedOut => TokenisedOutcome::Rejected(
            "rendering and tokenising the messages took longer than 2 s".to_owned(),
        ),
        PromptError::Template(words) => {
            TokenisedOutcome::Rejected(format!("the chat template refused the messages: {words}"))
        }
        PromptError::UnknownToken(id) => {
            TokenisedOutcome::Rejected(format!("token id {id} is not in the vocabulary"))
        }
        PromptError::Empty => TokenisedOutcome::Rejected("the prompt is empty".to_owned()),
    }
}

/// How long the rates in the view look back.
pub(crate) const RATE_WINDOW: Duration = Duration::from_secs(5);

/// Inputs that may wait for the driver loop; links wait beyond it.
pub(crate) const INPUTS_MAX: usize = 8192;

/// The inputs' channel.
pub(crate) fn inputs() -> (mpsc::Sender<Input>, mpsc::Receiver<Input>) {
    mpsc::channel(INPUTS_MAX)
}
