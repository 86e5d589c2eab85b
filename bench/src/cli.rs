//! The arguments.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

use crate::chaos;
use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::synth;

/// Measures any OpenAI-compatible endpoint, queue included.
#[derive(Debug, Parser)]
#[command(name = "dispatcher-bench", version, about)]
pub struct Args {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// One request at a time: the study's first table
    Single(MatrixArgs),
    /// One server at several concurrencies: the study's flat line, or not
    Sweep(SweepArgs),
    /// K instances under one load: the study's second table
    Scale(ScaleArgs),
    /// K × slots as a grid
    Surface(ScaleArgs),
    /// Open loops: requests arrive whether or not the server keeps up
    Load(LoadArgs),
    /// Two servers, run in turn, and whether one is faster
    Compare(CompareArgs),
    /// Read bandwidth of this machine's memory
    Bus(BusArgs),
    /// Writes a GGUF with a real model's shapes and random contents, to measure a machine with
    Synth(SynthArgs),
    /// Tables (and a plot) of result files
    Report(ReportArgs),
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
    /// The URL, taken apart.
    ///
    /// # Errors
    /// It is no URL that the bench can speak to.
    pub fn endpoint(&self) -> Result<Endpoint, BenchError> {
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
    /// Kill by SIGABRT instead, which counts as the engine's own death: a request under which two die fails
    #[arg(long)]
    pub abort: bool,
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

/// Rules that a run is made by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Rules {
    /// The study's workload, counts and definitions, nothing corrected
    StudyV1,
    /// Cold and warm apart, five repeats in shuffled order
    V2,
}

/// What `single` needs, and every other matrix too.
#[derive(Clone, Debug, ClapArgs)]
pub struct MatrixArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Start this server for each cell instead of using --url; {port}, {instances} and {slots} stand for the cell's
    #[arg(long, value_name = "COMMAND")]
    pub exec: Option<String>,
    /// A server by name: NAME=http://… or NAME=COMMAND; may be given several times, then --url and --exec don't count
    #[arg(long, value_name = "NAME=WHERE")]
    pub arm: Vec<String>,
    #[arg(long, value_enum, default_value_t = Rules::StudyV1)]
    pub rules: Rules,
    /// Measured requests of each cell [default: 20 for single, 16 else, as in the study]
    #[arg(long)]
    pub requests: Option<u64>,
    /// Runs of each cell [default: 1 by study-v1, 5 by v2 and compare]
    #[arg(long)]
    pub repeats: Option<u32>,
    /// Tokens of each answer
    #[arg(long, default_value_t = 256)]
    pub max_tokens: u32,
    /// Answers always have their full length
    #[arg(long)]
    pub ignore_eos: bool,
    /// Prompts of about so many tokens, all different, instead of the study's twelve
    #[arg(long, value_name = "TOKENS")]
    pub random_prompts: Option<u32>,
    /// With --random-prompts: so many tokens more that all prompts begin with
    #[arg(long, value_name = "TOKENS", requires = "random_prompts")]
    pub shared_prefix: Option<u32>,
    /// Further members of each request, as a JSON object
    #[arg(long)]
    pub extra: Option<String>,
    /// Rest between two servers, seconds
    #[arg(long, default_value_t = 2)]
    pub cool_down_s: u64,
    /// A started server may take so long to be ready, seconds
    #[arg(long, default_value_t = 300)]
    pub ready_within_s: u64,
    /// A stream in which nothing comes for so long is given up, seconds
    #[arg(long, default_value_t = 300)]
    pub silence_s: u64,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Raw records are appended to this file
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// What started servers say is appended to this file
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub struct SweepArgs {
    #[command(flatten)]
    pub matrix: MatrixArgs,
    /// Requests in flight
    #[arg(long, value_delimiter = ',', default_value = "1,4,8,16,32")]
    pub concurrency: Vec<u32>,
    /// For --exec: {instances}
    #[arg(long, default_value_t = 1)]
    pub instances: u32,
    /// For --exec: {slots}
    #[arg(long, default_value_t = 1)]
    pub slots: u32,
}

#[derive(Debug, ClapArgs)]
pub struct ScaleArgs {
    #[command(flatten)]
    pub matrix: MatrixArgs,
    /// Sizes K
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    pub instances: Vec<u32>,
    /// Slots of each instance
    #[arg(long, value_delimiter = ',', default_value = "1")]
    pub slots: Vec<u32>,
    /// Requests in flight
    #[arg(long, default_value_t = 16)]
    pub concurrency: u32,
}

#[derive(Debug, ClapArgs)]
pub struct LoadArgs {
    #[command(flatten)]
    pub matrix: MatrixArgs,
    /// Arrivals per second
    #[arg(long, value_delimiter = ',', default_value = "1")]
    pub rate: Vec<f64>,
    /// Coefficient of variation of the gaps: 1 is Poisson, 0 is even
    #[arg(long, default_value_t = 1.0)]
    pub burstiness: f64,
    /// For --exec: {instances}
    #[arg(long, default_value_t = 1)]
    pub instances: u32,
    /// For --exec: {slots}
    #[arg(long, default_value_t = 1)]
    pub slots: u32,
    /// A good request has its first token within this, milliseconds
    #[arg(long, default_value_t = 2_000.0)]
    pub slo_ttft_ms: f64,
    /// … and its later tokens at this pace, milliseconds each
    #[arg(long, default_value_t = 100.0)]
    pub slo_tpot_ms: f64,
}

#[derive(Debug, ClapArgs)]
pub struct CompareArgs {
    #[command(flatten)]
    pub matrix: MatrixArgs,
    /// Compare the runs of two result files instead of running anything
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    pub files: Vec<PathBuf>,
    /// Requests in flight
    #[arg(long, default_value_t = 8)]
    pub concurrency: u32,
    /// For started servers: {instances}
    #[arg(long, default_value_t = 1)]
    pub instances: u32,
    /// For started servers: {slots}
    #[arg(long, default_value_t = 1)]
    pub slots: u32,
}

#[derive(Debug, ClapArgs)]
pub struct BusArgs {
    /// Threads that read [default: 1, and all cores]
    #[arg(long, value_delimiter = ',')]
    pub threads: Vec<usize>,
    /// Size of the array, MiB [default: 4 times the largest cache, at least 512]
    #[arg(long)]
    pub mib: Option<usize>,
    #[arg(long, default_value_t = 12)]
    pub passes: usize,
    /// Print JSON instead of words
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, ClapArgs)]
pub struct SynthArgs {
    /// Whose shapes
    #[arg(long, value_enum, default_value_t = synth::Model::Qwen7B)]
    pub shapes: synth::Model,
    /// A GGUF file whose tokenizer and chat template are taken, and filled up to the shapes' vocabulary
    #[arg(long, value_name = "FILE")]
    pub tokenizer: PathBuf,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The file to write; 4.7 GB for qwen2.5-7b
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
}

#[derive(Debug, ClapArgs)]
pub struct ReportArgs {
    /// Result files
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// Also draw aggregate tokens per second, as SVG, into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Limits of a good request in open loops, milliseconds
    #[arg(long, default_value_t = 2_000.0)]
    pub slo_ttft_ms: f64,
    #[arg(long, default_value_t = 100.0)]
    pub slo_tpot_ms: f64,
}
