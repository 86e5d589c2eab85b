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
    /// K × slots × concurrency as a grid, in shuffled order
    Surface(ScaleArgs),
    /// The study: single, sweep and scale for each engine that is here, beside the study's own tables
    Study(StudyArgs),
    /// Open loops: requests arrive whether or not the server keeps up
    Load(LoadArgs),
    /// Two servers, run in turn, and whether one is faster
    Compare(CompareArgs),
    /// Read bandwidth of this machine's memory
    Bus(BusArgs),
    /// Writes a GGUF with a real model's shapes and random contents, to measure a machine with
    Synth(SynthArgs),
    /// Tables, plots and the verdict of result files
    Report(ReportArgs),
    /// Reads many streams at next to no cost of its own: what the server can carry
    Flood(FloodArgs),
    /// Sends streams while workers are killed, and checks every answer
    Chaos(ChaosArgs),
}

/// Where requests go.
#[derive(Clone, Debug, ClapArgs)]
pub struct TargetArgs {
    /// The server: http://host:port, with or without /v1 [default: http://127.0.0.1:8080]
    #[arg(long)]
    pub url: Option<String>,
    /// Sent as a bearer token
    #[arg(long, env = "DISPATCHER_BENCH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// `model` of each request; without it none is sent
    #[arg(long)]
    pub model: Option<String>,
}

impl TargetArgs {
    /// As given, or the default.
    #[must_use]
    pub fn url(&self) -> &str {
        self.url.as_deref().unwrap_or("http://127.0.0.1:8080")
    }

    /// The URL, taken apart.
    ///
    /// # Errors
    /// It is no URL that the bench can speak to.
    pub fn endpoint(&self) -> Result<Endpoint, BenchError> {
        Endpoint::parse(self.url(), self.api_key.clone())
    }
}

/// How our own server is started.
#[derive(Clone, Debug, ClapArgs)]
pub struct ServeArgs {
    /// Start the dispatcher with this model for each cell, with the cell's instances and slots, instead of using --url
    #[arg(long, value_name = "MODEL", conflicts_with = "exec")]
    pub serve: Option<PathBuf>,
    /// The dispatcher's program [default: the one beside this program, else the one on the path]
    #[arg(long, value_name = "FILE")]
    pub dispatcher: Option<PathBuf>,
    /// Further flags for it, such as "--threads 1"
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true)]
    pub dispatcher_flags: Option<String>,
}

/// Two numbers with a hyphen between them, or one that is both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub low: u32,
    pub high: u32,
}

impl std::str::FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| -> Result<u32, String> {
            let number = text.trim().parse().map_err(|error| format!("{error}"))?;
            if number == 0 {
                return Err("it begins at 1".into());
            }
            Ok(number)
        };
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        let (low, high) = (number(low)?, number(high)?);
        if low > high {
            return Err(format!("{low} is above {high}"));
        }
        Ok(Self { low, high })
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
    #[command(flatten)]
    pub serve: ServeArgs,
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
    /// Tokens of each answer; LOW-HIGH draws a bound for each [default: 256, by study --quick 32]
    #[arg(long, value_name = "TOKENS")]
    pub max_tokens: Option<Span>,
    /// Answers always have their full length
    #[arg(long)]
    pub ignore_eos: bool,
    /// Prompts of about so many tokens, or LOW-HIGH, all different, instead of the study's twelve
    #[arg(long, value_name = "TOKENS")]
    pub random_prompts: Option<Span>,
    /// A text of about so many tokens with a question at its end, each text different
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["random_prompts", "trace"])]
    pub long_context: Option<u32>,
    /// Requests from a file: a JSON object a line with at_ms, prompt or prompt_tokens, and max_tokens
    #[arg(long, value_name = "FILE", conflicts_with = "random_prompts")]
    pub trace: Option<PathBuf>,
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
    /// Go on with a run of --out that was interrupted, if there is one of the same question
    #[arg(long, requires = "out")]
    pub resume: bool,
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
    #[arg(long, value_delimiter = ',', default_value = "16")]
    pub concurrency: Vec<u32>,
}

/// What a user calls good.
#[derive(Clone, Copy, Debug, ClapArgs)]
pub struct SloArgs {
    /// A good request has its first token within this, milliseconds
    #[arg(long, default_value_t = 2_000.0)]
    pub slo_ttft_ms: f64,
    /// … and its later tokens at this pace, milliseconds each
    #[arg(long, default_value_t = 100.0)]
    pub slo_tpot_ms: f64,
}

