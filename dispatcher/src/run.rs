//! Puts the parts together and runs them until the dispatcher is told to end.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use proto::{Generation, InstanceId};
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};

use crate::clock::Clock;
use crate::config::Config;
use crate::crash::CrashLog;
use crate::driver::Driver;
use crate::effect::{World, inputs};
use crate::error::RunError;
use crate::fleet::{CommandOf, Fleet};
use crate::gateway::Gateway;
use crate::http::{self, Front, FrontConfig};
use crate::ledger::Ledger;
use crate::link::{Context, DirectoryError, Expectations, Listener, RunDirectory};
use crate::machine::Dispatch;
use crate::metrics::Metrics;
use crate::model::EngineKind;
use crate::process::sweep::sweep;
use crate::process::{self, Processes, WorkerCommand};
use crate::record::Recorder;
use crate::signal;
use crate::state::{State, StateFile};
use crate::view::View;

/// After the driver's end, how long responses may take to be written out.
const FLUSH: Duration = Duration::from_secs(5);
/// Version and commit, for people.
pub const BUILD: &str = env!("CARGO_PKG_VERSION");

/// Serves as `config` says until a signal ends it. Blocks the calling thread, which spawns the
/// workers: they die with it.
///
/// # Errors
///
/// Where it could not start, or where no instance ever could.
pub fn run(config: Config) -> Result<(), RunError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("dispatcher-io")
        .build()
        .map_err(|cause| RunError::Machine {
            what: "start the runtime",
            cause,
        })?;
    let result = runtime.block_on(serve(config));
    runtime.shutdown_timeout(FLUSH);
    result
}

async fn serve(config: Config) -> Result<(), RunError> {
    let clock = Clock::start();
    for note in &config.notes {
        tracing::warn!("{note}");
    }
    if let Some(plan) = &config.plan {
        tracing::info!("memory: {plan}");
    }
    // First of all: two dispatchers on one port have one run directory too.
    let http_listener = listen(config.listen).await?;
    let address = http_listener
        .local_addr()
        .map_err(|cause| RunError::Listen {
            address: config.listen,
            cause,
        })?;
    let directory =
        RunDirectory::open(&config.run_dir).map_err(|error| run_directory(&config, error))?;
    let swept = sweep(&directory).map_err(|cause| RunError::RunDirectory {
        directory: config.run_dir.display().to_string(),
        cause,
    })?;
    if swept.killed > 0 {
        tracing::warn!(
            killed = swept.killed,
            "workers of a dead dispatcher were swept"
        );
    }
    let (inputs, inputs_receiver) = inputs();
    let metrics = Metrics::new(config.instances, &config.served_model_name);
    let expectations = Expectations::new();
    let links = Listener::bind(&directory).map_err(|error| RunError::RunDirectory {
        directory: config.run_dir.display().to_string(),
        cause: io::Error::other(error),
    })?;
    let links_task = tokio::spawn(links.serve(Context {
        clock,
        inputs: inputs.clone(),
        expectations: expectations.clone(),
        observer: Arc::new(metrics.clone()),
        build: BUILD.to_owned(),
    }));
    let signals = signal::listen(inputs.clone()).map_err(|cause| RunError::Machine {
        what: "listen for signals",
        cause,
    })?;

    let (view_sender, view) = watch::channel(Arc::new(View::default()));
    let (gateway, commands) = Gateway::new(clock, view);
    let front = Front {
        gateway,
        metrics: metrics.clone(),
        config: FrontConfig {
            served_model: config.served_model_name.clone(),
            api_keys: config.api_keys.as_slice().to_vec(),
            stop_timeout: FLUSH,
            ..FrontConfig::default()
        },
    };
    let (stop_http, http_stopped) = oneshot::channel::<()>();
    let http_task = tokio::spawn(http::serve(http_listener, front, async move {
        // A dropped sender stops it as well as a sent word.
        let _ = http_stopped.await;
    }));

    let processes = Processes::new(directory.path(), inputs);
    let fleet = Fleet::new(
        config.instances,
        worker_command(&config, &directory),
        expectations,
        processes,
    );
    let world = World::new(
        fleet,
        Ledger::new(random_key()?),
        Recorder::new(metrics, CrashLog::new(directory.path().join("crashes"))),
        config.served_model_name.clone(),
    );
    let seed = u64::from_le_bytes(first_eight(&random_key()?));
    let machine = Dispatch::new(config.policy(), seed, clock.now());
    let driver = Driver::new(
        clock,
        machine,
        world,
        inputs_receiver,
        commands,
        view_sender,
    );

    let state = State {
        pid: std::process::id(),
        address: address.to_string(),
        version: BUILD.to_owned(),
    };
    let state_file =
        StateFile::write(directory.path(), &state).map_err(|cause| RunError::RunDirectory {
            directory: config.run_dir.display().to_string(),
            cause,
        })?;
    tracing::info!(
        %address,
        model = config.served_model_name,
        engine = config.engine.as_str(),
        instances = config.instances,
        slots = config.slots,
        context_tokens = config.context_tokens,
        threads = config.threads,
        "listening on http://{address}"
    );

    let ended = driver.run().await;

    drop(state_file);
    let _ = stop_http.send(());
    if tokio::time::timeout(FLUSH, http_task).await.is_err() {
        tracing::warn!("some responses were not written out in time");
    }
    signals.abort();
    links_task.abort();
    ended.map_err(RunError::NothingStarts)
}

async fn listen(address: SocketAddr) -> Result<TcpListener, RunError> {
    TcpListener::bind(address)
        .await
        .map_err(|cause| RunError::Listen { address, cause })
}

fn run_directory(config: &Config, error: DirectoryError) -> RunError {
    RunError::RunDirectory {
        directory: config.run_dir.display().to_string(),
        cause: io::Error::other(error),
    }
}

fn worker_command(config: &Config, directory: &RunDirectory) -> Box<CommandOf> {
    let template = WorkerCommand {
        program: config.worker.clone(),
        instance: InstanceId(0),
        generation: Generation(0),
        socket: directory.socket(),
        engine: match config.engine {
            EngineKind::Llama => process::EngineKind::Llama,
            EngineKind::Mlx => process::EngineKind::Mlx,
            EngineKind::Scripted => process::EngineKind::Scripted,
        },
        // The scripted engine has no model, but the command line has a place for one.
        model: config.model.clone().unwrap_or_else(|| "scripted".into()),
        slots: config.slots,
        context_tokens: config.context_tokens,
        threads: config.threads,
        gpu_layers: config.n_gpu_layers,
        scripted: config.scripted.clone(),
        environment: Vec::new(),
    };
    Box::new(move |instance, generation| WorkerCommand {
        instance,
        generation,
        ..template.clone()
    })
}

/// 32 bytes from the system's randomness.
fn random_key() -> Result<[u8; 32], RunError> {
    crate::link::Token::generate()
        .map(|token| *token.as_bytes())
        .map_err(|cause| RunError::Machine {
            what: "read the system's randomness",
            cause,
        })
}

fn first_eight(key: &[u8; 32]) -> [u8; 8] {
    let mut eight = [0; 8];
    eight.copy_from_slice(&key[..8]);
    eight
}
