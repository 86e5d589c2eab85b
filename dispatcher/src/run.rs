//! Puts the parts together and runs them until the dispatcher is told to end.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use proto::{Generation, InstanceId};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::{mpsc, oneshot, watch};

use crate::budget::Budget;
use crate::bus::learned::Observed;
use crate::bus::usage::Known;
use crate::bus::watch::Measuring;
use crate::bus::{Learned, Machine, Measurement, StepTimes, Store};
use crate::cli::Settings;
use crate::clock::Clock;
use crate::config::{Config, ConfigError, LogFormat, Surroundings};
use crate::crash::CrashLog;
use crate::descriptors::{self, Connections};
use crate::devices;
use crate::driver::Driver;
use crate::effect::{Bus, World, inputs};
use crate::error::{Fault, RunError};
use crate::fleet::{CommandOf, Fleet};
use crate::gateway::Gateway;
use crate::handover::{self, Conductor};
use crate::http::{self, Front, FrontConfig};
use crate::input::Input;
use crate::ledger::Ledger;
use crate::link::{Context, DirectoryError, Expectations, Listener, RunDirectory};
use crate::log;
use crate::machine::Dispatch;
use crate::memory::{self, watch::Watch};
use crate::metrics::Metrics;
use crate::model::EngineKind;
use crate::parked::{self, Next, Parked};
use crate::plan::ModelFacts;
use crate::plan::calibration::{self, Calibrations};
use crate::process::sweep::sweep;
use crate::process::{Processes, WorkerCommand};
use crate::reconfigure::Reconfigure;
use crate::record::Recorder;
use crate::service::notifier::Notifier;
use crate::signal;
use crate::socket::{self, SocketError};
use crate::state::{State, StateFile};
use crate::view::View;

/// After the driver's end, how long responses may take to be written out.
pub(crate) const FLUSH: Duration = Duration::from_secs(5);
/// Connections that the kernel may hold until they are accepted; it lowers this to its own bound.
const BACKLOG: u32 = 4096;
/// Signals that may wait to be acted on.
const SIGNALS_MAX: usize = 8;
/// Version and commit, for people.
pub const BUILD: &str = env!("CARGO_PKG_VERSION");

/// Serves as `settings` mean until a signal ends it. `refusal`: why what was typed cannot be
/// understood, which no reading of a file can mend. Blocks the calling thread, which spawns the
/// workers: they die with it.
///
/// # Errors
///
/// Where it could not start, or where no instance ever could. With a socket that outlives this process
/// a configuration that cannot work is no such error: see the module `parked`.
pub fn run(settings: &Settings, refusal: Option<String>) -> Result<(), RunError> {
    // First of all: they read the environment, which no other thread may do meanwhile.
    let inherited = socket::inherited()?;
    let mut notifier = Notifier::from_environment();
    let read = || match &refusal {
        Some(words) => Err(ConfigError::Conflict(words.clone())),
        None => Config::resolve(settings, &Surroundings::probe()),
    };
    let first = read();
    if inherited.is_none()
        && let Err(error) = first
    {
        return Err(error.into());
    }
    log::init(
        first
            .as_ref()
            .map_or(LogFormat::Auto, |config| config.log_format),
    );
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("dispatcher-io")
        .build()
        .map_err(|cause| RunError::Machine {
            what: "start the runtime",
            cause,
        })?;
    let result = runtime.block_on(live(first, read, settings, inherited, &mut notifier));
    runtime.shutdown_timeout(FLUSH);
    result
}

/// Serves, and where what is configured cannot work waits for a configuration that can.
async fn live(
    first: Result<Config, ConfigError>,
    read: impl Fn() -> Result<Config, ConfigError>,
    settings: &Settings,
    inherited: Option<std::net::TcpListener>,
    notifier: &mut Notifier,
) -> Result<(), RunError> {
    let (signal_sender, mut signals) = mpsc::channel(SIGNALS_MAX);
    // Once for the life of the process: a signal between two stretches of serving is not lost.
    let _listening = signal::listen(signal_sender).map_err(|cause| RunError::Machine {
        what: "listen for signals",
        cause,
    })?;
    let mut read_last = first;
    let mut reloads = 0;
    loop {
        let again = |socket: &std::net::TcpListener| socket.try_clone().map_err(SocketError::from);
        let refused = match read_last {
            Ok(config) => {
                let socket = inherited.as_ref().map(again).transpose()?;
                let served = serve(
                    config,
                    settings,
                    socket,
                    &mut signals,
                    notifier,
                    &mut reloads,
                );
                match served.await {
                    Err(error) if error.fault() == Fault::Configuration => error,
                    ended => return ended,
                }
            }
            Err(error) => error.into(),
        };
        let Some(socket) = &inherited else {
            return Err(refused);
        };
        let listener = TcpListener::from_std(again(socket)?).map_err(SocketError::from)?;
        let run_dir = Config::run_directory(settings, &Surroundings::probe()).ok();
        let parked = Parked {
            cause: refused.to_string(),
            reloads,
            run_dir: run_dir.as_deref(),
        };
        match parked::wait(listener, parked, &mut signals, notifier).await {
            Next::End => return Ok(()),
            Next::ReadAgain => {
                reloads += 1;
                // Nothing else runs on this thread now that could wait for it.
                read_last = read();
            }
        }
    }
}

