//! A reload's configuration: read again beside the driver, and taken over only where it is good.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::mpsc;

use crate::cli::Settings;
use crate::config::{Config, Surroundings};
use crate::input::Input;

/// Reads the configuration again when asked, one reading at a time.
#[derive(Debug)]
pub(crate) struct Reconfigure {
    /// What was typed: flags hold for as long as the process lives.
    settings: Arc<Settings>,
    /// What this process was started with, and what it cannot change.
    started: Arc<Config>,
    /// Where workers connect.
    pub(crate) socket: PathBuf,
    inputs: mpsc::Sender<Input>,
    reading: bool,
    again: bool,
    /// Reloads that were read, good ones and bad ones.
    pub(crate) count: u64,
    /// Why the newest one was refused.
    pub(crate) last_error: Option<String>,
}

impl Reconfigure {
    /// `count`: reloads that this process read before.
    pub(crate) fn new(
        settings: Settings,
        started: Config,
        socket: PathBuf,
        inputs: mpsc::Sender<Input>,
        count: u64,
    ) -> Self {
        Self {
            settings: Arc::new(settings),
            started: Arc::new(started),
            socket,
            inputs,
            reading: false,
            again: false,
            count,
            last_error: None,
        }
    }

    /// Begins to read; `Input::Reloaded` comes when it is done. Asked meanwhile, it reads once more:
    /// the file may have changed since.
    pub(crate) fn begin(&mut self) {
        if std::mem::replace(&mut self.reading, true) {
            self.again = true;
            return;
        }
        let (settings, started) = (Arc::clone(&self.settings), Arc::clone(&self.started));
        let inputs = self.inputs.clone();
        tokio::spawn(async move {
            // Files are read: not on the driver's thread.
            let read = tokio::task::spawn_blocking(move || {
                started
                    .again(&settings, &Surroundings::probe())
                    .map_err(|error| error.to_string())
            });
            let read = read.await.unwrap_or_else(|error| Err(error.to_string()));
            // A driver that is gone has nothing to reload.
            let _ = inputs.send(Input::Reloaded(Box::new(read))).await;
        });
    }

    /// Books what was read, and says what it means. `None`: the old configuration goes on.
    pub(crate) fn end(&mut self, read: Result<Config, String>) -> Option<Config> {
        self.reading = false;
        if std::mem::take(&mut self.again) {
            self.begin();
            return None;
        }
        self.count += 1;
        match read {
            Ok(config) => {
                self.last_error = None;
                let kept = config.needs_restart(&self.started);
                if !kept.is_empty() {
                    tracing::warn!(
                        settings = kept.join(", "),
                        "these settings have changed and hold from the next start on"
                    );
                }
                for note in &config.notes {
                    tracing::warn!("{note}");
                }
                tracing::info!("configuration read again: workers are replaced");
                Some(config)
            }
            Err(problem) => {
                tracing::error!("the new configuration is refused, the old one goes on: {problem}");
                self.last_error = Some(problem);
                None
            }
        }
    }
}
