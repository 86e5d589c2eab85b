//! The arguments, and which part carries out which verb.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand};

use crate::chaos;
use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::flood::{self, Flood};
use crate::workload::{OutputLength, Shape, Workload};

/// Measures any OpenAI-compatible endpoint, queue included.
#[derive(Debug, Parser)]
#[command(name = "dispatcher-bench", version, about)]
pub struct Args {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Reads many streams at next to no cost of its own: what the server can carry
    Flood(FloodArgs),
    /// Sends streams while workers are killed, and checks every answer
    Chaos(ChaosArgs),
}

/// Where requests go.
#[derive(Clone, Debug, ClapArgs)]
pub struct TargetArgs {
    /// The server: http://host:port, with or without /v1
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// Sent as a bearer token
    #[arg(long, env = "DISPATCHER_BENCH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// `model` of each request; without it none is sent
    #[arg(long)]
    pub model: Option<String>,
}

impl TargetArgs {
    fn endpoint(&self) -> Result<Endpoint, BenchError> {
        Endpoint::parse(&self.url, self.api_key.clone())
    }
}

#[derive(Debug, ClapArgs)]
pub struct FloodArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Streams at a time
    #[arg(long, default_value_t = 64)]
    pub readers: u32,
    /// Streams in all
    #[arg(long, default_value_t = 640)]
    pub requests: u64,
    /// Tokens of each answer
    #[arg(long, default_value_t = 256)]
    pub max_tokens: u32,
    /// Words of each prompt
    #[arg(long, default_value_t = 16)]
    pub prompt_words: u32,
    /// Threads that read
    #[arg(long, default_value_t = 1)]
    pub threads: u32,
    /// Rest between two rounds over the sockets, microseconds: longer is cheaper, and first-token times are as coarse
    #[arg(long, default_value_t = 1_000)]
    pub pace_us: u64,
    /// Further members of each request, as a JSON object
    #[arg(long)]
    pub extra: Option<String>,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object instead of words
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, ClapArgs)]
pub struct ChaosArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Streams at a time
    #[arg(long, default_value_t = 16)]
    pub streams: u32,
    /// Streams in all; more are sent if the kills need them
    #[arg(long, default_value_t = 200)]
    pub requests: u64,
    /// Workers to be killed (SIGKILL), at moments spread evenly over the run's progress; their numbers come from /status
    #[arg(long, default_value_t = 10)]
    pub kills: u64,
    /// Tokens of each answer
    #[arg(long, default_value_t = 64)]
    pub max_tokens: u32,
    /// Different prompts; each is first asked once without kills, which is what later answers are held to
    #[arg(long, default_value_t = 32)]
    pub prompts: u32,
    /// Words of each prompt
    #[arg(long, default_value_t = 12)]
    pub prompt_words: u32,
    /// Sampling temperature; above 0 each request carries the seed
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// What an answer must be
    #[arg(long, value_enum, default_value_t = chaos::Verify::Exact)]
    pub verify: chaos::Verify,
    /// Reference answers are asked one at a time, so that they ran in a batch of one
    #[arg(long)]
    pub learn_alone: bool,
    /// Draws prompts, kill moments and victims
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The dispatcher's process: its open files and memory are compared before and after
    #[arg(long)]
    pub dispatcher_pid: Option<u32>,
    /// At the end send the dispatcher SIGTERM and look for workers that outlive it
    #[arg(long, requires = "dispatcher_pid")]
    pub stop: bool,
    /// Let answers end where the model ends them
    #[arg(long)]
    pub respect_eos: bool,
    /// A stream in which nothing comes for so long is lost, seconds
    #[arg(long, default_value_t = 120)]
    pub silence_s: u64,
    /// Further members of each request, as a JSON object
    #[arg(long)]
    pub extra: Option<String>,
    /// Raw samples and kills are appended here
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Print one JSON object instead of words
    #[arg(long)]
    pub json: bool,
}

/// Carries out what was asked.
///
/// # Errors
/// Whatever kept it from measuring, or a promise that was measured broken.
pub fn run(args: Args) -> Result<(), BenchError> {
    match args.verb {
        Verb::Flood(args) => run_flood(&args),
        Verb::Chaos(args) => run_chaos(&args),
    }
}

fn run_flood(args: &FloodArgs) -> Result<(), BenchError> {
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
            target: args.target.url.clone(),
            reason: flooded.messages.into_iter().next().unwrap_or_default(),
        });
    }
    Ok(())
}

fn run_chaos(args: &ChaosArgs) -> Result<(), BenchError> {
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

fn extra(text: Option<&str>) -> Result<serde_json::Map<String, serde_json::Value>, BenchError> {
    let Some(text) = text else {
        return Ok(serde_json::Map::new());
    };
    serde_json::from_str(text)
        .map_err(|error| BenchError::Usage(format!("--extra is no JSON object: {error}")))
}

/// One thread: it is not the client that is to be fast, and what it leaves belongs to the server.
fn runtime() -> Result<tokio::runtime::Runtime, BenchError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| BenchError::System {
            what: "start the event loop",
            source,
        })
}

#[expect(clippy::print_stdout, reason = "the result of a command line tool")]
fn say(text: &str) {
    println!("{text}");
}