async fn serve(
    config: Config,
    settings: &Settings,
    inherited: Option<std::net::TcpListener>,
    signals: &mut mpsc::Receiver<Input>,
    notifier: &mut Notifier,
    reloads: &mut u64,
) -> Result<(), RunError> {
    let clock = Clock::start();
    for note in &config.notes {
        tracing::warn!("{note}");
    }
    if let Some(plan) = &config.plan {
        tracing::info!("memory: {plan}");
    }
    // First of all: two dispatchers on one port have one run directory too.
    let is_inherited = inherited.is_some();
    let http_listener = match inherited {
        Some(socket) => TcpListener::from_std(socket).map_err(SocketError::from)?,
        None => listen(config.listen)?,
    };
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
    let learned = Learned::default();
    let expectations = Expectations::new();
    let links = Listener::bind(&directory).map_err(|error| RunError::RunDirectory {
        directory: config.run_dir.display().to_string(),
        cause: io::Error::other(error),
    })?;
    let links_task = tokio::spawn(links.serve(Context {
        clock,
        inputs: inputs.clone(),
        expectations: expectations.clone(),
        observer: Arc::new(Observed {
            metrics: metrics.clone(),
            learned: learned.clone(),
        }),
        build: BUILD.to_owned(),
    }));
    let (view_sender, view) = watch::channel(Arc::new(View::default()));
    let reloads_read = view.clone();
    let watch = Watch {
        view: view.clone(),
        inputs: inputs.clone(),
        limit: config.memory,
        mapped: match (&config.plan, cfg!(target_os = "macos")) {
            (Some(plan), true) => plan.costs.mapped,
            _ => 0,
        },
    };
    let watch_task = tokio::spawn(watch.serve(memory::watch::System));
    let last_view = view.clone();
    let bus = bus(&config, view.clone(), inputs.clone(), learned.clone());
    let (gateway, commands) = Gateway::new(clock, view);
    let usual = FrontConfig::default();
    let connections = descriptors::make_room(
        config.instances,
        Connections {
            max: usual.connections_max,
            reserve: usual.connections_reserve,
        },
    )
    .map_err(|cause| RunError::Machine {
        what: "read the limit of open files",
        cause,
    })?;
    let (mut conductor, last_call) = is_inherited.then(handover::last_call).unzip();
    let conducted = conduct(conductor.as_mut(), signals, inputs.clone(), gateway.clone());
    let front = Front {
        gateway,
        metrics: metrics.clone(),
        config: FrontConfig {
            served_model: config.served_model_name.clone(),
            api_keys: config.api_keys.as_slice().to_vec(),
            stop_timeout: FLUSH,
            connections_max: connections.max,
            connections_reserve: connections.reserve,
            ..usual
        },
    };
    let (stop_http, http_stopped) = oneshot::channel::<()>();
    let http_task = tokio::spawn(http::serve(http_listener, front, last_call, async move {
        // A dropped sender stops it as well as a sent word.
        let _ = http_stopped.await;
    }));

    let reconfigure = Reconfigure::new(
        settings.clone(),
        config.clone(),
        directory.socket(),
        inputs.clone(),
        *reloads,
    );
    let processes = Processes::new(directory.path(), inputs);
    let fleet = Fleet::new(
        config.instances,
        worker_command(&config, directory.socket()),
        expectations,
        processes,
    );
    let world = World::new(
        fleet,
        Ledger::new(random_key()?),
        Recorder::new(metrics, CrashLog::new(directory.path().join("crashes"))),
        Budget::new(config.instances, config.memory, config.plan.as_ref()),
        reconfigure,
        bus,
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
        notifier,
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
        inherited = is_inherited,
        "listening on http://{address}"
    );

    // Beside the driver, on its thread: signals are the process's, and go on after it.
    let ended = tokio::select! {
        ended = driver.run() => ended,
        never = conducted => match never {},
    };
    keep_learnt(&config, &learned.read(), last_view.borrow().reloads);

    drop(state_file);
    if let Some(conductor) = conductor {
        conductor.settle().await;
    }
    let _ = stop_http.send(());
    if tokio::time::timeout(FLUSH, http_task).await.is_err() {
        tracing::warn!("some responses were not written out in time");
    }
    watch_task.abort();
    links_task.abort();
    // A successor in this process binds the same path.
    let _ = links_task.await;
    *reloads = reloads_read.borrow().reloads;
    ended.map_err(RunError::NothingStarts)
}

