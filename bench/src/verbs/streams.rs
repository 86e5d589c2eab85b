//! `flood` and `chaos`: many streams at little cost, and streams while workers die.

use std::time::Duration;

use super::{extra, runtime, say};
use crate::chaos;
use crate::cli::{ChaosArgs, FloodArgs};
use crate::error::BenchError;
use crate::flood::{self, Flood};
use crate::workload::{OutputLength, Shape, Workload};

pub(super) fn flood_verb(args: &FloodArgs) -> Result<(), BenchError> {
    let endpoint = args.target.endpoint()?;
    let shape = Shape {
        model: args.target.model.clone(),
        output: OutputLength::Fixed {
            tokens: args.max_tokens,
        },
        ignore_eos: true,
        extra: extra(args.extra.as_deref())?,
        ..Shape::study()
    };
    let count = usize::try_from(args.requests.min(4_096)).unwrap_or(1);
    let workload = Workload::random(
        count,
        (args.prompt_words, args.prompt_words),
        shape,
        args.seed,
    );
    let flooded = flood::run(
        &endpoint,
        &workload,
        Flood {
            readers: args.readers,
            requests: args.requests,
            threads: args.threads,
            pace: Duration::from_micros(args.pace_us),
        },
    )?;
    if args.json {
        say(&serde_json::to_string(&flooded).unwrap_or_default());
    } else {
        say(&flooded.to_string());
    }
    if flooded.completed == 0 {
        return Err(BenchError::Unreachable {
            target: args.target.url().to_owned(),
            reason: flooded.messages.into_iter().next().unwrap_or_default(),
        });
    }
    Ok(())
}

pub(super) fn chaos_verb(args: &ChaosArgs) -> Result<(), BenchError> {
    let endpoint = args.target.endpoint()?;
    let shape = Shape {
        model: args.target.model.clone(),
        output: OutputLength::Fixed {
            tokens: args.max_tokens,
        },
        temperature: args.temperature,
        sampling_seed: (args.temperature > 0.0).then_some(args.seed),
        ignore_eos: !args.respect_eos,
        extra: extra(args.extra.as_deref())?,
    };
    let workload = Workload::random(
        args.prompts.max(1) as usize,
        (args.prompt_words, args.prompt_words),
        shape,
        args.seed,
    );
    let plan = chaos::Plan {
        streams: args.streams,
        requests: args.requests,
        kills: args.kills,
        abort: args.abort,
        verify: args.verify,
        learn_alone: args.learn_alone,
        seed: args.seed,
        dispatcher_pid: args.dispatcher_pid,
        stop: args.stop,
        silence: Duration::from_secs(args.silence_s),
    };
    let found = runtime()?.block_on(chaos::run(endpoint, workload, plan, args.out.as_deref()))?;
    if args.json {
        say(&serde_json::to_string(&found).unwrap_or_default());
    } else {
        say(&found.to_string());
    }
    found.verdict().map_err(BenchError::Broken)
}
