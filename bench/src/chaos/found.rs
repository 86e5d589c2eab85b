//! What a chaos run found, and whether the promises held.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Verify;
use super::check::Likeness;
use super::phase::Histogram;
use crate::process::Footprint;

/// An answer that is not the expected one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Oddity {
    pub id: u64,
    pub prompt: u32,
    pub attempts: u32,
    pub likeness: Likeness,
}

/// The one line of a chaos run.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    pub verify: Verify,
    pub seed: u64,
    /// Requests sent, references apart.
    pub requests: u64,
    /// Requests that the server took: all but those refused or not connected.
    pub accepted: u64,
    pub completed: u64,
    /// Completed with more than one attempt.
    pub resumed: u64,
    /// Streams whose answers tell no number of attempts.
    pub attempts_untold: u64,
    /// Taken and then ended by an error that says why.
    pub failed: u64,
    pub failed_reasons: BTreeMap<String, u64>,
    /// The kills were engines' deaths.
    pub abort: bool,
    /// Ids of requests that failed because two engines died under them.
    pub failed_after_two_deaths: Vec<u64>,
    /// Refused at arrival, with a reason.
    pub refused: u64,
    /// Taken and then ended without a word: cut, garbled or silent.
    pub lost: u64,
    pub lost_reasons: BTreeMap<String, u64>,
    /// No connection.
    pub unreachable: u64,
    pub equal: u64,
    pub differing: u64,
    pub duplicated_tokens: u64,
    pub missing_tokens: u64,
    /// Ends of streams that contradict the reference: another finish reason or number of tokens.
    pub wrong_ends: u64,
    /// The first of what was not equal.
    pub oddities: Vec<Oddity>,
    pub kills: u64,
    pub kills_wanted: u64,
    /// Kills by what the victim was: its lifecycle state, and `idle` or `busy` where it was ready.
    pub victims: BTreeMap<String, u64>,
    pub phases: Histogram,
    pub workers_seen: u64,
    pub orphans: Vec<u32>,
    pub ready_before: u64,
    pub ready_after: u64,
    pub before: Option<Footprint>,
    pub after: Option<Footprint>,
    /// From SIGTERM to the dispatcher's end, where it was stopped.
    pub stopped_after_ms: Option<u64>,
    pub counters: serde_json::Map<String, serde_json::Value>,
    pub wall_s: f64,
    /// Largest wait of a client between two tokens, or for the first, milliseconds.
    pub silence_ms_max: f64,
}

/// Shown of the things that differ.
pub(crate) const ODDITIES_MAX: usize = 20;

impl Found {
    /// Whether the promises held: nothing lost, repeated, left out, failed or left behind.
    ///
    /// # Errors
    /// Which did not.
    pub fn verdict(&self) -> Result<(), String> {
        let mut broken = Vec::new();
        let mut count = |what: &str, number: u64| {
            if number > 0 {
                broken.push(format!("{number} {what}"));
            }
        };
        count("lost", self.lost);
        count("failed", self.failed);
        // An engine that dies twice under a request fails it; a kill from outside fails none.
        if !self.abort {
            count(
                "failed after two deaths",
                self.failed_after_two_deaths.len() as u64,
            );
        }
        count("unreachable", self.unreachable);
        count("orphans", self.orphans.len() as u64);
        count("kills that found no victim", self.kills_wanted - self.kills);
        if self.verify == Verify::Exact {
            count("differing", self.differing);
        }
        if self.verify != Verify::None {
            count("tokens duplicated", self.duplicated_tokens);
            count("tokens missing", self.missing_tokens);
            count("wrong ends", self.wrong_ends);
        }
        count(
            "instances not ready again",
            self.ready_before.saturating_sub(self.ready_after),
        );
        if self.completed == 0 {
            broken.push("nothing completed".into());
        }
        if broken.is_empty() {
            Ok(())
        } else {
            Err(broken.join(", "))
        }
    }
}

fn drift(before: Option<u64>, after: Option<u64>) -> String {
    match (before, after) {
        (Some(before), Some(after)) => {
            let sign = if after >= before { '+' } else { '-' };
            format!("{before}{sign}{}", after.abs_diff(before))
        }
        _ => "unknown".into(),
    }
}

fn counts(counts: &BTreeMap<String, u64>) -> String {
    let parts: Vec<String> = counts
        .iter()
        .map(|(name, count)| format!("{name}:{count}"))
        .collect();
    parts.join(",")
}

impl std::fmt::Display for Found {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            out,
            "requests={} accepted={} completed={} resumed={} failed={} refused={} lost={} unreachable={} equal={} differing={} duplicated_tokens={} missing_tokens={} wrong_ends={} kills={}/{} victims={} orphans={} workers_seen={} ready={}->{}",
            self.requests,
            self.accepted,
            self.completed,
            self.resumed,
            self.failed,
            self.refused,
            self.lost,
            self.unreachable,
            self.equal,
            self.differing,
            self.duplicated_tokens,
            self.missing_tokens,
            self.wrong_ends,
            self.kills,
            self.kills_wanted,
            counts(&self.victims),
            self.orphans.len(),
            self.workers_seen,
            self.ready_before,
            self.ready_after,
        )?;
        if let (Some(before), Some(after)) = (self.before, self.after) {
            write!(
                out,
                " fds={} rss_kib={} threads={}",
                drift(before.open_files, after.open_files),
                drift(before.resident_kib, after.resident_kib),
                drift(before.threads, after.threads),
            )?;
        }
        let phases: Vec<String> = self
            .phases
            .iter()
            .map(|(phase, tally)| format!("{phase:?}:{}/{}", tally.hit, tally.in_flight))
            .collect();
        write!(
            out,
            " phases_hit/in_flight={} silence_ms_max={:.0} wall_s={:.1} seed={}",
            phases.join(","),
            self.silence_ms_max,
            self.wall_s,
            self.seed
        )?;
        if let Some(ms) = self.stopped_after_ms {
            write!(out, " stopped_after_ms={ms}")?;
        }
        if self.abort || !self.failed_after_two_deaths.is_empty() {
            write!(
                out,
                " failed_after_two_deaths={:?}",
                self.failed_after_two_deaths
            )?;
        }
        for (label, reasons) in [
            ("failed", &self.failed_reasons),
            ("lost", &self.lost_reasons),
        ] {
            for (reason, count) in reasons {
                write!(out, "\n  {label} {count}: {reason}")?;
            }
        }
        if self.attempts_untold > 0 {
            write!(out, "\n  {} answers tell no attempts", self.attempts_untold)?;
        }
        for odd in &self.oddities {
            write!(
                out,
                "\n  request {} (prompt {}, {} attempts): {:?}",
                odd.id, odd.prompt, odd.attempts, odd.likeness
            )?;
        }
        Ok(())
    }
}
