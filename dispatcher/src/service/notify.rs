//! What a service manager is told while we run (systemd's notify protocol), as text; no socket here.

use std::fmt::Write as _;
use std::time::Duration;

use crate::machine::Tick;
use crate::view::{InstanceView, View};

/// While a start advances, the manager is asked for so much more time. Longer than any wait between
/// two signs of an advance that the supervision itself allows.
const EXTENSION: Duration = Duration::from_secs(360);
/// The time is asked for again at most this often.
const EXTENSION_PAUSE: Duration = Duration::from_secs(1);
/// The watchdog is fed this often in each of its periods.
const FEEDS_A_PERIOD: u32 = 4;
/// Longer words in a status line help nobody.
const STATUS_CHARS_MAX: usize = 400;

/// Remembers what was told, so that each thing is told once.
#[derive(Debug)]
pub struct Teller {
    /// The manager's patience with a silent driver loop; `None`: it has no watchdog.
    watchdog: Option<Duration>,
    ready: bool,
    stopping: bool,
    /// How many reloads had been read when the one under way was asked for.
    reloading: Option<u64>,
    status: String,
    fed: Option<Tick>,
    progress: Vec<(u64, &'static str, u32)>,
    extended: Option<Tick>,
}

impl Teller {
    #[must_use]
    pub fn new(watchdog: Option<Duration>) -> Self {
        Self {
            watchdog,
            ready: false,
            stopping: false,
            reloading: None,
            status: String::new(),
            fed: None,
            progress: Vec::new(),
            extended: None,
        }
    }

    /// A reload begins now: `monotonic_us` on the system's monotonic clock.
    pub fn reload(&mut self, reloads: u64, monotonic_us: u64) -> String {
        if !self.ready || self.stopping || self.reloading.is_some() {
            return String::new();
        }
        self.reloading = Some(reloads);
        format!("RELOADING=1\nMONOTONIC_USEC={monotonic_us}\n")
    }

    /// What is to be told of how things stand; empty where nothing is new.
    pub fn observe(&mut self, view: &View, now: Tick) -> String {
        let mut text = String::new();
        self.feed(&mut text, now);
        if view.draining {
            if !self.stopping {
                self.stopping = true;
                text.push_str("STOPPING=1\n");
            }
        } else if self.reloading.is_some_and(|before| view.reloads > before) {
            self.reloading = None;
            text.push_str("READY=1\n");
        } else if !self.ready {
            if view.ready || is_parked(view) {
                self.ready = true;
                text.push_str("READY=1\n");
            } else {
                self.extend(&mut text, view, now);
            }
        }
        let status = status(view);
        if status != self.status {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "STATUS={status}");
            self.status = status;
        }
        text
    }

    fn feed(&mut self, text: &mut String, now: Tick) {
        let Some(period) = self.watchdog else { return };
        if self
            .fed
            .is_none_or(|fed| now.since(fed) >= period / FEEDS_A_PERIOD)
        {
            self.fed = Some(now);
            text.push_str("WATCHDOG=1\n");
        }
    }

    fn extend(&mut self, text: &mut String, view: &View, now: Tick) {
        let progress: Vec<_> = view.instances.iter().map(progress).collect();
        let rested = self
            .extended
            .is_none_or(|then| now.since(then) >= EXTENSION_PAUSE);
        if progress != self.progress && rested {
            self.progress = progress;
            self.extended = Some(now);
            let _ = writeln!(text, "EXTEND_TIMEOUT_USEC={}", EXTENSION.as_micros());
        }
    }
}

fn progress(one: &InstanceView) -> (u64, &'static str, u32) {
    (one.generation, one.state, one.progress_permille)
}

/// Nothing serves, and nothing will without a change from outside.
fn is_parked(view: &View) -> bool {
    view.parked.is_some()
        || (!view.instances.is_empty()
            && view.instances.iter().all(|one| one.state == "quarantined"))
}

