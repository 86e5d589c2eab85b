//! Instances on devices of their own: each worker sees its device alone, and each device is a bus of its own.

mod system;

use serde_json::Value;
use system::client::{Events, chat};
use system::{Start, System};

const CHAT: &str = "/v1/chat/completions";

/// What each instance was given, and what its worker saw.
fn places(status: &Value) -> Vec<(String, String)> {
    let text = |one: &Value, key: &str| one[key].as_str().unwrap_or("").to_owned();
    instances(status)
        .map(|one| (text(one, "assigned_device"), text(one, "device")))
        .collect()
}

fn instances(status: &Value) -> impl Iterator<Item = &Value> {
    status["instances"].as_array().into_iter().flatten()
}

fn all_ready(status: &Value) -> bool {
    instances(status).count() > 0 && instances(status).all(|one| one["state"] == "ready")
}

#[test]
fn eight_instances_have_eight_devices_and_all_of_them_work() {
    let system = System::scripted(
        "step_us=2000",
        &[
            "--instances",
            "8",
            "--slots",
            "2",
            "--devices",
            "0,1,2,3,4,5,6,7",
        ],
    );
    let status = system.await_status("all ready", all_ready);
    let expected: Vec<_> = (0..8)
        .map(|index| {
            let given = format!("{index}: pretended");
            (given, format!("script on GPU-pretended-{index}"))
        })
        .collect();
    assert_eq!(places(&status), expected);
    let mut streams: Vec<Events> = (0..16)
        .map(|number| {
            Events::open(
                &system.address,
                CHAT,
                &chat(&format!("stream {number}"), 400),
            )
        })
        .collect();
    for stream in &mut streams {
        stream.next_text();
    }
    let busy = system.await_status("every device reads", |status| {
        let buses = status["bus"].as_array().unwrap();
        buses.len() == 8
            && buses
                .iter()
                .all(|bus| bus["read_gb_per_s"].as_f64() > Some(0.0))
    });
    for (index, bus) in busy["bus"].as_array().unwrap().iter().enumerate() {
        assert_eq!(bus["device"], format!("{index}: pretended"), "{bus}");
        assert_eq!(bus["instances"], serde_json::json!([index]), "{bus}");
        assert_eq!(bus["source"], "unknown", "nobody measured it: {bus}");
    }
    for mut stream in streams {
        stream.whole().assert_complete();
    }
    assert!(system.metric("dispatcher_bus_read_bytes_per_second") >= 0.0);
}

#[test]
fn more_instances_than_devices_take_them_in_turn_and_a_new_worker_keeps_its_place() {
    let system = System::scripted("step_us=1000", &["--instances", "5", "--devices", "6,2"]);
    let status = system.await_status("all ready", all_ready);
    let given: Vec<String> = places(&status)
        .into_iter()
        .map(|(given, _)| given)
        .collect();
    let (six, two) = ("6: pretended", "2: pretended");
    assert_eq!(given, [six, two, six, two, six]);
    let pid = status["instances"][1]["pid"].as_u64().unwrap();
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    let after = system.await_status("a new worker", |status| {
        status["instances"][1]["generation"] != 1 && all_ready(status)
    });
    assert_eq!(places(&after), places(&status));
}

#[test]
fn a_device_that_is_not_there_is_refused_with_those_that_are() {
    let refused = Start::scripted("", &["--instances", "2", "--devices", "0,8"]).refused();
    assert_eq!(refused.code, Some(78), "{}", refused.log);
    assert!(
        refused.log.contains("device 8 is not there; these are:"),
        "{}",
        refused.log
    );
    assert!(
        refused.log.contains("7: pretended (1.0 GiB)"),
        "{}",
        refused.log
    );
}

#[test]
fn without_devices_a_worker_sees_what_the_dispatcher_sees() {
    let system = Start::scripted("", &["--instances", "1"])
        .environment("CUDA_VISIBLE_DEVICES", "3,4")
        .start();
    assert_eq!(
        places(&system.status()),
        [(String::new(), "script on 3,4".to_owned())]
    );
}
