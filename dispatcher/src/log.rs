//! Log lines to stderr: text for people, JSON for machines. Prompt text is never logged, by anybody.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

/// The variable that says which lines are wanted, in `tracing`'s filter language.
const FILTER: &str = "DISPATCHER_LOG";

/// Starts logging. A second call changes nothing.
pub fn init(format: LogFormat) {
    let filter = EnvFilter::try_from_env(FILTER).unwrap_or_else(|_| EnvFilter::new("info"));
    let terminal = std::io::stderr().is_terminal();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(terminal);
    let text = match format {
        LogFormat::Text => true,
        LogFormat::Json => false,
        LogFormat::Auto => terminal,
    };
    // An embedding program (or a test) may have a subscriber of its own already: its lines win.
    let _ = if text {
        builder.with_target(false).compact().try_init()
    } else {
        builder.json().flatten_event(true).try_init()
    };
}
