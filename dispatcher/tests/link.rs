//! Links over a real socket, with a worker that this test plays.

#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

#[path = "link/rig.rs"]
mod rig;

use dispatcher::input::{Input, LinkEnd};
use dispatcher::link::{DirectoryError, Handle, LinkCommand, ListenError, Listener, RunDirectory};
use dispatcher::machine::event::{Accepted, AttemptError};
use dispatcher::machine::{Outcome, Tick};
use dispatcher::relay;
use proto::span::Micros;
use proto::to_dispatcher::{End, Progress, RequestError, Row, StepTokens};
use proto::{Attempt, FinishReason, RequestId, ToDispatcher, ToWorker};

use rig::{INSTANCE, Rig, Worker, end, generate, row, step};

const FIRST: Attempt = Attempt(1);

async fn refused(change: impl FnOnce(&mut proto::to_dispatcher::Hello)) -> String {
    let rig = Rig::new();
    let mut hello = rig.expected_hello();
    change(&mut hello);
    let mut worker = Worker::connect(&rig);
    worker.say(&ToDispatcher::Hello(hello));
    let ToWorker::Refused { reason } = worker.hear() else {
        panic!("not refused");
    };
    worker.hear_end();
    reason
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_of_another_protocol_version_is_refused_with_words() {
    let words = refused(|hello| hello.protocol += 1).await;
    assert!(
        words.contains("installed from different releases"),
        "{words}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_of_another_generation_is_refused_with_words() {
    let words = refused(|hello| hello.generation = hello.generation.next()).await;
    assert!(words.contains("is expected"), "{words}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_with_another_token_is_refused_with_words() {
    let words = refused(|hello| hello.token[0] ^= 1).await;
    assert!(words.contains("token"), "{words}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_says_another_pid_is_refused_with_words() {
    let words = refused(|hello| hello.pid += 1).await;
    assert!(words.contains("that was spawned"), "{words}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_was_not_spawned_is_refused_whatever_it_says() {
    let rig = Rig::new();
    // The pid that the register expects is not this process's, whatever the hello claims.
    let pid = std::process::id() + 1;
    let token = dispatcher::link::Token::from([1; 32]);
    rig.expectations
        .expect(INSTANCE, rig::GENERATION, pid, token);
    let mut hello = rig.expected_hello();
    rig.expectations
        .expect(INSTANCE, rig::GENERATION, pid, [1; 32].into());
    hello.pid = pid;
    hello.token = [1; 32];
    let mut worker = Worker::connect(&rig);
    worker.say(&ToDispatcher::Hello(hello));
    let ToWorker::Refused { reason } = worker.hear() else {
        panic!("not refused");
    };
    assert!(reason.contains("that was spawned"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_worker_says_on_its_way_to_ready_reaches_the_driver_in_order() {
    let mut rig = Rig::new();
    let (mut worker, _handle) = rig.connected().await;
    worker.say(&ToDispatcher::Loading { permille: 500 });
    worker.say(&ToDispatcher::Warming { done: 1, of: 2 });
    worker.say(&ToDispatcher::Drained);
    assert!(matches!(
        rig.next().await,
        Input::Loading { permille: 500, .. }
    ));
    assert!(matches!(
        rig.next().await,
        Input::Warming { done: 1, of: 2, .. }
    ));
    assert!(matches!(rig.next().await, Input::Drained { .. }));
}

/// A connected worker with one request assigned to it.
struct Streaming {
    rig: Rig,
    worker: Worker,
    handle: Handle,
    relay: relay::Sender,
    receiver: relay::Receiver,
}

const REQUEST: RequestId = RequestId(7);

async fn streaming() -> Streaming {
    let mut rig = Rig::new();
    let (mut worker, handle) = rig.connected().await;
    let (relay, receiver) = relay::channel(Tick::ZERO);
    relay.assign(FIRST, INSTANCE, 3, Tick::ZERO);
    assert!(handle.send(LinkCommand::Generate {
        generate: Box::new(generate(REQUEST, FIRST)),
        relay: relay.clone(),
    }));
    assert!(matches!(worker.hear(), ToWorker::Generate(_)));
    Streaming {
        rig,
        worker,
        handle,
        relay,
        receiver,
    }
}

impl Streaming {
    async fn ended(mut self, cause: LinkEnd, tokens: u32) {
        let Input::AttemptEnded {
            accepted,
            cause: found,
            ..
        } = self.rig.until_ended().await
        else {
            unreachable!("until_ended returns nothing else");
        };
        assert_eq!(found, cause);
        let expected = Accepted {
            request: REQUEST,
            attempt: FIRST,
            tokens,
        };
        assert_eq!(accepted, [expected]);
        assert_eq!(self.relay.progress().attempt, FIRST.next(), "fenced");
        self.rig.nothing_more().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_reaches_its_relay_and_the_driver_hears_first_and_finished() {
    let mut it = streaming().await;
    it.worker.say(&ToDispatcher::Started {
        request: REQUEST,
        attempt: FIRST,
        cached_tokens: 2,
    });
    it.worker.say(&step(vec![row(REQUEST, FIRST, 0, 1)]));
    let last = end(
        row(REQUEST, FIRST, 1, 2),
        End::Finished(FinishReason::Length),
    );
    it.worker.say(&step(vec![last]));
    assert!(matches!(
        it.rig.next().await,
        Input::Started {
            cached_tokens: 2,
            ..
        }
    ));
    assert!(matches!(it.rig.next().await, Input::FirstToken { .. }));
    let Input::Finished { reason, tokens, .. } = it.rig.next().await else {
        panic!("not finished");
    };
    assert_eq!((reason, tokens), (FinishReason::Length, 3));
    let mut batch = relay::Batch::default();
    it.receiver.next(&mut batch).await;
    assert_eq!(batch.pieces.len(), 3);
    assert!(batch.end.is_some());
    // The attempt is over: the end of the link has nothing to say of it.
    drop(it.worker);
    let Input::AttemptEnded { accepted, .. } = it.rig.until_ended().await else {
        unreachable!("until_ended returns nothing else");
    };
    assert_eq!(accepted, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_that_were_buffered_before_the_end_of_file_are_accepted() {
    let mut it = streaming().await;
    for index in 0..500 {
        it.worker.say(&step(vec![row(REQUEST, FIRST, index, 1)]));
    }
    it.worker.close();
    it.ended(LinkEnd::Eof, 500).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_frame_before_the_end_of_file_is_dropped() {
    let mut it = streaming().await;
    it.worker.say(&step(vec![row(REQUEST, FIRST, 0, 1)]));
    let frame = proto::encode(&step(vec![row(REQUEST, FIRST, 1, 1)])).unwrap();
    it.worker.write(&frame[..frame.len() - 1]);
    it.worker.close();
    it.ended(LinkEnd::Eof, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_arrives_after_close_never_reaches_a_relay() {
    let mut it = streaming().await;
    it.worker.say(&step(vec![row(REQUEST, FIRST, 0, 1)]));
    assert!(matches!(it.rig.next().await, Input::FirstToken { .. }));
    assert!(it.handle.send(LinkCommand::Close));
    it.worker.hear_end();
    // Both directions are shut: the worker cannot even send.
    assert!(
        it.worker
            .try_say(&step(vec![row(REQUEST, FIRST, 1, 1)]))
            .is_err()
    );
    let relay = it.relay.clone();
    it.ended(LinkEnd::Closed, 1).await;
    assert_eq!(relay.tokens(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generate_that_the_ending_link_never_sent_is_fenced_too() {
    let mut it = streaming().await;
    assert!(it.handle.send(LinkCommand::Close));
    let (relay, _receiver) = relay::channel(Tick::ZERO);
    relay.assign(FIRST, INSTANCE, 3, Tick::ZERO);
    let taken = it.handle.send(LinkCommand::Generate {
        generate: Box::new(generate(RequestId(8), FIRST)),
        relay: relay.clone(),
    });
    let Input::AttemptEnded { accepted, .. } = it.rig.until_ended().await else {
        unreachable!("until_ended returns nothing else");
    };
    // Taken and fenced, or refused to the sender: never taken and forgotten.
    let listed = accepted.iter().any(|it| it.request == RequestId(8));
    assert_eq!(listed, taken);
    assert_eq!(relay.progress().attempt == FIRST.next(), taken);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gap_in_a_stream_is_the_workers_protocol_error() {
    let mut it = streaming().await;
    it.worker.say(&step(vec![row(REQUEST, FIRST, 0, 1)]));
    it.worker.say(&step(vec![row(REQUEST, FIRST, 2, 1)]));
    it.worker.hear_end();
    let words = "request 7, attempt 1: a row begins at token 2, not at 1";
    it.ended(LinkEnd::Protocol(words.into()), 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_malformed_frame_ends_the_link_after_the_good_ones_before_it() {
    let mut it = streaming().await;
    let mut bytes = proto::encode(&step(vec![row(REQUEST, FIRST, 0, 1)])).unwrap();
    bytes.extend([4, 0, 0, 0, 255, 255, 255, 255]);
    bytes.extend(proto::encode(&step(vec![row(REQUEST, FIRST, 1, 1)])).unwrap());
    it.worker.write(&bytes);
    let Input::AttemptEnded {
        cause, accepted, ..
    } = it.rig.until_ended().await
    else {
        unreachable!("until_ended returns nothing else");
    };
    let LinkEnd::Protocol(words) = cause else {
        panic!("{cause:?}");
    };
    assert!(words.starts_with("frame is not a message"), "{words}");
    assert_eq!(accepted[0].tokens, 1);
    it.rig.nothing_more().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_giant_frame_ends_the_link_by_its_prefix() {
    let mut it = streaming().await;
    it.worker.write(&u32::MAX.to_le_bytes());
    it.worker.hear_end();
    let words = "frame of 4294967295 bytes is over the cap of 16777216";
    it.ended(LinkEnd::Protocol(words.into()), 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_hello_ends_the_link() {
    let mut it = streaming().await;
    let hello = it.rig.expected_hello();
    it.worker.say(&ToDispatcher::Hello(hello));
    it.ended(LinkEnd::Protocol("a second hello".into()), 0)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_unknown_attempts_are_counted_and_dropped() {
    let mut it = streaming().await;
    it.worker.say(&step(vec![
        row(REQUEST, Attempt(9), 0, 1),
        row(RequestId(99), FIRST, 0, 1),
        row(REQUEST, FIRST, 0, 1),
    ]));
    let mut stale = 0;
    let mut first = false;
    while stale < 2 || !first {
        match it.rig.next_of_all().await {
            Input::Stale { count } => stale += count,
            Input::FirstToken { attempt, .. } => first = attempt == FIRST,
            Input::Progress { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((stale, it.relay.tokens()), (2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_is_sent_and_its_answer_told() {
    let mut it = streaming().await;
    assert!(it.handle.send(LinkCommand::Cancel {
        request: REQUEST,
        attempt: FIRST,
    }));
    assert!(matches!(it.worker.hear(), ToWorker::Cancel { .. }));
    let last = end(row(REQUEST, FIRST, 0, 0), End::Cancelled);
    it.worker.say(&step(vec![last]));
    assert!(matches!(it.rig.next().await, Input::CancelDone { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finish_that_crosses_a_cancel_is_told_as_its_answer() {
    let mut it = streaming().await;
    it.relay.end(Outcome::Cancelled(
        dispatcher::machine::event::CancelCause::ClientDisconnect,
    ));
    let last = end(row(REQUEST, FIRST, 0, 1), End::Finished(FinishReason::Stop));
    it.worker.say(&step(vec![last]));
    assert!(matches!(it.rig.next().await, Input::CancelDone { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_are_told_by_whose_fault_they_are() {
    let rejected = || RequestError::Rejected("no".into());
    let engine = || RequestError::Engine("NaN".into());
    for (error, told) in [
        (rejected(), AttemptError::Rejected("no".into())),
        (engine(), AttemptError::Engine("NaN".into())),
        (RequestError::NoSlot, AttemptError::NotTaken),
        (RequestError::Draining, AttemptError::NotTaken),
    ] {
        for in_a_row in [false, true] {
            let mut it = streaming().await;
            let error = error.clone();
            it.worker.say(&if in_a_row {
                step(vec![end(row(REQUEST, FIRST, 0, 1), End::Failed(error))])
            } else {
                ToDispatcher::Failed {
                    request: REQUEST,
                    attempt: FIRST,
                    error,
                }
            });
            let mut input = it.rig.next().await;
            if in_a_row {
                assert!(matches!(input, Input::FirstToken { .. }));
                input = it.rig.next().await;
            }
            let Input::RequestFailed { error, .. } = input else {
                panic!("{input:?}");
            };
            assert_eq!(error, told);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_stops_is_told_once_and_holds_nobody_up() {
    let mut it = streaming().await;
    let text = "x".repeat(40 << 10);
    for index in 0..12 {
        let mut row = row(REQUEST, FIRST, index, 1);
        row.tokens[0].text.clone_from(&text);
        it.worker.say(&step(vec![row]));
    }
    it.worker.say(&ToDispatcher::Drained);
    assert!(matches!(it.rig.next().await, Input::FirstToken { .. }));
    assert!(matches!(it.rig.next().await, Input::SlowReader { .. }));
    assert!(matches!(it.rig.next().await, Input::Drained { .. }));
    assert_eq!(it.relay.tokens(), 12, "the link went on reading");
}

#[tokio::test(flavor = "multi_thread")]
async fn counters_are_handed_on_summed_and_not_with_every_frame() {
    let mut it = streaming().await;
    let frames = 2000;
    for index in 0..frames {
        let mut frame = StepTokens {
            step: u64::from(index) + 1,
            duration: Micros(10),
            batch: 3,
            prefill_tokens: 0,
            rows: vec![row(REQUEST, FIRST, index, 1)],
        };
        frame.rows[0].tokens[0].text.clear();
        it.worker.say(&ToDispatcher::Tokens(frame));
    }
    it.worker.say(&ToDispatcher::Progress(Progress {
        pulse: 9000,
        steps: u64::from(frames),
        live_slots: 1,
        longest_step: Micros(10),
    }));
    let began = std::time::Instant::now();
    let (mut reports, mut sums) = (0, (0, 0, 0));
    loop {
        if let Input::Progress {
            pulse,
            tokens,
            batch_sum,
            steps_done,
            ..
        } = it.rig.next_of_all().await
        {
            reports += 1;
            sums = (sums.0 + tokens, sums.1 + batch_sum, sums.2 + steps_done);
            if pulse == 9000 {
                break;
            }
        }
    }
    assert_eq!(sums, (2000, 6000, 2000));
    let bound = 3 + began.elapsed().as_millis() / 50;
    assert!(reports <= bound, "{reports} reports, bound {bound}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_stops_reading_can_still_be_closed() {
    let mut it = streaming().await;
    let mut long = generate(RequestId(8), FIRST);
    long.prompt = vec![1; 1 << 20];
    let (relay, _receiver) = relay::channel(Tick::ZERO);
    for _ in 0..4 {
        assert!(it.handle.send(LinkCommand::Generate {
            generate: Box::new(long.clone()),
            relay: relay.clone(),
        }));
    }
    assert!(it.handle.send(LinkCommand::Close));
    let Input::AttemptEnded { cause, .. } = it.rig.until_ended().await else {
        unreachable!("until_ended returns nothing else");
    };
    assert_eq!(cause, LinkEnd::Closed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_never_reads_does_not_grow_without_bound() {
    let mut it = streaming().await;
    let mut long = generate(RequestId(8), FIRST);
    long.prompt = vec![1; 3 << 20];
    let (relay, _receiver) = relay::channel(Tick::ZERO);
    for _ in 0..8 {
        let _ = it.handle.send(LinkCommand::Generate {
            generate: Box::new(long.clone()),
            relay: relay.clone(),
        });
    }
    let Input::AttemptEnded { cause, .. } = it.rig.until_ended().await else {
        unreachable!("until_ended returns nothing else");
    };
    let LinkEnd::Protocol(words) = cause else {
        panic!("{cause:?}");
    };
    assert!(words.starts_with("the worker does not read"), "{words}");
}

#[tokio::test]
async fn a_dead_dispatchers_socket_is_replaced_and_a_live_ones_is_not() {
    use std::os::unix::fs::PermissionsExt;
    let root = tempfile::tempdir().unwrap();
    let directory = RunDirectory::open(root.path()).unwrap();
    // A dead dispatcher leaves its file behind: closing a socket does not remove it.
    drop(std::os::unix::net::UnixListener::bind(directory.socket()).unwrap());
    let listener = Listener::bind(&directory).unwrap();
    let mode = std::fs::metadata(listener.path()).unwrap().permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    let error = Listener::bind(&directory).unwrap_err();
    assert!(matches!(error, ListenError::InUse(_)), "{error}");
    let error = RunDirectory::open(root.path()).unwrap_err();
    assert!(matches!(error, DirectoryError::InUse(_)), "{error}");
    drop(listener);
    assert!(!directory.socket().exists());
}

/// Link, relay and reader on one thread; the worker's side is encoded beforehand.
#[tokio::test]
#[ignore = "measures: needs two idle cores and the release profile"]
async fn half_a_million_tokens_a_second_pass_through_one_core() {
    const ROWS: u32 = 64;
    const FRAMES: u32 = 20_000;
    let mut rig = Rig::new();
    let (mut worker, handle) = rig.connected_on_one_thread().await;
    let mut readers = tokio::task::JoinSet::new();
    for id in 1..=ROWS {
        let (relay, mut receiver) = relay::channel(Tick::ZERO);
        relay.assign(FIRST, INSTANCE, 3, Tick::ZERO);
        assert!(handle.send(LinkCommand::Generate {
            generate: Box::new(generate(RequestId(id.into()), FIRST)),
            relay,
        }));
        readers.spawn(async move {
            let mut batch = relay::Batch::default();
            let mut tokens = 0;
            while batch.end.is_none() {
                receiver.next(&mut batch).await;
                tokens += batch.pieces.len();
            }
            tokens
        });
    }
    let frames: Vec<u8> = (0..FRAMES)
        .flat_map(|index| {
            let rows: Vec<Row> = (1..=ROWS)
                .map(|id| {
                    let row = row(RequestId(id.into()), FIRST, index, 1);
                    if index + 1 < FRAMES {
                        return row;
                    }
                    end(row, End::Finished(FinishReason::Length))
                })
                .collect();
            proto::encode(&step(rows)).unwrap()
        })
        .collect();
    let drain = tokio::spawn(async move { while rig.inputs.recv().await.is_some() {} });
    let began = std::time::Instant::now();
    let writer = std::thread::spawn(move || {
        worker.write(&frames);
        worker
    });
    let mut tokens = 0;
    while let Some(read) = readers.join_next().await {
        tokens += read.unwrap();
    }
    let seconds = began.elapsed().as_secs_f64();
    drop(writer.join().unwrap());
    drain.abort();
    let rate = f64::from(u32::try_from(tokens).unwrap()) / seconds;
    assert_eq!(tokens, (ROWS * FRAMES) as usize);
    assert!(rate > 500_000.0, "{rate:.0} tokens/s");
    // Shown by --no-capture: the figure is worth more than its bound.
    use std::io::Write as _;
    writeln!(std::io::stderr(), "{rate:.0} tokens/s").unwrap();
}
