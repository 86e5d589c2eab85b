//! Real child processes: how their exits, their output and their groups reach the driver.

#![cfg(unix)]
#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

use std::path::Path;
use std::time::Duration;

use dispatcher::input::Input;
use dispatcher::machine::event::ExitStatus;
use dispatcher::process::{Child, Launch, Processes};
use proto::{Generation, InstanceId};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// A wait that takes longer has failed; nothing passes because of it.
const PATIENCE: Duration = Duration::from_secs(20);

struct Rig {
    processes: Processes,
    inputs: mpsc::Receiver<Input>,
    root: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let (sender, inputs) = mpsc::channel(16);
        Self {
            processes: Processes::new(root.path(), sender),
            inputs,
            root,
        }
    }

    fn spawn(&self, script: &str) -> Child {
        let launch = Launch {
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), script.into()],
            environment: vec![("PATH".into(), "/bin:/usr/bin".into())],
        };
        self.processes
            .spawn(InstanceId(3), Generation(8), &launch, &[7; 32], |_| {})
            .unwrap()
    }

    async fn exited(&mut self) -> (ExitStatus, Vec<String>) {
        let input = timeout(PATIENCE, self.inputs.recv())
            .await
            .expect("an exit comes")
            .expect("the processes live");
        match input {
            Input::Exited {
                instance,
                generation,
                status,
                tail,
            } => {
                assert_eq!((instance, generation), (InstanceId(3), Generation(8)));
                (status, tail)
            }
            other => panic!("{other:?}"),
        }
    }

    fn pid_files(&self) -> usize {
        std::fs::read_dir(self.root.path()).unwrap().count()
    }

    /// Reads a line that the child writes to a fifo in the rig's directory.
    async fn line(&self, fifo: &Path) -> String {
        let fifo = fifo.to_owned();
        let read = tokio::task::spawn_blocking(move || std::fs::read_to_string(fifo).unwrap());
        let text = timeout(PATIENCE, read).await.expect("a line comes");
        text.unwrap().trim().to_owned()
    }

    fn fifo(&self) -> std::path::PathBuf {
        let path = self.root.path().join("fifo");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        path
    }
}

#[tokio::test]
async fn an_exit_code_is_told_once_with_the_last_lines_of_both_streams() {
    let mut rig = Rig::new();
    let child = rig.spawn("echo out; echo err >&2; exit 78");
    let (status, mut tail) = rig.exited().await;
    tail.sort();
    assert_eq!(status, ExitStatus::Code(78));
    assert_eq!(tail, ["err", "out"]);
    assert_eq!(rig.pid_files(), 0);
    assert!(!child.kill(), "an exited worker is not signalled");
    drop(rig.processes);
    let more = timeout(PATIENCE, rig.inputs.recv()).await.unwrap();
    assert!(more.is_none(), "{more:?}");
}

#[tokio::test]
async fn a_death_by_signal_is_told_with_its_signal() {
    let mut rig = Rig::new();
    let _child = rig.spawn("kill -SEGV $$");
    let (status, _) = rig.exited().await;
    let signal = nix::sys::signal::Signal::SIGSEGV as i32;
    assert_eq!(status, ExitStatus::Signal { signal, oom: false });
}

#[tokio::test]
async fn the_tail_holds_the_last_forty_lines() {
    let mut rig = Rig::new();
    let _child = rig.spawn("i=0; while [ $i -lt 100 ]; do echo line $i; i=$((i+1)); done");
    let (status, tail) = rig.exited().await;
    assert_eq!(status, ExitStatus::Code(0));
    let expected: Vec<String> = (60..100).map(|i| format!("line {i}")).collect();
    assert_eq!(tail, expected);
}

#[tokio::test]
async fn terminate_and_kill_reach_the_whole_group() {
    for (kill, signal) in [(false, 15), (true, 9)] {
        let mut rig = Rig::new();
        let fifo = rig.fifo();
        // A grandchild that ignores nothing, and a shell that waits for it.
        let script = format!("sleep 600 & echo $! > {}; wait", fifo.display());
        let child = rig.spawn(&script);
        let grandchild: i32 = rig.line(&fifo).await.parse().unwrap();
        std::fs::remove_file(&fifo).unwrap();
        assert!(if kill {
            child.kill()
        } else {
            child.terminate()
        });
        let (status, _) = rig.exited().await;
        assert_eq!(status, ExitStatus::Signal { signal, oom: false });
        gone(grandchild).await;
    }
}