/// What is known of the memory bus; where nothing is, the first idle moment is used to measure it.
fn bus(
    config: &Config,
    view: watch::Receiver<Arc<View>>,
    inputs: mpsc::Sender<Input>,
    learned: Learned,
) -> Bus {
    let machine = Machine::probe();
    let store = Store::new(&config.cache_dir);
    let measured = store.get(&machine);
    let known = Known {
        machine: machine.clone(),
        weights: config.weights,
        threads: config.threads,
        measured,
    };
    // A script reads no weights.
    let is_settled = known.measured.as_ref().is_some_and(Measurement::is_settled);
    if !is_settled && config.engine != EngineKind::Scripted {
        let measuring = Measuring {
            view,
            inputs,
            machine,
            store,
        };
        tokio::spawn(measuring.serve());
    }
    Bus { known, learned }
}

/// Keeps how long steps took for later plans. One instance alone says how long they take; after a
/// reload they may be another model's. What was timed on purpose is worth more.
fn keep_learnt(config: &Config, times: &StepTimes, reloads: u64) {
    let Some(path) = config.model.as_ref() else {
        return;
    };
    if config.instances != 1 || reloads > 0 {
        return;
    }
    let Some(learnt) = calibration::learnt(times, &config.served_model_name) else {
        return;
    };
    let Ok(model) = ModelFacts::read(path) else {
        return;
    };
    let device = config.devices.first().map_or("", |device| &device.name);
    let key = calibration::key(&Machine::probe(), &model, config.threads, device);
    let kept = Calibrations::new(&config.cache_dir);
    if kept
        .get(&key)
        .is_some_and(|known| known.origin != learnt.origin)
    {
        return;
    }
    if let Err(error) = kept.put(&key, &learnt) {
        tracing::warn!("how long steps took cannot be kept for later plans: {error}");
    }
}

/// Passes signals on for as long as it is polled.
async fn conduct(
    conductor: Option<&mut Conductor>,
    signals: &mut mpsc::Receiver<Input>,
    inputs: mpsc::Sender<Input>,
    gateway: Gateway,
) -> Infallible {
    match conductor {
        Some(conductor) => conductor.conduct(signals, inputs, gateway).await,
        None => {
            while let Some(input) = signals.recv().await {
                // A driver that is gone has ended, and this with it.
                let _ = inputs.send(input).await;
            }
        }
    }
    std::future::pending().await
}

fn listen(address: SocketAddr) -> Result<TcpListener, RunError> {
    let listen = || {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4()?,
            SocketAddr::V6(_) => TcpSocket::new_v6()?,
        };
        // A successor must not wait for the kernel to forget old connections.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().map_err(|cause| RunError::Listen { address, cause })
}

fn run_directory(config: &Config, error: DirectoryError) -> RunError {
    RunError::RunDirectory {
        directory: config.run_dir.display().to_string(),
        cause: io::Error::other(error),
    }
}

/// How `config` has workers started, which connect to `socket`.
pub(crate) fn worker_command(config: &Config, socket: PathBuf) -> Box<CommandOf> {
    let template = WorkerCommand {
        // A bare name is a file here, not a program somewhere on the search path.
        program: std::path::absolute(&config.worker).unwrap_or_else(|_| config.worker.clone()),
        instance: InstanceId(0),
        generation: Generation(0),
        socket,
        engine: config.engine,
        // The scripted engine has no model, but the command line has a place for one.
        model: config.model.clone().unwrap_or_else(|| "scripted".into()),
        slots: config.slots,
        context_tokens: config.context_tokens,
        threads: config.threads,
        gpu_layers: config.n_gpu_layers,
        scripted: config.scripted.clone(),
        device: None,
        environment: Vec::new(),
    };
    let devices = config.devices.clone();
    Box::new(move |instance, generation| WorkerCommand {
        instance,
        generation,
        device: devices::assigned(&devices, instance.0).cloned(),
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
