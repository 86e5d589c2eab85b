//! Drives arrivals against a client. A request that cannot be sent in time is sent late, and its lateness is in its sample.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use crate::arrival::Arrival;
use crate::client::Client;
use crate::clock::Clock;
use crate::error::BenchError;
use crate::sample::Sample;
use crate::workload::Workload;

/// Requests of an open loop that may be in flight; beyond it requests wait, and are late.
pub const IN_FLIGHT_MAX: usize = 16_384;

/// Samples that may wait for the caller.
const SAMPLES_WAITING: usize = 1_024;

/// What is to be driven.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub arrival: Arrival,
    pub requests: u64,
    pub seed: u64,
}

/// Sends all requests of `plan` and gives each sample to `sink` as soon as its request has ended.
/// Returns them all, by number.
///
/// # Errors
/// The arrival process never sends anything.
pub async fn drive(
    client: &Arc<Client>,
    workload: &Arc<Workload>,
    plan: Plan,
    clock: Clock,
    mut sink: impl FnMut(&Sample),
) -> Result<Vec<Sample>, BenchError> {
    plan.arrival.check()?;
    let (sender, mut receiver) = mpsc::channel(SAMPLES_WAITING);
    let mut tasks = JoinSet::new();
    let run = Run {
        client: Arc::clone(client),
        workload: Arc::clone(workload),
        clock,
        sender,
    };
    let count = usize::try_from(plan.requests).unwrap_or(usize::MAX);
    if let Arrival::Closed { concurrency } = plan.arrival {
        let next = Arc::new(AtomicU64::new(0));
        for _ in 0..u64::from(concurrency).min(plan.requests) {
            let run = run.clone();
            let next = Arc::clone(&next);
            tasks.spawn(async move {
                loop {
                    let id = next.fetch_add(1, Ordering::Relaxed);
                    if id >= plan.requests {
                        break;
                    }
                    run.one(id, run.clock.now_us()).await;
                }
            });
        }
    } else if let Some(starts) = starts_us(plan, workload, count) {
        let run = run.clone();
        tasks.spawn(run.open_loop(starts));
    }
    drop(run);
    let mut samples = Vec::with_capacity(count.min(1 << 20));
    while let Some(sample) = receiver.recv().await {
        sink(&sample);
        samples.push(sample);
    }
    samples.sort_by_key(|sample: &Sample| sample.id);
    Ok(samples)
}

/// When the requests of an open loop are to be sent, microseconds since its start.
fn starts_us(plan: Plan, workload: &Workload, count: usize) -> Option<Vec<u64>> {
    if let Arrival::Trace { speed } = plan.arrival {
        return Some(workload.starts_us(count, speed));
    }
    plan.arrival.starts_us(count, plan.seed)
}

/// Sends `count` warm-up requests, `concurrency` at a time, and returns what came of them.
pub async fn warm_up(
    client: &Arc<Client>,
    workload: &Arc<Workload>,
    count: u64,
    concurrency: u32,
) -> Vec<Sample> {
    let clock = Clock::start();
    let mut tasks = JoinSet::new();
    let permits = Arc::new(Semaphore::new(concurrency.max(1) as usize));
    for id in 0..count {
        let (client, workload) = (Arc::clone(client), Arc::clone(workload));
        let permits = Arc::clone(&permits);
        tasks.spawn(async move {
            let _permit = permits.acquire().await;
            let ask = workload.warm_up_ask(id, client.endpoint().is_chat());
            client.ask(&ask, clock, clock.now_us(), |_| {}).await
        });
    }
    tasks.join_all().await
}

#[derive(Clone)]
struct Run {
    client: Arc<Client>,
    workload: Arc<Workload>,
    clock: Clock,
    sender: mpsc::Sender<Sample>,
}

impl Run {
    async fn one(&self, id: u64, intended_us: u64) {
        let ask = self.workload.ask(id, self.client.endpoint().is_chat());
        let sample = self.client.ask(&ask, self.clock, intended_us, |_| {}).await;
        // The receiver goes only when the caller gave the whole run up.
        let _ = self.sender.send(sample).await;
    }

    async fn open_loop(self, starts: Vec<u64>) {
        let permits = Arc::new(Semaphore::new(IN_FLIGHT_MAX));
        let mut due = schedule(self.clock, starts);
        while let Some((id, intended_us)) = due.recv().await {
            let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
                return;
            };
            let run = self.clone();
            tokio::spawn(async move {
                run.one(id, intended_us).await;
                drop(permit);
            });
        }
    }
}

/// Gives each request's number and intended start when it is due. A thread sleeps more finely than the event
/// loop's timer, which is as fine as a millisecond.
fn schedule(clock: Clock, starts: Vec<u64>) -> mpsc::Receiver<(u64, u64)> {
    let (sender, receiver) = mpsc::channel(IN_FLIGHT_MAX);
    // The starts count from when the first could be sent, not from when the run was set up.
    let begin_us = clock.now_us();
    std::thread::spawn(move || {
        for (id, start_us) in (0..).zip(starts) {
            let intended_us = begin_us + start_us;
            let wait = clock
                .instant(intended_us)
                .saturating_duration_since(Instant::now());
            std::thread::sleep(wait);
            // The receiver goes only when the whole run was given up.
            if sender.blocking_send((id, intended_us)).is_err() {
                return;
            }
        }
    });
    receiver
}
