//! The real worker process behind a real socket: what it serves, and how it ends.

#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

mod support;

use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use proto::to_dispatcher::{End, Progress, PromptError, RequestError};
use proto::to_worker::{ChatMessage, PromptInput};
use proto::{Attempt, FinishReason, Generate, RequestId, ToDispatcher, ToWorker};
use support::{PATIENCE, Worker, asked};

const SIGKILLED_WITHIN: Duration = Duration::from_secs(1);

fn cancel(request: u64) -> ToWorker {
    ToWorker::Cancel {
        request: RequestId(request),
        attempt: Attempt(1),
    }
}

fn signal(worker: &Worker, signal: Signal) {
    kill(Pid::from_raw(worker.child.id().cast_signed()), signal).unwrap();
}

#[test]
fn a_worker_says_what_it_is_before_it_serves() {
    let (mut worker, hello) = Worker::connect("", &["--slots", "3", "--ctx-size", "128"]);
    assert_eq!((hello.instance.0, hello.generation.0), (2, 5));
    worker.say(&ToWorker::Hello {
        protocol: hello.protocol,
        build: String::new(),
    });
    assert_eq!(worker.hear(), Some(ToDispatcher::Loading { permille: 0 }));
    let ready = worker.await_ready();
    assert_eq!(ready.engine, "scripted");
    assert_eq!((ready.slots, ready.context_tokens), (3, 128));
}

#[test]
fn several_requests_share_steps_and_get_what_each_would_alone() {
    let mut worker = Worker::ready("step_us=2000");
    let alone = worker.stream(asked(1, "one", 40));
    for request in 2..6 {
        worker.generate(asked(request, if request == 2 { "one" } else { "two" }, 40));
    }
    let mut shared = 0;
    let mut ends = 0;
    let mut text = String::new();
    worker.hear_until(|message| {
        if let ToDispatcher::Tokens(step) = message {
            shared = shared.max(step.batch);
            for row in step.rows {
                ends += usize::from(row.end.is_some());
                if row.request == RequestId(2) {
                    text.extend(row.tokens.into_iter().map(|token| token.text));
                }
            }
        }
        (ends == 4).then_some(())
    });
    assert!(shared > 1, "no step had two rows");
    assert_eq!(text, alone.text);
}

#[test]
fn a_prompt_can_ask_for_its_own_words() {
    let mut worker = Worker::ready("");
    let message = ChatMessage {
        role: "user".into(),
        content: "repeat: 東京 and 🦀!".into(),
        name: None,
    };
    worker.say(&ToWorker::Tokenise {
        request: RequestId(1),
        input: PromptInput::Chat {
            messages: vec![message],
            add_generation_prompt: true,
        },
    });
    let tokenised = worker.hear_until(|message| match message {
        ToDispatcher::Tokenised { outcome, .. } => Some(outcome.unwrap()),
        _ => None,
    });
    let stream = worker.stream(Generate {
        prompt: tokenised.ids,
        ..asked(1, "", 100)
    });
    assert_eq!(stream.text, "東京 and 🦀!");
    assert_eq!(stream.end, Some(End::Finished(FinishReason::Stop)));
}

#[test]
fn what_the_template_or_the_vocabulary_refuses_is_said_in_words() {
    let mut worker = Worker::ready("");
    let message = ChatMessage {
        role: "forbidden".into(),
        content: String::new(),
        name: None,
    };
    let inputs = [
        PromptInput::Chat {
            messages: vec![message],
            add_generation_prompt: true,
        },
        PromptInput::Ids(vec![1, 99_999]),
        PromptInput::Ids(vec![]),
    ];
    for (input, request) in inputs.into_iter().zip(1..) {
        worker.say(&ToWorker::Tokenise {
            request: RequestId(request),
            input,
        });
    }
    let mut answers = Vec::new();
    worker.hear_until(|message| {
        if let ToDispatcher::Tokenised { outcome, .. } = message {
            answers.push(outcome.unwrap_err());
        }
        (answers.len() == 3).then_some(())
    });
    assert!(
        matches!(&answers[0], PromptError::Template(words) if words.contains("no such role")),
        "{answers:?}"
    );
    assert_eq!(
        answers[1..],
        [PromptError::UnknownToken(99_999), PromptError::Empty]
    );
}

