//! Streams that are checked token by token while workers are killed under them.

mod check;
mod fleet;
mod found;
mod phase;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use clap::ValueEnum;
use nix::sys::signal::Signal;
use serde::Serialize;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::JoinSet;

use crate::client::{Client, Patience};
use crate::clock::Clock;
use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::process::{Identity, footprint, send};
use crate::random::Random;
use crate::report::jsonl;
use crate::sample::{Outcome, Sample};
use crate::workload::Workload;

use check::{Likeness, Pieces};
use fleet::{Fleet, Instance};
use found::{ODDITIES_MAX, Oddity};

pub use found::Found;
pub use phase::{Histogram, Phase, Tally};

/// What an answer must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verify {
    /// The reference, byte for byte
    Exact,
    /// As `exact`, but what differs is only listed: with a real model a near tie may part
    NearTie,
    /// Anything that ends well
    None,
}

/// How a run goes.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub streams: u32,
    pub requests: u64,
    pub kills: u64,
    /// Kill by SIGABRT, which counts as the engine's own death.
    pub abort: bool,
    pub verify: Verify,
    pub learn_alone: bool,
    pub seed: u64,
    pub dispatcher_pid: Option<u32>,
    pub stop: bool,
    pub silence: Duration,
}

/// How long a kill waits for a victim, and the end for the fleet to be whole again.
const FLEET_PATIENCE: Duration = Duration::from_secs(120);

/// A kill comes up to this long after the progress that calls for it, so that it falls between tokens too.
const JITTER_US: u64 = 30_000;

/// The kills may lengthen a run to so many times its requests.
const STRETCH: u64 = 20;

/// How the dispatcher tells of a request under which two engines died.
const TWO_DEATHS: &str = "2 workers died while serving this request";

/// Answers that may wait to be checked.
const ANSWERS_WAITING: usize = 1_024;

/// One kill, for the record.
#[derive(Clone, Debug, Serialize)]
struct Kill {
    at_us: u64,
    #[serde(flatten)]
    victim: Instance,
}

