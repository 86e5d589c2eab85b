//! The workers behind a dispatcher, as its `/status` names them, and their end.

use std::collections::HashSet;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde::Deserialize;

use crate::client::Client;
use crate::error::BenchError;
use crate::process::{Identity, send};
use crate::random::Random;

/// `/status` answers under any load; this is far more than it needs.
const STATUS_WITHIN: Duration = Duration::from_secs(10);

/// How often `/status` is asked while something is awaited.
const ASK_EVERY: Duration = Duration::from_millis(20);

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Status {
    pub(crate) instances: Vec<Instance>,
    pub(crate) counters: serde_json::Map<String, serde_json::Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, serde::Serialize)]
#[serde(default)]
pub(crate) struct Instance {
    pub(crate) instance: u32,
    pub(crate) generation: u64,
    pub(crate) state: String,
    pub(crate) pid: Option<u32>,
    pub(crate) running: u32,
}

impl Status {
    pub(crate) fn ready(&self) -> usize {
        self.instances
            .iter()
            .filter(|one| one.state == "ready")
            .count()
    }
}

/// All workers ever seen.
#[derive(Debug)]
pub(crate) struct Fleet<'a> {
    client: &'a Client,
    seen: HashSet<Identity>,
}

impl<'a> Fleet<'a> {
    pub(crate) fn new(client: &'a Client) -> Self {
        Self {
            client,
            seen: HashSet::new(),
        }
    }

    pub(crate) fn workers_seen(&self) -> usize {
        self.seen.len()
    }

    pub(crate) async fn status(&mut self) -> Result<Status, BenchError> {
        let (code, body) = self.client.get("/status", STATUS_WITHIN).await?;
        let status: Status = serde_json::from_slice(&body).map_err(|error| {
            BenchError::Target(format!("/status ({code}) is not understood: {error}"))
        })?;
        for pid in status.instances.iter().filter_map(|one| one.pid) {
            self.seen.insert(Identity::of(pid));
        }
        Ok(status)
    }

    /// Kills one of the workers that live by `signal`, whatever it is doing, and says which. Waits for one where all are down.
    /// `None`: there was none within `patience`.
    pub(crate) async fn kill_one(
        &mut self,
        random: &mut Random,
        signal: Signal,
        patience: Duration,
    ) -> Result<Option<Instance>, BenchError> {
        let give_up = tokio::time::Instant::now() + patience;
        loop {
            let status = self.status().await?;
            let mut alive: Vec<Instance> = status
                .instances
                .into_iter()
                .filter(|one| one.pid.is_some_and(|pid| Identity::of(pid).lives()))
                .collect();
            if !alive.is_empty() {
                let victim = alive.swap_remove(random.index(alive.len()));
                // It may be gone by now, which is as good as killed but no kill.
                if victim
                    .pid
                    .is_some_and(|pid| send(pid, Some(signal)).is_ok())
                {
                    return Ok(Some(victim));
                }
            }
            if tokio::time::Instant::now() >= give_up {
                return Ok(None);
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
    }

    /// Waits until as many instances are ready as `wanted`, and returns the last status.
    pub(crate) async fn await_ready(
        &mut self,
        wanted: usize,
        patience: Duration,
    ) -> Result<Status, BenchError> {
        let give_up = tokio::time::Instant::now() + patience;
        loop {
            let status = self.status().await?;
            if status.ready() >= wanted || tokio::time::Instant::now() >= give_up {
                return Ok(status);
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
    }

    /// Workers that still live and are none of `wanted`.
    pub(crate) fn orphans(&self, wanted: &Status) -> Vec<u32> {
        let wanted: HashSet<u32> = wanted.instances.iter().filter_map(|one| one.pid).collect();
        let mut orphans: Vec<u32> = self
            .seen
            .iter()
            .filter(|worker| !wanted.contains(&worker.pid) && worker.lives())
            .map(|worker| worker.pid)
            .collect();
        orphans.sort_unstable();
        orphans
    }
}