#[test]
fn a_cancelled_request_ends_and_its_slot_is_free() {
    let mut worker = Worker::ready("step_us=1000");
    for request in 1..=4 {
        worker.generate(asked(request, "endless", 100_000));
    }
    worker.generate(asked(5, "one too many", 1));
    let refused = worker.hear_until(|message| match message {
        ToDispatcher::Failed { request, error, .. } => Some((request, error)),
        _ => None,
    });
    assert_eq!(refused, (RequestId(5), RequestError::NoSlot));
    worker.say(&cancel(3));
    worker.hear_until(|message| match message {
        ToDispatcher::Tokens(step) => step
            .rows
            .into_iter()
            .find(|row| row.end == Some(End::Cancelled) && row.request == RequestId(3)),
        _ => None,
    });
    worker.generate(asked(6, "now there is room", 1));
    worker.hear_until(|message| match message {
        ToDispatcher::Tokens(step) => step
            .rows
            .into_iter()
            .find(|row| row.request == RequestId(6) && row.end.is_some()),
        _ => None,
    });
}

#[test]
fn a_stop_string_ends_a_stream_with_its_last_token_and_frees_the_slot() {
    let mut worker = Worker::ready("step_us=200");
    for request in 1..=20 {
        let stream = worker.stream(Generate {
            stop: vec!["STOP".into()],
            ..asked(request, "repeat: before STOP after", 1000)
        });
        assert_eq!(stream.text, "before ");
        assert_eq!(stream.end, Some(End::Finished(FinishReason::Stop)));
        assert_eq!(stream.released.last(), Some(&7));
    }
}

#[test]
fn held_back_text_is_released_when_the_stream_ends() {
    let mut worker = Worker::ready("");
    let stream = worker.stream(Generate {
        stop: vec!["STOPPED".into()],
        ..asked(1, "repeat: it says STOP", 1000)
    });
    assert_eq!(stream.text, "it says STOP");
}

#[test]
fn a_stream_resumed_at_any_token_continues_byte_for_byte() {
    for script in ["text=words", "text=bytes", "text=invalid,burst=3"] {
        let mut worker = Worker::ready(script);
        let whole = worker.stream(asked(1, "the same", 30));
        assert_eq!(whole.ids.len(), 30);
        for cut in 0..=30 {
            let request = 100 + u64::try_from(cut).unwrap();
            let released = if cut == 0 { 0 } else { whole.released[cut - 1] };
            let rest = worker.stream(Generate {
                emitted: whole.ids[..cut].to_vec(),
                released_bytes: released,
                ..asked(request, "the same", 30)
            });
            assert_eq!(rest.ids, whole.ids[cut..], "{script} cut at {cut}");
            let before = &whole.text.as_bytes()[..usize::try_from(released).unwrap()];
            let joined = [before, rest.text.as_bytes()].concat();
            // The last token of the whole may carry what its end released.
            assert_eq!(joined, whole.text.as_bytes(), "{script} cut at {cut}");
            assert_eq!(rest.end, whole.end);
        }
    }
}

#[test]
fn a_failing_row_ends_alone() {
    let mut worker = Worker::ready("fail_row=bad row,reject=not this,step_us=500");
    worker.generate(asked(1, "fine", 50));
    worker.generate(asked(2, "a bad row", 50));
    let streams = worker.collect(&[1, 2]);
    assert_eq!(streams[0].end, Some(End::Finished(FinishReason::Length)));
    assert_eq!(streams[0].ids.len(), 50);
    assert!(matches!(
        streams[1].end,
        Some(End::Failed(RequestError::Engine(_)))
    ));
    worker.generate(asked(3, "not this", 50));
    let error = worker.hear_until(|message| match message {
        ToDispatcher::Failed { error, .. } => Some(error),
        _ => None,
    });
    assert!(matches!(error, RequestError::Rejected(_)), "{error:?}");
}

