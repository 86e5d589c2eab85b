//! The one loop: sources become events, the machine handles them, its actions are carried out, one timer is armed.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use crate::clock::Clock;
use crate::effect::World;
use crate::gateway::Command;
use crate::input::Input;
use crate::machine::{Dispatch, Event, Tick};
use crate::service::notifier::Notifier;
use crate::view::View;

/// Inputs and commands taken in one turn before actions are carried out.
const TURN_MAX: usize = 256;
/// A changed view is published at most this often.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(10);
/// The view is published at least this often, so that ages in it move.
const PUBLISH_IDLE: Duration = Duration::from_millis(250);

/// Owns the machine and all that it acts on.
pub(crate) struct Driver<'a> {
    clock: Clock,
    machine: Dispatch,
    world: World,
    inputs: mpsc::Receiver<Input>,
    commands: mpsc::Receiver<Command>,
    view: watch::Sender<Arc<View>>,
    /// Told by this loop alone, so that its watchdog watches this loop.
    notifier: &'a mut Notifier,
    published: Tick,
    dirty: bool,
    /// Why the run is hopeless, once it is.
    hopeless: Option<String>,
}

impl<'a> Driver<'a> {
    pub(crate) fn new(
        clock: Clock,
        machine: Dispatch,
        world: World,
        inputs: mpsc::Receiver<Input>,
        commands: mpsc::Receiver<Command>,
        view: watch::Sender<Arc<View>>,
        notifier: &'a mut Notifier,
    ) -> Self {
        let published = clock.now();
        Self {
            clock,
            machine,
            world,
            inputs,
            commands,
            view,
            notifier,
            published,
            dirty: true,
            hopeless: None,
        }
    }

    /// Runs until the machine says that all is ended. An error is why no instance could ever start.
    ///
    /// Must run on a thread that outlives the workers: they die with the thread that spawned them.
    pub(crate) async fn run(mut self) -> Result<(), String> {
        self.carry_out();
        self.publish();
        while !self.world.stopped() {
            let wake = self.next_wake();
            let mut first_input = None;
            let mut first_command = None;
            tokio::select! {
                Some(input) = self.inputs.recv() => first_input = Some(input),
                Some(command) = self.commands.recv() => first_command = Some(command),
                () = tokio::time::sleep_until(self.clock.instant(wake).into()) => {}
            }
            self.turn(first_input, first_command);
        }
        self.publish();
        self.hopeless.map_or(Ok(()), Err)
    }

    /// One turn: what is there is taken, the due timer is told, then actions are carried out.
    fn turn(&mut self, mut input: Option<Input>, mut command: Option<Command>) {
        for _ in 0..TURN_MAX {
            let mut idle = true;
            if let Some(input) = input.take().or_else(|| self.inputs.try_recv().ok()) {
                let now = self.clock.now();
                if matches!(input, Input::Reload) {
                    self.notifier.reload();
                }
                let event = self.world.observe(input, now);
                if let Some(policy) = self.world.take_policy() {
                    self.machine.retime(&policy);
                }
                if let Some(event) = event {
                    self.handle(event, now);
                }
                idle = false;
            }
            if let Some(command) = command.take().or_else(|| self.commands.try_recv().ok()) {
                let now = self.clock.now();
                if let Some(event) = self.world.command(command) {
                    self.handle(event, now);
                }
                idle = false;
            }
            if idle {
                break;
            }
        }
        let now = self.clock.now();
        if self
            .machine
            .next_deadline()
            .is_some_and(|deadline| deadline <= now)
        {
            self.handle(Event::DeadlineReached, now);
        }
        self.world.retry_held(now);
        self.carry_out();
        let since = now.since(self.published);
        if since >= PUBLISH_IDLE || (self.dirty && since >= PUBLISH_INTERVAL) {
            self.publish();
        }
    }

    fn handle(&mut self, event: Event, now: Tick) {
        self.machine.handle(event, now);
        self.dirty = true;
    }

    /// Carries out actions until there are none. An action that fails at once becomes an event.
    fn carry_out(&mut self) {
        loop {
            let now = self.clock.now();
            while let Some(action) = self.machine.poll_action() {
                self.world.act(action, now);
            }
            let Some(event) = self.world.take_event() else {
                return;
            };
            self.handle(event, now);
        }
    }

    fn next_wake(&self) -> Tick {
        let pause = if self.dirty {
            PUBLISH_INTERVAL
        } else {
            PUBLISH_IDLE
        };
        let publish = self.published.after(pause);
        self.machine
            .next_deadline()
            .map_or(publish, |deadline| deadline.min(publish))
    }

    fn publish(&mut self) {
        let now = self.clock.now();
        let snapshot = self.machine.snapshot(now);
        let view = Arc::new(self.world.view(&snapshot, now));
        self.notifier.observe(&view, now);
        self.view.send_replace(view);
        if self.hopeless.is_none() {
            self.hopeless = self.world.hopeless(&snapshot);
            if self.hopeless.is_some() {
                self.handle(Event::Stop, now);
                self.carry_out();
            }
        }
        self.published = now;
        self.dirty = false;
    }
}