#[derive(Serialize)]
#[serde(tag = "record", rename_all = "snake_case")]
enum Record<'a> {
    Sample(&'a Sample),
    Kill(&'a Kill),
    Found(&'a Found),
}

/// What the streams and the killer tell each other.
#[derive(Debug, Default)]
struct Progress {
    /// Requests begun and tokens received.
    work: AtomicU64,
    moved: Notify,
    kills_over: AtomicBool,
}

impl Progress {
    fn step(&self) {
        self.work.fetch_add(1, Ordering::Relaxed);
        self.moved.notify_one();
    }
}

/// Learns what the answers are, asks again while workers die, and compares.
///
/// # Errors
/// The server cannot be reached, has no readable `/status` although workers are to be killed, or
/// fails a reference request, which nobody disturbs.
pub async fn run(
    endpoint: Endpoint,
    workload: Workload,
    plan: Plan,
    out: Option<&Path>,
) -> Result<Found, BenchError> {
    let mut writer = out.map(jsonl::Writer::open).transpose()?;
    let patience = Patience {
        idle: plan.silence,
        ..Patience::default()
    };
    // Fresh connections: the server's open files are counted, and a pooled one would be among them.
    let client = Arc::new(Client::new(endpoint, patience, false));
    let workload = Arc::new(workload);
    let mut fleet = Fleet::new(&client);
    let watches = plan.kills > 0 || plan.dispatcher_pid.is_some();
    let ready_before = if watches {
        fleet.status().await?.ready()
    } else {
        0
    };
    let expected = if plan.verify == Verify::None {
        Vec::new()
    } else {
        learn(&client, &workload, plan).await?
    };
    let before = plan.dispatcher_pid.map(footprint);

    let clock = Clock::start();
    let progress = Arc::new(Progress::default());
    let (sender, mut receiver) = mpsc::channel(ANSWERS_WAITING);
    let _streams = spawn_streams(&client, &workload, plan, clock, &progress, sender);
    let mut tally = Collected::new(plan, &expected);
    let collect = async {
        while let Some((sample, pieces)) = receiver.recv().await {
            if let Some(writer) = &mut writer {
                writer.append(&Record::Sample(&sample))?;
            }
            tally.take(sample, &pieces);
        }
        Ok::<_, BenchError>(())
    };
    let work = plan.requests * (u64::from(workload.max_tokens(0)) + 1);
    let (collected, kills) = tokio::join!(
        collect,
        kill_workers(&mut fleet, plan, clock, work, &progress)
    );
    collected?;
    let (kills, killing) = kills;
    let wall_us = clock.now_us();

    let mut found = tally.found(plan, &kills);
    if let Some(writer) = &mut writer {
        kills
            .iter()
            .try_for_each(|kill| writer.append(&Record::Kill(kill)))?;
    }
    killing?;
    found.wall_s = Duration::from_micros(wall_us).as_secs_f64();
    found.before = before;
    if watches {
        let status = fleet.await_ready(ready_before, FLEET_PATIENCE).await?;
        found.ready_before = ready_before as u64;
        found.ready_after = status.ready() as u64;
        found.counters.clone_from(&status.counters);
        found.after = settled(plan.dispatcher_pid, before).await;
        found.orphans = fleet.orphans(&status);
        if let (true, Some(pid)) = (plan.stop, plan.dispatcher_pid) {
            found.stopped_after_ms = Some(stop(pid).await?);
            found.orphans = fleet.orphans(&fleet::Status::default());
        }
        found.workers_seen = fleet.workers_seen() as u64;
    }
    if let Some(writer) = &mut writer {
        writer.append(&Record::Found(&found))?;
    }
    Ok(found)
}

/// Asks every prompt once, undisturbed.
async fn learn(
    client: &Arc<Client>,
    workload: &Arc<Workload>,
    plan: Plan,
) -> Result<Vec<(Sample, Pieces)>, BenchError> {
    let clock = Clock::start();
    let at_once = if plan.learn_alone {
        1
    } else {
        plan.streams.max(1)
    };
    let permits = Arc::new(Semaphore::new(at_once as usize));
    let mut tasks = JoinSet::new();
    for id in 0..workload.prompts.len() as u64 {
        let (client, workload) = (Arc::clone(client), Arc::clone(workload));
        let permits = Arc::clone(&permits);
        tasks.spawn(async move {
            let _permit = permits.acquire().await;
            let ask = workload.ask(id, client.endpoint().is_chat());
            let mut pieces = Pieces::new();
            let keep = |text: &str| pieces.push(text.to_owned());
            let sample = client.ask(&ask, clock, clock.now_us(), keep).await;
            (sample, pieces)
        });
    }
    let mut learnt = tasks.join_all().await;
    learnt.sort_by_key(|(sample, _)| sample.prompt);
    match learnt.iter().find(|(sample, _)| !sample.outcome.is_done()) {
        None => Ok(learnt),
        Some((sample, _)) => Err(BenchError::Target(format!(
            "a reference request was {}: {}",
            sample.outcome.word(),
            sample.outcome.reason()
        ))),
    }
}

fn spawn_streams(
    client: &Arc<Client>,
    workload: &Arc<Workload>,
    plan: Plan,
    clock: Clock,
    progress: &Arc<Progress>,
    sender: mpsc::Sender<(Sample, Pieces)>,
) -> JoinSet<()> {
    let next = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..plan.streams.max(1) {
        let (client, workload) = (Arc::clone(client), Arc::clone(workload));
        let (progress, next, sender) = (Arc::clone(progress), Arc::clone(&next), sender.clone());
        tasks.spawn(async move {
            loop {
                let id = next.fetch_add(1, Ordering::Relaxed);
                let enough = id >= plan.requests && progress.kills_over.load(Ordering::Relaxed);
                if enough || id >= plan.requests.saturating_mul(STRETCH) {
                    break;
                }
                let ask = workload.ask(id, client.endpoint().is_chat());
                progress.step();
                let mut pieces = Pieces::new();
                let sample = client
                    .ask(&ask, clock, clock.now_us(), |text| {
                        pieces.push(text.to_owned());
                        progress.step();
                    })
                    .await;
                let again = refused_for(&sample.outcome);
                if sender.send((sample, pieces)).await.is_err() {
                    break;
                }
                if let Some(wait) = again {
                    tokio::time::sleep(wait).await;
                }
            }
        });
    }
    tasks
}

/// A refused client does as it is told, at most 5 s; else a fleet that is down would be stormed.
fn refused_for(outcome: &Outcome) -> Option<Duration> {
    match outcome {
        Outcome::Refused { retry_after_s, .. } => {
            Some(Duration::from_secs(retry_after_s.unwrap_or(1).min(5)))
        }
        Outcome::Unreachable { .. } => Some(Duration::from_millis(100)),
        _ => None,
    }
}

/// Kills at moments drawn evenly over the work. Returns the kills even where it had to give up.
async fn kill_workers(
    fleet: &mut Fleet<'_>,
    plan: Plan,
    clock: Clock,
    work: u64,
    progress: &Progress,
) -> (Vec<Kill>, Result<(), BenchError>) {
    let mut random = Random::new(plan.seed, "kill");
    let signal = if plan.abort {
        Signal::SIGABRT
    } else {
        Signal::SIGKILL
    };
    let mut moments: Vec<u64> = (0..plan.kills).map(|_| random.below(work)).collect();
    moments.sort_unstable();
    let mut kills = Vec::new();
    let mut result = Ok(());
    for moment in moments {
        while progress.work.load(Ordering::Relaxed) < moment {
            // The streams may stand still because the fleet is down; they are not waited for for ever.
            let moved = tokio::time::timeout(FLEET_PATIENCE, progress.moved.notified()).await;
            if moved.is_err() {
                break;
            }
        }
        let jitter = Duration::from_micros(random.below(JITTER_US));
        tokio::time::sleep(jitter).await;
        match fleet.kill_one(&mut random, signal, FLEET_PATIENCE).await {
            Ok(Some(victim)) => kills.push(Kill {
                at_us: clock.now_us(),
                victim,
            }),
            Ok(None) => break,
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    progress.kills_over.store(true, Ordering::Relaxed);
    (kills, result)
}

/// The dispatcher's footprint once its open files are back to what they were, or after 5 s.
async fn settled(
    pid: Option<u32>,
    before: Option<crate::process::Footprint>,
) -> Option<crate::process::Footprint> {
    let (pid, before) = (pid?, before?);
    let give_up = tokio::time::Instant::now() + Duration::from_secs(5);
    loop {
        let now = footprint(pid);
        if now.open_files <= before.open_files || tokio::time::Instant::now() >= give_up {
            return Some(now);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Stops the dispatcher, and gives its workers the second that they have to notice.
async fn stop(pid: u32) -> Result<u64, BenchError> {
    let identity = Identity::of(pid);
    let began = Clock::start();
    send(pid, Some(Signal::SIGTERM)).map_err(|source| BenchError::System {
        what: "stop the dispatcher",
        source,
    })?;
    let give_up = tokio::time::Instant::now() + FLEET_PATIENCE;
    while identity.lives() {
        if tokio::time::Instant::now() >= give_up {
            return Err(BenchError::Target(format!(
                "the dispatcher (process {pid}) did not end within {FLEET_PATIENCE:?} of SIGTERM"
            )));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let took_ms = began.now_us() / 1_000;
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok(took_ms)
}

/// Gathers answers.
struct Collected<'a> {
    plan: Plan,
    expected: &'a [(Sample, Pieces)],
    samples: Vec<Sample>,
    oddities: Vec<Oddity>,
    equal: u64,
    differing: u64,
    duplicated_tokens: u64,
    missing_tokens: u64,
    wrong_ends: u64,
}

impl<'a> Collected<'a> {
    fn new(plan: Plan, expected: &'a [(Sample, Pieces)]) -> Self {
        Self {
            plan,
            expected,
            samples: Vec::new(),
            oddities: Vec::new(),
            equal: 0,
            differing: 0,
            duplicated_tokens: 0,
            missing_tokens: 0,
            wrong_ends: 0,
        }
    }

    fn take(&mut self, sample: Sample, pieces: &[String]) {
        if let Some((reference, expected)) = self.expected.get(sample.prompt as usize) {
            let whole = sample.outcome.is_done();
            let likeness = if whole {
                check::whole(expected, pieces)
            } else {
                check::beginning(expected, pieces)
            };
            match &likeness {
                // Another text may look like this one with a hole or a repeat, so that the text
                // proves neither; the counts do: the answer's own, and the pieces that came.
                parted if self.plan.verify == Verify::NearTie && whole => {
                    self.equal += u64::from(*parted == Likeness::Equal);
                    self.differing += u64::from(*parted != Likeness::Equal);
                    let (tokens, wanted) = (sample.output_tokens, reference.output_tokens);
                    self.duplicated_tokens += (pieces.len() as u64).saturating_sub(tokens);
                    self.missing_tokens += wanted.saturating_sub(tokens);
                    self.wrong_ends += u64::from(sample.finish_reason != reference.finish_reason);
                }
                Likeness::Equal => {
                    self.equal += u64::from(whole);
                    let ends_alike = sample.finish_reason == reference.finish_reason
                        && sample.output_tokens == reference.output_tokens;
                    self.wrong_ends += u64::from(whole && !ends_alike);
                }
                Likeness::Duplicated { tokens, .. } => self.duplicated_tokens += *tokens as u64,
                Likeness::Missing { tokens, .. } => self.missing_tokens += *tokens as u64,
                Likeness::Differs { .. } => self.differing += 1,
            }
            if likeness != Likeness::Equal && self.oddities.len() < ODDITIES_MAX {
                self.oddities.push(Oddity {
                    id: sample.id,
                    prompt: sample.prompt,
                    attempts: attempts(&sample).unwrap_or(1),
                    likeness,
                });
            }
        }
        self.samples.push(sample);
    }

    fn found(self, plan: Plan, kills: &[Kill]) -> Found {
        let mut found = Found {
            verify: self.plan.verify,
            seed: plan.seed,
            requests: self.samples.len() as u64,
            accepted: 0,
            completed: 0,
            resumed: 0,
            attempts_untold: 0,
            failed: 0,
            abort: self.plan.abort,
            failed_after_two_deaths: Vec::new(),
            failed_reasons: std::collections::BTreeMap::new(),
            refused: 0,
            lost: 0,
            lost_reasons: std::collections::BTreeMap::new(),
            unreachable: 0,
            equal: self.equal,
            differing: self.differing,
            duplicated_tokens: self.duplicated_tokens,
            missing_tokens: self.missing_tokens,
            wrong_ends: self.wrong_ends,
            oddities: self.oddities,
            kills: kills.len() as u64,
            kills_wanted: plan.kills,
            victims: std::collections::BTreeMap::new(),
            phases: Histogram::new(),
            workers_seen: 0,
            orphans: Vec::new(),
            ready_before: 0,
            ready_after: 0,
            before: None,
            after: None,
            stopped_after_ms: None,
            counters: serde_json::Map::new(),
            wall_s: 0.0,
            silence_ms_max: 0.0,
        };
        for sample in &self.samples {
            let reason = || sample.outcome.reason();
            match &sample.outcome {
                Outcome::Done => {
                    found.completed += 1;
                    match attempts(sample) {
                        None => found.attempts_untold += 1,
                        Some(attempts) => found.resumed += u64::from(attempts > 1),
                    }
                }
                outcome @ (Outcome::Failed { .. } | Outcome::Refused { .. })
                    if outcome.reason().contains(TWO_DEATHS) =>
                {
                    found.failed_after_two_deaths.push(sample.id);
                }
                Outcome::Failed { .. } => {
                    found.failed += 1;
                    *found.failed_reasons.entry(reason()).or_default() += 1;
                }
                Outcome::Refused { .. } => found.refused += 1,
                Outcome::Unreachable { .. } => found.unreachable += 1,
                Outcome::Truncated { .. }
                | Outcome::Malformed { .. }
                | Outcome::TimedOut { .. } => {
                    found.lost += 1;
                    *found.lost_reasons.entry(reason()).or_default() += 1;
                }
            }
            let gaps_ms = sample.gaps_us.iter().map(|gap| f64::from(*gap) / 1e3);
            found.silence_ms_max = gaps_ms
                .chain(sample.ttft_sent_ms())
                .fold(found.silence_ms_max, f64::max);
        }
        found.accepted = found.requests - found.refused - found.unreachable;
        for kill in kills {
            let victim = &kill.victim;
            let what = match (victim.state.as_str(), victim.running) {
                ("ready", 0) => "idle",
                ("ready", _) => "busy",
                (state, _) => state,
            };
            *found.victims.entry(what.to_owned()).or_default() += 1;
        }
        let kills_us: Vec<u64> = kills.iter().map(|kill| kill.at_us).collect();
        found.phases = phase::histogram(&self.samples, &kills_us);
        found
    }
}

fn attempts(sample: &Sample) -> Option<u32> {
    sample.timings.as_ref()?.attempts
}