#[test]
fn a_drained_worker_finishes_what_runs_takes_nothing_new_and_exits_0() {
    let mut worker = Worker::ready("step_us=5000");
    worker.generate(asked(1, "running", 20));
    worker.say(&ToWorker::Drain);
    worker.generate(asked(2, "late", 20));
    let (mut ended, mut refused) = (None, None);
    worker.hear_until(|message| match message {
        ToDispatcher::Tokens(step) => {
            ended = step
                .rows
                .into_iter()
                .find_map(|row| row.end)
                .or(ended.take());
            None
        }
        ToDispatcher::Failed { request, error, .. } => {
            refused = Some((request, error));
            None
        }
        ToDispatcher::Drained => Some(()),
        _ => None,
    });
    assert_eq!(ended, Some(End::Finished(FinishReason::Length)));
    assert_eq!(refused, Some((RequestId(2), RequestError::Draining)));
    assert_eq!(worker.exit().0.code(), Some(0));
}

#[test]
fn a_worker_drained_while_it_loads_leaves_at_once() {
    let mut worker = Worker::start("load=stall");
    worker.say(&ToWorker::Drain);
    worker.hear_until(|message| (message == ToDispatcher::Drained).then_some(()));
    assert_eq!(worker.exit().0.code(), Some(0));
}

#[test]
fn end_of_file_on_the_link_ends_it_within_a_second_in_a_long_step() {
    let mut worker = Worker::ready("step_us=60000000");
    worker.generate(asked(1, "long", 5));
    worker.hear_until(|m| matches!(m, ToDispatcher::Started { .. }).then_some(()));
    worker.stream.shutdown(std::net::Shutdown::Both).unwrap();
    let (status, took) = worker.exit();
    assert_eq!(status.code(), Some(69));
    assert!(took < SIGKILLED_WITHIN, "{took:?}");
}

#[test]
fn end_of_file_on_standard_input_ends_it_within_a_second_in_a_stalled_load() {
    let mut worker = Worker::start("load=stall");
    worker.stdin = None;
    let (status, took) = worker.exit();
    assert_eq!(status.code(), Some(69));
    assert!(took < SIGKILLED_WITHIN, "{took:?}");
}

#[test]
fn a_panic_on_the_engine_thread_ends_the_process() {
    let mut worker = Worker::ready("crash=panic,crash_at_step=3");
    worker.generate(asked(1, "boom", 50));
    let (status, _) = worker.exit();
    assert_eq!(status.signal(), Some(Signal::SIGABRT as i32));
    assert!(worker.stderr().contains("the script asks for a panic"));
}

#[test]
fn each_scripted_crash_ends_the_process_in_its_own_way() {
    for (crash, signal, code) in [
        ("abort", Some(Signal::SIGABRT as i32), None),
        ("segv", Some(Signal::SIGSEGV as i32), None),
        ("exit:3", None, Some(3)),
        ("poison", None, Some(70)),
    ] {
        let mut worker = Worker::ready(&format!("crash={crash},crash_on=poison pill"));
        worker.stream(asked(1, "harmless", 5));
        worker.generate(asked(2, "a poison pill", 5));
        let (status, _) = worker.exit();
        assert_eq!((status.signal(), status.code()), (signal, code), "{crash}");
    }
}

#[test]
fn sigterm_ends_it_by_that_signal_and_never_in_the_middle_of_a_frame() {
    let mut worker = Worker::ready("");
    for request in 1..=4 {
        worker.generate(asked(request, "endless", 1_000_000_000));
    }
    worker.hear_until(|m| matches!(m, ToDispatcher::Tokens(_)).then_some(()));
    signal(&worker, Signal::SIGTERM);
    let began = Instant::now();
    // `hear` fails on bytes that are no whole frame.
    while worker.hear().is_some() {}
    assert!(began.elapsed() < PATIENCE);
    assert_eq!(worker.pending_bytes(), 0, "half a frame was left");
    assert_eq!(worker.exit().0.signal(), Some(Signal::SIGTERM as i32));
}

#[test]
fn signals_of_a_terminal_are_the_dispatchers_to_judge() {
    let mut worker = Worker::ready("");
    signal(&worker, Signal::SIGINT);
    signal(&worker, Signal::SIGHUP);
    assert_eq!(worker.stream(asked(1, "still here", 3)).ids.len(), 3);
}

#[test]
fn a_load_that_can_never_succeed_exits_78_and_says_why_once() {
    let mut worker = Worker::start("load=permanent");
    assert_eq!(worker.exit().0.code(), Some(78));
    assert_eq!(
        worker.stderr().matches("the script fails the load").count(),
        1
    );

    let mut worker = Worker::start("load=transient");
    assert_eq!(worker.exit().0.code(), Some(1));
}

