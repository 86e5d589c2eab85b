//! How far a run is and how long it will still take, on the terminal; lines of text where there is none.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

/// Shown on standard error, apart from the result.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Of a run of `requests` requests.
    #[must_use]
    pub fn start(requests: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(requests);
            let style = ProgressStyle::with_template(
                "{bar:30} {pos}/{len} requests, {elapsed} gone, {eta} left  {msg}",
            );
            if let Ok(style) = style {
                bar.set_style(style);
            }
            bar
        });
        Self { bar }
    }

    /// So many more requests are behind the run: measured, or found measured already.
    pub fn advance(&self, requests: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(requests);
        }
    }

    /// What runs now.
    pub fn now(&self, what: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(what.to_owned()),
            None => say(what),
        }
    }

    /// A line that stays.
    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => say(text),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[expect(clippy::print_stderr, reason = "progress of a command line tool")]
fn say(text: &str) {
    eprintln!("{text}");
}
