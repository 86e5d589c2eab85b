//! Inside a worker: a batch that steps, prompts that are counted, and what goes wrong meanwhile.

use dispatcher::machine::event::{AttemptError, ExitStatus, TokenisedOutcome};
use proto::{Attempt, FinishReason, RequestId};

use crate::client::token;
use crate::link::{Frame, Link, Row, RowEnd};
use crate::oracle::{Blame, WorkerId};
use crate::world::{CONTEXT_TOKENS, Happening, SIGKILL, World};

const SIGABRT: i32 = 6;
const SIGSEGV: i32 = 11;
const SIGTERM: i32 = 15;

#[derive(Clone, Debug)]
pub(crate) enum Order {
    Tokenise(RequestId),
    Generate(RequestId, Attempt),
    Cancel(RequestId, Attempt),
    Drain,
    Terminate,
    LinkGone,
}

#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) attempt: Attempt,
    pub(crate) prefill_steps: u32,
    pub(crate) next_index: u32,
    pub(crate) cancelled: bool,
}

impl World {
    pub(crate) fn follow(&mut self, id: WorkerId, order: Order) {
        let worker = self.workers.get_mut(&id).unwrap();
        if !worker.alive {
            return;
        }
        match order {
            Order::Terminate if worker.deaf => {}
            Order::LinkGone if worker.deaf || worker.hung => {}
            Order::Terminate => {
                let signal = SIGTERM;
                self.die(id, ExitStatus::Signal { signal, oom: false }, None);
            }
            Order::LinkGone => self.die(id, ExitStatus::Code(0), None),
            _ if worker.link != Link::Open => {}
            Order::Tokenise(request) => self.tokenise(id, request),
            Order::Generate(request, attempt) => self.generate(id, request, attempt),
            Order::Cancel(request, attempt) => {
                if let Some(run) = worker.runs.get_mut(&request)
                    && run.attempt == attempt
                {
                    run.cancelled = true;
                }
            }
            Order::Drain => {
                if !worker.hung && !worker.deaf {
                    worker.draining = true;
                    self.leave_if_drained(id);
                }
            }
        }
    }

    pub(crate) fn leave_if_drained(&mut self, id: WorkerId) {
        let worker = &self.workers[&id];
        if worker.draining && worker.runs.is_empty() && worker.alive {
            self.write(id, Frame::Drained);
            self.die(id, ExitStatus::Code(0), None);
        }
    }

    pub(crate) fn tokenise(&mut self, id: WorkerId, request: RequestId) {
        if self.workers[&id].hung && self.dice.chance(5000) {
            return;
        }
        if self.fault(self.faults.tokenise_crash) {
            let signal = SIGSEGV;
            self.die(
                id,
                ExitStatus::Signal { signal, oom: false },
                Some(Blame::Engine),
            );
            return;
        }
        let client = &self.clients[&request];
        let outcome = if client.bad_template {
            TokenisedOutcome::Rejected("the template refuses".to_owned())
        } else if self.fault(self.faults.busy_prompt_thread) {
            TokenisedOutcome::Unavailable
        } else {
            let client = &self.clients[&request];
            TokenisedOutcome::Tokens(client.prompt_tokens + u32::from(self.workers[&id].model))
        };
        self.write(id, Frame::Tokenised(request, outcome));
    }

    pub(crate) fn generate(&mut self, id: WorkerId, request: RequestId, attempt: Attempt) {
        if self.workers[&id].draining || self.fault(self.faults.not_taken) {
            self.write(id, Frame::Failed(request, attempt, AttemptError::NotTaken));
            return;
        }
        if self.fault(self.faults.row_failure) {
            let words = "the engine refuses".to_owned();
            self.write(
                id,
                Frame::Failed(request, attempt, AttemptError::Rejected(words)),
            );
            return;
        }
        let client = &self.clients[&request];
        // What a resumed stream is built from is what the relay holds, and no attempt changes it but this.
        let emitted = u32::try_from(client.tokens.len()).unwrap();
        let run = Run {
            attempt,
            prefill_steps: (client.prompt_tokens + emitted) / 64 + 1,
            next_index: emitted,
            cancelled: client.attempt != attempt || client.ended.is_some(),
        };
        let worker = self.workers.get_mut(&id).unwrap();
        worker.runs.insert(request, run);
        let slots = usize::try_from(worker.slots).unwrap();
        assert!(
            worker.runs.len() <= slots,
            "a worker is never given more than it has slots"
        );
        self.write(id, Frame::Started(request, attempt));
        self.keep_stepping(id);
    }