#[test]
fn an_argument_with_a_mistake_exits_78() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_dispatcher-worker"))
        .args(["--slots", "none"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(78));
}

#[test]
fn a_refused_worker_exits_78_with_the_dispatchers_words() {
    let (mut worker, _) = Worker::connect("", &[]);
    worker.say(&ToWorker::Refused {
        reason: "wrong place".into(),
    });
    assert_eq!(worker.exit().0.code(), Some(78));
    assert!(worker.stderr().contains("wrong place"));
}

#[test]
fn foreign_bytes_end_the_process_with_a_typed_error() {
    let mut worker = Worker::ready("");
    std::io::Write::write_all(&mut worker.stream, &[0xff; 64]).unwrap();
    assert_eq!(worker.exit().0.code(), Some(76));
    assert!(
        worker
            .stderr()
            .contains("the dispatcher broke the protocol")
    );
}

/// The next `count` heartbeats.
fn heartbeats(worker: &mut Worker, count: usize) -> Vec<Progress> {
    let mut seen = Vec::new();
    worker.hear_until(|message| {
        if let ToDispatcher::Progress(progress) = message {
            seen.push(progress);
        }
        (seen.len() == count).then_some(())
    });
    seen
}

#[test]
fn a_hanging_engine_shows_as_a_pulse_that_stands_still() {
    let mut worker = Worker::ready("crash=hang,crash_at_step=4,step_us=1000");
    worker.generate(asked(1, "hang", 50));
    // The third step's row is the last sign of life.
    let mut rows = 0;
    worker.hear_until(|message| {
        rows += usize::from(matches!(message, ToDispatcher::Tokens(_)));
        (rows == 3).then_some(())
    });
    let beats = heartbeats(&mut worker, 4);
    let pulses: Vec<u64> = beats[1..].iter().map(|beat| beat.pulse).collect();
    assert!(
        pulses.windows(2).all(|pair| pair[0] == pair[1]),
        "{pulses:?}"
    );
    assert_eq!(beats[3].live_slots, 1);
    assert_eq!(beats[3].steps, 3);
}

#[test]
fn a_working_engine_moves_the_pulse_between_heartbeats() {
    let mut worker = Worker::ready("step_us=1000");
    worker.generate(asked(1, "busy", 1_000_000));
    worker.hear_until(|m| matches!(m, ToDispatcher::Tokens(_)).then_some(()));
    let beats = heartbeats(&mut worker, 3);
    assert!(
        beats.windows(2).all(|pair| pair[0].pulse < pair[1].pulse),
        "{beats:?}"
    );
    assert!(beats[2].longest_step.0 >= 1000);
}

#[test]
fn a_long_load_reports_progress() {
    let mut worker = Worker::start("load_ms=2000,warm_steps=5,warm_ms=200");
    let (mut loading, mut warming) = (Vec::new(), Vec::new());
    worker.hear_until(|message| match message {
        ToDispatcher::Loading { permille } => {
            loading.push(permille);
            None
        }
        ToDispatcher::Warming { done, .. } => {
            warming.push(done);
            None
        }
        ToDispatcher::Ready(_) => Some(()),
        _ => None,
    });
    assert!(loading.len() > 3 && loading.is_sorted(), "{loading:?}");
    assert!(warming.len() > 2 && warming.is_sorted(), "{warming:?}");
}

#[test]
#[ignore = "a measurement: it says something on an idle machine only"]
fn an_engine_without_delay_passes_a_million_tokens_a_second() {
    let mut worker = Worker::start_with("", &["--slots", "64", "--ctx-size", "1000000"]);
    worker.await_ready();
    let tokens = 50_000;
    let began = Instant::now();
    for request in 1..=64 {
        worker.generate(asked(request, "as fast as it can", tokens));
    }
    let (mut seen, mut ends) = (0_u64, 0);
    worker.hear_until(|message| {
        if let ToDispatcher::Tokens(step) = message {
            for row in step.rows {
                seen += row.tokens.len() as u64;
                ends += usize::from(row.end.is_some());
            }
        }
        (ends == 64).then_some(())
    });
    let per_second = seen as f64 / began.elapsed().as_secs_f64();
    println!("{per_second:.0} tokens/s");
    assert!(per_second > 1e6, "{per_second:.0} tokens/s");
}