/// Where a report is also written to.
#[derive(Clone, Debug, Default, ClapArgs)]
pub struct PagesArgs {
    /// Also write one page with tables and plots that needs nothing else
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Also draw aggregate tokens per second, as SVG
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// The same as PNG
    #[arg(long, value_name = "FILE")]
    pub png: Option<PathBuf>,
    /// Also write the distributions of TTFT, gaps and totals, as an HdrHistogram interval log
    #[arg(long, value_name = "FILE")]
    pub hlog: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub struct StudyArgs {
    #[command(flatten)]
    pub matrix: MatrixArgs,
    /// 32 tokens and 4 requests a level, up to 4 in flight: minutes instead of a quarter of an hour, and a contract of its own
    #[arg(long)]
    pub quick: bool,
    /// The model for llama.cpp [default: the only GGUF file in the models directory]
    #[arg(long, value_name = "FILE")]
    pub llama: Option<PathBuf>,
    /// The model for MLX [default: the only model folder in the models directory]
    #[arg(long, value_name = "FOLDER")]
    pub mlx: Option<PathBuf>,
    /// Where both are looked for
    #[arg(long, value_name = "DIR", default_value = "models")]
    pub models_dir: PathBuf,
    /// Slots of the sweep's second line; the first has one, as in the study
    #[arg(long, default_value_t = 8)]
    pub slots: u32,
    /// Sizes K of the scale table
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    pub instances: Vec<u32>,
    #[command(flatten)]
    pub slo: SloArgs,
    #[command(flatten)]
    pub pages: PagesArgs,
}

#[derive(Debug, ClapArgs)]
pub struct LoadArgs {
    #[command(flatten)]
    pub matrix: MatrixArgs,
    /// Arrivals per second; with --trace, how many times as fast as recorded
    #[arg(long, value_delimiter = ',', default_value = "1")]
    pub rate: Vec<f64>,
    /// Begin at the first rate and raise it by half each time until the server is saturated
    #[arg(long, conflicts_with = "trace")]
    pub ramp: bool,
    /// Coefficient of variation of the gaps: 1 is Poisson, 0 is even
    #[arg(long, default_value_t = 1.0)]
    pub burstiness: f64,
    /// For --exec: {instances}
    #[arg(long, default_value_t = 1)]
    pub instances: u32,
    /// For --exec: {slots}
    #[arg(long, default_value_t = 1)]
    pub slots: u32,
    #[command(flatten)]
    pub slo: SloArgs,
}

#[derive(Debug, ClapArgs)]
pub struct CompareArgs {
    #[command(flatten)]
    pub matrix: MatrixArgs,
    /// Compare the runs of two result files instead of running anything
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    pub files: Vec<PathBuf>,
    /// Requests in flight
    #[arg(long, value_delimiter = ',', default_value = "8")]
    pub concurrency: Vec<u32>,
    /// For started servers: {instances}
    #[arg(long, default_value_t = 1)]
    pub instances: u32,
    /// For started servers: {slots}
    #[arg(long, default_value_t = 1)]
    pub slots: u32,
}

#[derive(Debug, ClapArgs)]
pub struct BusArgs {
    /// Threads that read [default: each number up to that of the cores, above 8 each power of two]
    #[arg(long, value_delimiter = ',')]
    pub threads: Vec<usize>,
    /// Also with so many processes at once, all threads divided among them
    #[arg(long, value_delimiter = ',', value_name = "K")]
    pub processes: Vec<usize>,
    /// Wait for a line on standard input before reading: how processes start together
    #[arg(long, hide = true)]
    pub wait: bool,
    /// Size of the array, MiB [default: 4 times the largest cache, at least 512]
    #[arg(long)]
    pub mib: Option<usize>,
    #[arg(long, default_value_t = 20)]
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
    /// Only runs of this verb
    #[arg(long, value_name = "VERB")]
    pub verb: Option<String>,
    #[command(flatten)]
    pub slo: SloArgs,
    #[command(flatten)]
    pub pages: PagesArgs,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_one_number_or_two_in_order() {
        let span = |text: &str| text.parse::<Span>();
        assert_eq!(span("7"), Ok(Span { low: 7, high: 7 }));
        assert_eq!(span("7-9"), Ok(Span { low: 7, high: 9 }));
        for bad in ["", "0", "9-7", "a", "-", "3-", "0-4"] {
            assert!(span(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_arguments_hold_together() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }
}
