//! The dispatcher as a service of a stand-in for systemd: readiness, a long load, parking, the watchdog.

#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

mod manager;
mod system;

use std::os::unix::fs::OpenOptionsExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use manager::{Started, Unit, get, trap_crash_records};
use nix::sys::signal::Signal;
use system::{PATIENCE, client, dispatcher_program, kill};

const SCRIPTED: &str = "engine = \"scripted\"\nscripted = \"step_us=2000\"\n";

#[test]
fn it_is_ready_when_an_instance_is_and_says_when_it_ends() {
    let unit = Unit::configured(true, SCRIPTED);
    let (mut running, started) = unit.start();
    assert_eq!(started, Started::Ready, "{}", unit.log());
    assert_eq!(get(&unit.address(), "/ready").0, 200);
    unit.await_words(&mut running, "STATUS=ready: scripted on 1 of 1 instances");
    running.signal(Signal::SIGTERM);
    unit.await_words(&mut running, "STOPPING=1");
    assert_eq!(running.end(), Some(0));
    // Nobody asked for a watchdog.
    assert!(!running.said.contains("WATCHDOG"), "{}", running.said);
}

#[test]
fn a_load_that_advances_outlives_the_start_timeout_and_one_that_hangs_does_not() {
    let mut unit = Unit::configured(
        false,
        "engine = \"scripted\"\nscripted = \"warm_steps=30,warm_ms=100\"\n",
    );
    unit.start_timeout = Duration::from_secs(1);
    let began = Instant::now();
    let (running, started) = unit.start();
    assert_eq!(started, Started::Ready, "{}\n{}", running.said, unit.log());
    assert!(began.elapsed() > unit.start_timeout * 2);
    let extensions = running.said.matches("EXTEND_TIMEOUT_USEC=").count();
    assert!(extensions >= 2, "{}", running.said);
    assert_eq!(unit.stop(running), Some(0));
    // A worker that hangs says that it is there, and then nothing: no time is asked for any more.
    unit.configure("engine = \"scripted\"\nscripted = \"load=stall\"\n");
    let mut running = unit.spawn();
    unit.await_words(&mut running, "loading");
    while unit.hear(&mut running, Duration::from_secs(3)).is_some() {}
    let asked = running.said.matches("EXTEND_TIMEOUT_USEC=").count();
    assert!(unit.hear(&mut running, Duration::from_secs(2)).is_none());
    assert!(asked <= 3, "{}", running.said);
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end(), Some(0));
}

#[test]
fn without_a_socket_a_configuration_that_cannot_work_ends_it_for_good() {
    let unit = Unit::configured(false, "slotz = 4\n");
    let (running, started) = unit.start();
    assert_eq!(started, Started::Ended(Some(78)), "{}", running.said);
    assert!(
        unit.log().contains("did you mean `slots`"),
        "{}",
        unit.log()
    );
    // The same under launchd, which starts again whatever ends with another code than 0.
    let mut unit = Unit::configured(false, "slotz = 4\n");
    unit.arguments[2] = "launchd".to_owned();
    assert_eq!(unit.start().1, Started::Ended(Some(0)));
    // And where the definition itself is of another version.
    unit.arguments.push("--flag-of-a-later-version".to_owned());
    assert_eq!(unit.start().1, Started::Ended(Some(0)));
    assert!(unit.log().contains("service install"), "{}", unit.log());
}

fn reload(unit: &Unit) -> std::process::Output {
    Command::new(dispatcher_program())
        .args(["reload", "--run-dir"])
        .arg(unit.run_directory())
        .output()
        .unwrap()
}

