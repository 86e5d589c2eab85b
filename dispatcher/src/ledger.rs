//! What is kept of each request until its outcome: all that a worker, or the next one, needs.

use std::collections::HashMap;

use proto::generate::Generate;
use proto::to_worker::PromptInput;
use proto::{Attempt, InstanceId, RequestId, TokenId};

use crate::gateway::Submission;
use crate::machine::Tick;
use crate::machine::event::{Arrival, Fingerprint};
use crate::relay;

/// Bytes of a prompt's head that decide its prefix affinity.
const AFFINITY_BYTES: usize = 512;

/// One request under way.
#[derive(Debug)]
pub struct Entry {
    pub(crate) submission: Box<Submission>,
    /// The prompt as ids, once a worker has tokenised it.
    pub(crate) ids: Option<Vec<TokenId>>,
    pub(crate) relay: relay::Sender,
    pub(crate) fingerprint: Fingerprint,
}

/// What to do with an assignment.
#[derive(Debug)]
pub(crate) enum Assignment {
    Send(Box<Generate>, relay::Sender),
    /// A resume that has no tokens left to produce.
    Complete(relay::Sender),
    /// The request is unknown or was never tokenised: a fault of ours.
    Missing,
}

/// Requests by id, from submission to outcome.
#[derive(Debug, Default)]
pub struct Ledger {
    entries: HashMap<RequestId, Entry>,
    /// Keyed hashes of prompts say nothing outside of this process.
    key: [u8; 32],
}

impl Ledger {
    /// An empty ledger; `key` makes its hashes meaningless elsewhere.
    #[must_use]
    pub fn new(key: [u8; 32]) -> Self {
        Self {
            entries: HashMap::new(),
            key,
        }
    }

    /// Keeps the request, and tells what the machine needs to know of it.
    pub fn admit(
        &mut self,
        request: RequestId,
        submission: Box<Submission>,
        relay: relay::Sender,
    ) -> Arrival {
        let mut submission = submission;
        let prompt = canonical(&submission.prompt);
        let affinity = self.hash(affinity_head(&submission.prompt, &prompt));
        let (ids, prompt_bytes) = match &mut submission.prompt {
            PromptInput::Ids(ids) => (Some(std::mem::take(ids)), 0),
            _ => (None, prompt.len()),
        };
        let arrival = Arrival {
            request,
            received: relay.received(),
            key: submission.key,
            priority: submission.priority,
            fingerprint: Fingerprint(self.hash(&prompt)),
            bytes: prompt.len() as u64,
            prompt_bytes: prompt_bytes as u64,
            prompt_tokens: ids.as_ref().map(|ids| count(ids.len())),
            max_tokens: submission.max_tokens,
            deadline: submission.deadline,
            affinity: Some(affinity),
        };
        self.entries.insert(
            request,
            Entry {
                submission,
                ids,
                relay,
                fingerprint: arrival.fingerprint,
            },
        );
        arrival
    }

    pub(crate) fn get(&self, request: RequestId) -> Option<&Entry> {
        self.entries.get(&request)
    }

    pub(crate) fn tokenised(&mut self, request: RequestId, ids: Vec<TokenId>) {
        if let Some(entry) = self.entries.get_mut(&request) {
            entry.ids = Some(ids);
            // The text is not needed again: a resume goes by ids.
            entry.submission.prompt = PromptInput::Ids(Vec::new());
        }
    }

    pub(crate) fn remove(&mut self, request: RequestId) -> Option<Entry> {
        self.entries.remove(&request)
    }

    /// The message that starts, or resumes, `request` on `instance`; its relay lets that attempt in.
    pub(crate) fn assign(
        &self,
        request: RequestId,
        attempt: Attempt,
        instance: InstanceId,
        context_tokens: u32,
        now: Tick,
    ) -> Assignment {
        let Some(entry) = self.entries.get(&request) else {
            return Assignment::Missing;
        };
        let Some(ids) = &entry.ids else {
            return Assignment::Missing;
        };
        let progress = entry.relay.progress();
        let room = context_tokens.saturating_sub(count(ids.len()));
        let submission = &entry.submission;
        let max_tokens = submission
            .max_tokens
            .map_or(room, |wanted| wanted.min(room));
        if submission.return_token_ids {
            entry.relay.prompt(ids.as_slice().into());
        }
        entry.relay.assign(attempt, instance, count(ids.len()), now);
        if count(progress.emitted.len()) >= max_tokens {
            return Assignment::Complete(entry.relay.clone());
        }
        let generate = Generate {
            request,
            attempt,
            prompt: ids.clone(),
            emitted: progress.emitted,
            released_bytes: progress.released_bytes,
            max_tokens,
            sampling: submission.sampling.clone(),
            stop: submission.stop.clone(),
            stop_ids: submission.stop_ids.clone(),
            ignore_eos: submission.ignore_eos,
            logprobs: submission.logprobs,
            batch_invariant: submission.batch_invariant,
            cache_prompt: submission.cache_prompt,
        };
        Assignment::Send(Box::new(generate), entry.relay.clone())
    }

    pub(crate) fn relay(&self, request: RequestId) -> Option<&relay::Sender> {
        self.entries.get(&request).map(|entry| &entry.relay)
    }

    fn hash(&self, bytes: &[u8]) -> u64 {
        let hash = blake3::keyed_hash(&self.key, bytes);
        let mut head = [0; 8];
        head.copy_from_slice(&hash.as_bytes()[..8]);
        u64::from_le_bytes(head)
    }
}

/// The prompt as bytes in which two prompts are equal exactly where they mean the same.
fn canonical(prompt: &PromptInput) -> Vec<u8> {
    let mut bytes = Vec::new();
    match prompt {
        PromptInput::Chat { messages, .. } => {
            for message in messages {
                for part in [
                    &message.role,
                    message.name.as_ref().unwrap_or(&String::new()),
                    &message.content,
                ] {
                    bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
                    bytes.extend_from_slice(part.as_bytes());
                }
            }
        }
        PromptInput::Text(text) => bytes.extend_from_slice(text.as_bytes()),
        PromptInput::Ids(ids) => {
            for id in ids {
                bytes.extend_from_slice(&id.to_le_bytes());
            }
        }
    }
    bytes
}

/// The part of a prompt that its later turns share: the first two messages, at most so many bytes.
fn affinity_head<'a>(prompt: &PromptInput, canonical: &'a [u8]) -> &'a [u8] {
    let end = match prompt {
        PromptInput::Chat { messages, .. } => messages
            .iter()
            .take(2)
            .map(|message| {
                24 + message.role.len()
                    + message.name.as_ref().map_or(0, String::len)
                    + message.content.len()
            })
            .sum(),
        _ => AFFINITY_BYTES,
    };
    &canonical[..end.min(AFFINITY_BYTES).min(canonical.len())]
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