    pub(crate) fn keep_stepping(&mut self, id: WorkerId) {
        let worker = self.workers.get_mut(&id).unwrap();
        if worker.stepping || worker.hung || !worker.alive || worker.runs.is_empty() {
            return;
        }
        worker.stepping = true;
        let slow = worker.slow && self.now < self.calm_at;
        let step = if slow {
            self.dice.millis(500, 4000)
        } else {
            self.dice.millis(2, 30)
        };
        let worker = self.workers.get_mut(&id).unwrap();
        worker.longest_step = worker.longest_step.max(step);
        self.put_after(step, Happening::Step(id));
    }

    pub(crate) fn step(&mut self, id: WorkerId) {
        let worker = self.workers.get_mut(&id).unwrap();
        worker.stepping = false;
        if !worker.alive || worker.hung {
            return;
        }
        if self.fault(self.faults.hang) {
            let worker = self.workers.get_mut(&id).unwrap();
            worker.hung = true;
            worker.blame = Some(Blame::Engine);
            return;
        }
        if self.fault(self.faults.no_exit) && self.workers[&id].link == Link::Open {
            let worker = self.workers.get_mut(&id).unwrap();
            worker.hung = true;
            worker.deaf = true;
            worker.blame = Some(Blame::Engine);
            let at = worker.framed_at;
            self.put(at, Happening::Frame(id, Frame::Eof));
            return;
        }
        if self.fault(self.faults.crash) {
            let status = self.crash_status();
            self.die(id, status, Some(Blame::Engine));
            return;
        }
        if self.fault(self.faults.external) {
            let signals = [SIGKILL, SIGTERM, 2, 1];
            let signal = signals[usize::try_from(self.dice.between(0, 3)).unwrap()];
            self.die(
                id,
                ExitStatus::Signal { signal, oom: false },
                Some(Blame::Outsider),
            );
            return;
        }
        let worker = &self.workers[&id];
        let poison = worker
            .runs
            .iter()
            .find(|(request, run)| run.prefill_steps == 0 && self.clients[*request].poison);
        if let Some((request, _)) = poison {
            self.oracle
                .poisoned(self.clients[request].arrival.fingerprint.0);
            let signal = SIGABRT;
            self.die(
                id,
                ExitStatus::Signal { signal, oom: false },
                Some(Blame::Engine),
            );
            return;
        }
        self.advance(id);
        self.leave_if_drained(id);
        self.keep_stepping(id);
    }

    pub(crate) fn crash_status(&mut self) -> ExitStatus {
        if self.fault(self.faults.odd_status) {
            match self.dice.between(0, 2) {
                0 => ExitStatus::Code(0),
                1 => ExitStatus::Code(101),
                _ => ExitStatus::Signal {
                    signal: SIGKILL,
                    oom: true,
                },
            }
        } else {
            let signal = if self.dice.chance(5000) {
                SIGABRT
            } else {
                SIGSEGV
            };
            ExitStatus::Signal { signal, oom: false }
        }
    }

    /// One forward pass: each row gets on by a chunk of its prompt, or by one or two tokens.
    pub(crate) fn advance(&mut self, id: WorkerId) {
        let requests: Vec<_> = self.workers[&id].runs.keys().copied().collect();
        let mut rows = Vec::new();
        for request in requests {
            let failed = self.fault(self.faults.row_failure);
            let pair = self.dice.chance(2000);
            let client = &self.clients[&request];
            let worker = self.workers.get_mut(&id).unwrap();
            let model = worker.model;
            let run = worker.runs.get_mut(&request).unwrap();
            let room = CONTEXT_TOKENS - client.prompt_tokens - u32::from(model);
            let asked = client.arrival.max_tokens.unwrap_or(u32::MAX).min(room);
            let first_index = run.next_index;
            let mut tokens = Vec::new();
            let end = if run.cancelled {
                Some(RowEnd::Cancelled)
            } else if failed {
                Some(RowEnd::Failed)
            } else if run.prefill_steps > 0 {
                run.prefill_steps -= 1;
                continue;
            } else {
                let last = client.natural_end.min(asked);
                for _ in 0..=u32::from(pair) {
                    if run.next_index < last {
                        tokens.push(token(request, run.next_index, model));
                        run.next_index += 1;
                    }
                }
                let reason = if client.natural_end <= asked {
                    FinishReason::Stop
                } else {
                    FinishReason::Length
                };
                (run.next_index >= last).then_some(RowEnd::Finished(reason))
            };
            let attempt = run.attempt;
            if end.is_some() {
                worker.runs.remove(&request);
            }
            rows.push(Row {
                request,
                attempt,
                first_index,
                tokens,
                end,
            });
        }
        let worker = self.workers.get_mut(&id).unwrap();
        worker.pulse += 1;
        let pulse = worker.pulse;
        self.write(id, Frame::Step { rows, pulse });
    }
}