#[test]
fn with_a_socket_it_parks_says_why_and_serves_once_the_configuration_can_work() {
    let unit = Unit::configured(true, "slotz = 4\n");
    // No run directory can be known from a file that cannot be read.
    let (mut running, started) = unit.start();
    assert_eq!(started, Started::Ready, "{}", unit.log());
    unit.await_words(&mut running, "STATUS=parked: ");
    let address = unit.address();
    assert_eq!(get(&address, "/health").0, 200);
    let (status, ready) = get(&address, "/ready");
    assert_eq!(status, 503);
    let reason = ready["reason"].as_str().unwrap();
    assert!(reason.contains("did you mean `slots`"), "{reason}");
    let answer = client::post(&address, "/v1/chat/completions", &client::chat("hello", 3));
    assert_eq!(answer.status, 503, "{}", answer.body);
    let body = answer.body.to_string();
    assert!(body.contains("did you mean `slots`"), "{body}");
    assert!(body.contains("\"parked\""), "{body}");

    // Another mistake, with which the run directory is known.
    unit.configure("slots = 0\nengine = \"scripted\"\n");
    running.signal(Signal::SIGHUP);
    unit.await_words(&mut running, "slots = 0");
    let output = reload(&unit);
    assert_eq!(output.status.code(), Some(78), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("slots = 0"), "{said}");

    // And one that can work.
    unit.configure(SCRIPTED);
    let output = reload(&unit);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    unit.await_words(&mut running, "STATUS=ready: ");
    client::stream(&address, &client::chat("on", 5)).assert_complete();
    let (reloading, after) = running.said.rsplit_once("RELOADING=1").unwrap();
    assert!(reloading.contains("STATUS=parked"), "{}", running.said);
    assert!(after.contains("READY=1"), "{}", running.said);
    assert_eq!(unit.stop(running), Some(0));
}

#[test]
fn a_model_that_no_worker_can_load_parks_it_too_and_a_signal_ends_it() {
    let unit = Unit::configured(
        true,
        "engine = \"scripted\"\nscripted = \"load=permanent\"\n",
    );
    let (mut running, started) = unit.start();
    assert_eq!(started, Started::Ready, "{}", unit.log());
    unit.await_words(&mut running, "STATUS=parked: ");
    let address = unit.address();
    let deadline = Instant::now() + PATIENCE;
    while get(&address, "/status").1["parked"].is_null() {
        assert!(
            Instant::now() < deadline,
            "it does not park:\n{}",
            unit.log()
        );
    }
    let reason = get(&address, "/status").1["parked"].to_string();
    assert!(reason.contains("no instance can start"), "{reason}");
    assert_eq!(get(&address, "/health").0, 200);
    assert_eq!(unit.stop(running), Some(0));
}

#[test]
fn the_watchdog_starves_while_the_driver_loop_stands_still() {
    let mut unit = Unit::configured(true, SCRIPTED);
    unit.watchdog = Some(Duration::from_secs(2));
    let (mut running, started) = unit.start();
    assert_eq!(started, Started::Ready);
    let fed = |running: &mut manager::Running, patience| {
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            let heard = unit.hear(running, deadline - Instant::now());
            if heard.is_some_and(|text| text.contains("WATCHDOG=1")) {
                return true;
            }
        }
        false
    };
    for _ in 0..4 {
        assert!(fed(&mut running, PATIENCE), "{}", running.said);
    }
    // The disk hangs when a worker's crash is written down, and the loop with it.
    let traps = trap_crash_records(&unit.run_directory(), running.pid());
    let (_, status) = get(&unit.address(), "/status");
    let pid = status["instances"][0]["pid"].as_u64().unwrap();
    kill(u32::try_from(pid).unwrap(), Signal::SIGKILL);
    let deadline = Instant::now() + PATIENCE;
    while fed(&mut running, unit.watchdog.unwrap()) {
        assert!(Instant::now() < deadline, "the loop does not stand still");
    }
    // A period went by without a sign of life, from a process that is there and answers.
    assert_eq!(get(&unit.address(), "/health").0, 200);
    assert!(running.child.try_wait().unwrap().is_none());
    // The disk comes back: so do the signs.
    let readers: Vec<_> = traps
        .into_iter()
        .map(|path| {
            let mut options = std::fs::OpenOptions::new();
            // Without waiting for a writer, which all but one never have.
            options.read(true).custom_flags(nix::libc::O_NONBLOCK);
            options.open(path).unwrap()
        })
        .collect();
    assert!(fed(&mut running, PATIENCE), "{}", running.said);
    drop(readers);
    assert_eq!(unit.stop(running), Some(0));
}