#[tokio::test]
async fn what_a_worker_started_does_not_outlive_it() {
    let mut rig = Rig::new();
    let fifo = rig.fifo();
    let script = format!("sleep 600 & echo $! > {}", fifo.display());
    let _child = rig.spawn(&script);
    let grandchild: i32 = rig.line(&fifo).await.parse().unwrap();
    let (status, _) = rig.exited().await;
    assert_eq!(status, ExitStatus::Code(0));
    gone(grandchild).await;
}

/// Waits until a process that is not our child is dead. It has no event to wait for; the bound is
/// what fails.
async fn gone(pid: i32) {
    let dead = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let alive = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), None).is_ok();
        !alive || stat.contains(") Z ")
    };
    let wait = async {
        while !dead() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, wait).await.expect("the process is gone");
}

#[tokio::test]
async fn the_token_comes_first_on_standard_input_which_then_stays_open() {
    let mut rig = Rig::new();
    // 32 bytes, then end of file once the handle is dropped and not before.
    let child = rig.spawn("head -c 32 | od -An -v -tx1 | tr -d ' \\n'; echo; cat; echo end");
    drop(child);
    let (status, tail) = rig.exited().await;
    assert_eq!(status, ExitStatus::Code(0));
    assert_eq!(tail, ["07".repeat(32), "end".to_owned()]);
}

#[tokio::test]
async fn the_pid_is_registered_before_the_token_is_written() {
    let mut rig = Rig::new();
    let mark = rig.root.path().join("mark");
    let launch = Launch {
        program: "/bin/sh".into(),
        arguments: vec![
            "-c".into(),
            format!("head -c 32 >/dev/null; cat {}", mark.display()).into(),
        ],
        environment: vec![("PATH".into(), "/bin:/usr/bin".into())],
    };
    let place = (InstanceId(3), Generation(8));
    let child = rig
        .processes
        .spawn(place.0, place.1, &launch, &[7; 32], |pid| {
            std::fs::write(&mark, pid.to_string()).unwrap();
        })
        .unwrap();
    let (_, tail) = rig.exited().await;
    assert_eq!(tail, [child.pid().to_string()]);
}

#[tokio::test]
async fn a_child_gets_the_environment_that_was_given_and_no_other() {
    let mut rig = Rig::new();
    let launch = Launch {
        program: "/usr/bin/env".into(),
        arguments: Vec::new(),
        environment: vec![("ONLY".into(), "this".into())],
    };
    let child = rig
        .processes
        .spawn(InstanceId(3), Generation(8), &launch, &[7; 32], |_| {});
    let _child = child.unwrap();
    let (_, tail) = rig.exited().await;
    assert_eq!(tail, ["ONLY=this"]);
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_child_inherits_no_descriptor_but_its_three() {
    use nix::fcntl::{FcntlArg, FdFlag, fcntl};
    // A descriptor as socket activation gives it: inherited, and to be inherited on.
    let given =
        std::os::unix::net::UnixListener::bind(tempfile::tempdir().unwrap().path().join("given"))
            .unwrap();
    fcntl(&given, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
    let mut rig = Rig::new();
    let _own = std::fs::File::open("/dev/null").unwrap();
    // The shell itself lists, so that no other program's descriptors are in it. It opens the
    // directory that it lists, as 3, and may keep its own input at 10.
    let _child = rig.spawn("for fd in /proc/$$/fd/*; do readlink $fd || true; done");
    let (_, tail) = rig.exited().await;
    let strange: Vec<&String> = tail
        .iter()
        .filter(|target| !target.starts_with("pipe:") && !target.starts_with("/proc/"))
        .collect();
    assert!(strange.is_empty(), "{strange:?}");
    assert!(tail.len() >= 3, "{tail:?}");
}

#[tokio::test]
async fn a_program_that_does_not_exist_is_a_permanent_error_and_no_exit_comes() {
    let mut rig = Rig::new();
    let plain = rig.root.path().join("plain");
    std::fs::write(&plain, "text").unwrap();
    for program in ["/nonexistent/worker".into(), plain] {
        let launch = Launch {
            program,
            arguments: Vec::new(),
            environment: Vec::new(),
        };
        let place = (InstanceId(3), Generation(8));
        let error = rig
            .processes
            .spawn(place.0, place.1, &launch, &[7; 32], |_| panic!("a pid"))
            .unwrap_err();
        assert!(error.permanent(), "{error}");
    }
    drop(rig.processes);
    assert!(rig.inputs.recv().await.is_none());
}

#[tokio::test]
async fn a_pid_file_lies_there_while_the_worker_lives() {
    let mut rig = Rig::new();
    let child = rig.spawn("exec sleep 600");
    assert!(rig.root.path().join("worker-3-8.pid").exists());
    assert!(child.kill());
    rig.exited().await;
    assert_eq!(rig.pid_files(), 0);
}