fn status(view: &View) -> String {
    let reason = || view.not_ready_reason.as_deref().unwrap_or("starting");
    let words = if view.draining {
        "stopping: requests that run are finished".to_owned()
    } else if let Some(cause) = &view.parked {
        format!("parked: {cause}")
    } else if view.ready {
        let all = view.instances.len();
        let ready = view.instances.iter().filter(|one| one.state == "ready");
        format!(
            "ready: {} on {} of {all} instances",
            view.served_model,
            ready.count()
        )
    } else if is_parked(view) {
        format!("parked: {}", reason())
    } else {
        format!("not ready: {}", reason())
    };
    // A status is one line: what follows the first line break would be taken for another message.
    let line = words.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(STATUS_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(state: &'static str, permille: u32) -> View {
        View {
            served_model: "tiny".to_owned(),
            ready: state == "ready",
            not_ready_reason: (state != "ready").then(|| format!("instance 0: {state}")),
            instances: vec![InstanceView {
                state,
                progress_permille: permille,
                ..InstanceView::default()
            }],
            ..View::default()
        }
    }

    fn at(ms: u64) -> Tick {
        Tick::from_micros(ms * 1000)
    }

    #[test]
    fn a_start_that_advances_asks_for_time_and_one_that_does_not_asks_for_none() {
        let mut teller = Teller::new(None);
        let first = teller.observe(&view("loading", 0), at(0));
        assert!(first.contains("EXTEND_TIMEOUT_USEC=360000000\n"), "{first}");
        assert!(first.contains("STATUS=not ready: instance 0: loading\n"));
        assert_eq!(teller.observe(&view("loading", 0), at(5000)), "");
        assert_eq!(
            teller.observe(&view("loading", 10), at(6000)),
            "EXTEND_TIMEOUT_USEC=360000000\n"
        );
        // An advance right after is told a little later.
        assert_eq!(teller.observe(&view("loading", 20), at(6100)), "");
        let later = teller.observe(&view("loading", 20), at(7000));
        assert_eq!(later, "EXTEND_TIMEOUT_USEC=360000000\n");
        let ready = teller.observe(&view("ready", 0), at(7100));
        assert_eq!(ready, "READY=1\nSTATUS=ready: tiny on 1 of 1 instances\n");
        assert_eq!(
            teller
                .observe(&view("loading", 3), at(9000))
                .matches("EXT")
                .count(),
            0
        );
    }

    #[test]
    fn what_is_parked_is_ready_for_the_manager_and_says_why() {
        let mut teller = Teller::new(None);
        let text = teller.observe(&view("quarantined", 0), at(0));
        assert_eq!(text, "READY=1\nSTATUS=parked: instance 0: quarantined\n");
        let mut teller = Teller::new(None);
        let parked = View {
            parked: Some("no model\nin models".to_owned()),
            ..View::default()
        };
        let text = teller.observe(&parked, at(0));
        assert_eq!(text, "READY=1\nSTATUS=parked: no model in models\n");
    }

    #[test]
    fn the_watchdog_is_fed_four_times_a_period_and_no_more() {
        let mut teller = Teller::new(Some(Duration::from_secs(4)));
        let fed = (0..40)
            .filter(|turn| {
                let text = teller.observe(&view("ready", 0), at(turn * 250));
                text.contains("WATCHDOG=1")
            })
            .count();
        assert_eq!(fed, 10);
    }

    #[test]
    fn a_reload_begins_once_and_ends_when_it_was_read() {
        let mut teller = Teller::new(None);
        assert_eq!(teller.reload(0, 7), "", "nothing was ready yet");
        teller.observe(&view("ready", 0), at(0));
        assert_eq!(teller.reload(0, 7), "RELOADING=1\nMONOTONIC_USEC=7\n");
        assert_eq!(teller.reload(0, 8), "");
        assert_eq!(teller.observe(&view("ready", 0), at(1)), "");
        let read = View {
            reloads: 1,
            ..view("ready", 0)
        };
        assert_eq!(teller.observe(&read, at(2)), "READY=1\n");
    }

    #[test]
    fn the_end_is_told_once() {
        let mut teller = Teller::new(None);
        let ending = View {
            draining: true,
            ..view("ready", 0)
        };
        assert!(teller.observe(&ending, at(0)).starts_with("STOPPING=1\n"));
        assert_eq!(teller.observe(&ending, at(9)), "");
    }
}
