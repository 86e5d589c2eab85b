//! `dispatcher service …`: the verbs, from what was typed to what is said.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, BufRead as _, Seek as _, Write as _};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::control::Control;
use super::intent::{Intent, Owner, intent};
use super::spec::{Scope, text};
use super::{Manager, ServiceError, files, report, systemd};
use crate::cli::Settings;

/// Between two looks at a log that is followed.
const LOOK: Duration = Duration::from_millis(250);
/// To stop a service whose own limit cannot be known.
const STOP_LIMIT_UNKNOWN: Duration = Duration::from_secs(120);

#[derive(Clone, Debug, Subcommand)]
pub enum ServiceVerb {
    /// Write the definition for launchd or systemd and start it; after a change: the new one.
    Install(InstallArgs),
    /// Stop it and remove the definition.
    Uninstall {
        #[command(flatten)]
        which: WhichService,
        /// Also a definition that another program wrote.
        #[arg(long)]
        force: bool,
    },
    /// Start it.
    Start(WhichService),
    /// Drain and stop it, and close its socket.
    Stop(WhichService),
    /// Drain it and start it again; its socket stays open meanwhile.
    Restart(WhichService),
    /// Its state, its settings with their sources, its last crash.
    Status {
        #[command(flatten)]
        which: WhichService,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// What it logged.
    Logs {
        #[command(flatten)]
        which: WhichService,
        /// Lines from the end.
        #[arg(long, short = 'n', default_value_t = 100, value_name = "N")]
        lines: u32,
        /// Go on with what comes.
        #[arg(long, short)]
        follow: bool,
    },
}

#[derive(Clone, Debug, Default, Args)]
pub struct WhichService {
    /// The machine's service (a LaunchDaemon, a system unit) instead of yours; needs root.
    #[arg(long)]
    pub system: bool,
    /// Who the machine's service runs as [default: who called sudo].
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
}

#[derive(Clone, Debug, Args)]
pub struct InstallArgs {
    #[command(flatten)]
    pub which: WhichService,
    /// Let the dispatcher listen by itself: connections are refused while it restarts.
    #[arg(long)]
    pub no_socket: bool,
    /// Replace a definition that was edited, or that another program or a newer version wrote.
    #[arg(long)]
    pub force: bool,
    /// Only show what would be written.
    #[arg(long)]
    pub print: bool,
}

/// Carries `verb` out and returns what to say.
///
/// # Errors
/// Where it cannot be done.
pub fn run(verb: &ServiceVerb, settings: &Settings) -> Result<String, ServiceError> {
    let manager = settings.service_manager.unwrap_or_else(Manager::native);
    let which = match verb {
        ServiceVerb::Install(install) => &install.which,
        ServiceVerb::Start(which) | ServiceVerb::Stop(which) | ServiceVerb::Restart(which) => which,
        ServiceVerb::Uninstall { which, .. }
        | ServiceVerb::Status { which, .. }
        | ServiceVerb::Logs { which, .. } => which,
    };
    let owner = Owner::find(manager, which.system, which.user.as_deref())?;
    let control = Control { owner: &owner };
    match verb {
        ServiceVerb::Install(arguments) => install(&control, settings, arguments),
        ServiceVerb::Uninstall { force, .. } => uninstall(&control, *force),
        ServiceVerb::Start(_) => {
            control.start(has_socket(&control)?)?;
            Ok("started; `dispatcher service status` says how it stands\n".to_owned())
        }
        ServiceVerb::Stop(_) => {
            has_socket(&control)?;
            control.stop(stop_limit(&owner))?;
            Ok("stopped\n".to_owned())
        }
        ServiceVerb::Restart(_) => {
            has_socket(&control)?;
            control.restart(stop_limit(&owner))?;
            Ok("restarted\n".to_owned())
        }
        ServiceVerb::Status { json, .. } => report::report(&control, settings, *json),
        ServiceVerb::Logs { lines, follow, .. } => {
            logs(&owner, *lines, *follow)?;
            Ok(String::new())
        }
    }
}

fn install(
    control: &Control<'_>,
    settings: &Settings,
    arguments: &InstallArgs,
) -> Result<String, ServiceError> {
    let owner = control.owner;
    let intent = intent(owner, settings, !arguments.no_socket)?;
    if arguments.print {
        let mut all = String::new();
        for one in &intent.definitions {
            // Writing to a String cannot fail.
            let _ = write!(all, "# {}\n{}\n", one.path.display(), one.sealed());
        }
        return Ok(all);
    }
    control.check()?;
    if owner.manager == Manager::Launchd {
        make_log_folder(owner, &intent)?;
    }
    let written = files::write(&intent.definitions, arguments.force)?;
    // A socket unit that an earlier install wrote, and this one does not want.
    let unwanted: Vec<_> = owner
        .possible()
        .into_iter()
        .filter(|one| {
            intent
                .definitions
                .iter()
                .all(|other| other.path != one.path)
        })
        .collect();
    let stop_limit = intent.spec.stop_limit.max(stop_limit(owner));
    if unwanted.iter().any(|one| one.path.exists()) {
        control.stop(stop_limit)?;
        files::remove(&unwanted, arguments.force)?;
    }
    let socket_changed = written.iter().any(|path| path.ends_with(systemd::SOCKET));
    control.install(intent.spec.socket, socket_changed, stop_limit)?;
    Ok(installed(owner, &intent, &written))
}

fn installed(owner: &Owner, intent: &Intent, written: &[std::path::PathBuf]) -> String {
    let mut said = String::new();
    for one in &intent.definitions {
        let word = if written.contains(&one.path) {
            "written"
        } else {
            "unchanged"
        };
        let _ = writeln!(said, "{word} {}", one.path.display());
    }
    let _ = writeln!(
        said,
        "started: http://{}, settings from {}",
        intent.config.listen,
        intent.spec.config.display()
    );
    for note in &intent.config.notes {
        let _ = writeln!(said, "note: {note}");
    }
    if owner.manager == Manager::Systemd && owner.scope == Scope::User {
        said.push_str(
            "note: it ends with your last session; `loginctl enable-linger` has it run from boot on\n",
        );
    }
    if owner.user.as_deref() == Some("root") {
        said.push_str("note: it runs as root; name another with `--user`\n");
    }
    said.push_str("see `dispatcher service status` and `dispatcher service logs`\n");
    said
}

/// launchd makes the file, but not its folder; the file is the service's own user's.
fn make_log_folder(owner: &Owner, intent: &Intent) -> Result<(), ServiceError> {
    let folder = intent.spec.log.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder).map_err(|cause| ServiceError::file(folder, cause))?;
    if owner.scope == Scope::System {
        std::os::unix::fs::chown(folder, Some(owner.uid), Some(owner.gid))
            .map_err(|cause| ServiceError::file(folder, cause))?;
    }
    Ok(())
}

