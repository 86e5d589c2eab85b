//! Memory on the running system: footprints are measured, and where they pass the limit nothing more is taken on.

mod system;

use nix::sys::signal::Signal;
use system::System;
use system::client::{self, chat};

#[test]
fn workers_are_measured_and_shown() {
    let system = System::scripted("step_us=1000", &["--instances", "2", "--slots", "2"]);
    let status = system.await_status("footprints of both workers", |status| {
        let both = status["instances"].as_array().unwrap();
        both.iter().all(|one| one["footprint_bytes"].is_u64())
            && status["memory"]["workers_bytes"].as_u64() > Some(0)
    });
    let memory = &status["memory"];
    assert_eq!(memory["pressure"], "none", "{memory}");
    assert_eq!(memory["limit_origin"], "machine", "{memory}");
    assert!(memory["limit_bytes"].as_u64() > memory["used_bytes"].as_u64());
    assert!(system.metric("dispatcher_instance_footprint_bytes") > 0.0);
    assert!(system.metric("dispatcher_memory_used_bytes") > 0.0);
}

/// A system whose workers take more than they may: one byte.
fn without_room() -> System {
    System::launch(&[
        "--engine",
        "scripted",
        "--scripted",
        "step_us=20000",
        "--slots",
        "1",
        "--memory-limit",
        "1",
    ])
}

#[test]
fn above_the_limit_what_waits_is_shed_and_new_work_refused() {
    let system = without_room();
    // The slot holds one of them at most, and that one runs longer than the pressure needs to rise.
    let (done, answers) = std::sync::mpsc::channel();
    for _ in 0..2 {
        let (address, done) = (system.address.clone(), done.clone());
        std::thread::spawn(move || {
            let answer = client::stream(&address, &chat("long before the first look", 3000));
            // The test may be over by then.
            let _ = done.send(answer);
        });
    }
    let shed = answers.recv_timeout(system::PATIENCE).unwrap();
    assert_eq!(shed.status, 503, "{shed:?}");
    assert!(shed.body.contains("out_of_memory"), "{shed:?}");
    let status = system.await_status("hard pressure", |status| {
        status["memory"]["pressure"] == "hard"
    });
    assert_eq!(status["memory"]["limit_origin"], "setting");
    let refused = client::stream(&system.address, &chat("comes too late", 5));
    assert_eq!(refused.status, 503, "{refused:?}");
    assert!(refused.body.contains("out_of_memory"), "{refused:?}");
    assert_eq!(client::get_blocking(&system.address, "/ready").0, 503);
}

#[test]
fn a_worker_that_is_known_not_to_fit_is_not_started_again() {
    let system = without_room();
    // Its footprint is known once it was measured while it served; until then a killed worker is
    // replaced without a question.
    loop {
        let status = system.await_status("a worker that serves, or a failed start", |status| {
            let one = &status["instances"][0];
            (one["state"] == "ready" && one["footprint_bytes"].is_u64())
                || one["reason"] == "no process could be started"
        });
        let Some(pid) = status["instances"][0]["pid"].as_u64() else {
            break;
        };
        system::kill(u32::try_from(pid).unwrap(), Signal::SIGKILL);
        system.await_status("the death is seen", |status| {
            status["instances"][0]["pid"].as_u64() != Some(pid)
        });
    }
    let log = system.read_log();
    assert!(log.contains("its measured footprint of"), "{log}");
    assert!(log.contains("does not fit"), "{log}");
}