fn uninstall(control: &Control<'_>, force: bool) -> Result<String, ServiceError> {
    let owner = control.owner;
    let possible = owner.possible();
    if possible.iter().all(|one| !one.path.exists()) {
        return Err(ServiceError::NotInstalled(owner.definition()));
    }
    control.uninstall(stop_limit(owner))?;
    let mut said = String::new();
    for path in files::remove(&possible, force)? {
        let _ = writeln!(said, "removed {}", path.display());
    }
    control.forget()?;
    said.push_str("stopped and uninstalled; configuration, models and logs are left as they are\n");
    Ok(said)
}

/// Whether the installed service has a socket of the manager's; an error where none is installed.
fn has_socket(control: &Control<'_>) -> Result<bool, ServiceError> {
    let possible = control.owner.possible();
    if !possible[0].path.exists() {
        return Err(ServiceError::NotInstalled(possible[0].path.clone()));
    }
    Ok(possible.iter().skip(1).any(|one| one.path.exists()))
}

/// How long the installed service may take to end, from its own definition.
fn stop_limit(owner: &Owner) -> Duration {
    let read = || {
        let text = fs::read_to_string(owner.definition()).ok()?;
        let (_, after) = text.split_once("--stop-limit")?;
        let mut digits = after.split(|c: char| !c.is_ascii_digit());
        digits.find(|word| !word.is_empty())?.parse().ok()
    };
    read().map_or(STOP_LIMIT_UNKNOWN, Duration::from_secs)
}

/// Shows the log: systemd's own reader has it, or the file that launchd writes.
fn logs(owner: &Owner, lines: u32, follow: bool) -> Result<(), ServiceError> {
    let lines_text = lines.to_string();
    match owner.manager {
        Manager::Systemd => {
            let mut journal = Command::new("journalctl");
            if owner.scope == Scope::User {
                journal.arg("--user");
            }
            journal.args([
                "--unit",
                systemd::SERVICE,
                "--lines",
                &lines_text,
                "--no-pager",
            ]);
            if follow {
                journal.arg("--follow");
            }
            let failed = |said: String| ServiceError::Command {
                line: "journalctl".to_owned(),
                said,
            };
            let status = journal
                .status()
                .map_err(|error| failed(error.to_string()))?;
            if status.success() {
                Ok(())
            } else {
                Err(failed(status.to_string()))
            }
        }
        Manager::Launchd => {
            let path = super::place::log(&owner.home);
            tail(&path, lines, follow).map_err(|cause| ServiceError::file(&path, cause))
        }
    }
}

/// The last lines of a file, and with `follow` what comes, until the reader goes away.
fn tail(path: &Path, lines: u32, follow: bool) -> io::Result<()> {
    /// Of a long log no more is read for its last lines.
    const TAIL_BYTES: u64 = 4 << 20;
    let mut file = fs::File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(io::SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
    let mut reader = io::BufReader::new(file);
    let mut kept = std::collections::VecDeque::new();
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        if kept.len() >= lines as usize {
            kept.pop_front();
        }
        if lines > 0 {
            kept.push_back(std::mem::take(&mut line));
        }
        line.clear();
    }
    let mut out = io::stdout().lock();
    let gone = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    for line in kept {
        match out.write_all(&line) {
            Err(error) if gone(&error) => return Ok(()),
            written => written?,
        }
    }
    if !follow {
        return out.flush();
    }
    loop {
        out.flush()?;
        line.clear();
        if reader.read_until(b'\n', &mut line)? == 0 {
            std::thread::sleep(LOOK);
            continue;
        }
        match out.write_all(&line) {
            Err(error) if gone(&error) => return Ok(()),
            written => written?,
        }
    }
}

/// A path's text for people.
pub(super) fn shown(path: &Path) -> String {
    match text(path) {
        "" => path.to_string_lossy().into_owned(),
        text => text.to_owned(),
    }
}
