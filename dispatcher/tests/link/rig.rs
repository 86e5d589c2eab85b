//! A listener in a directory of its own, and a worker's side of the socket.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dispatcher::clock::Clock;
use dispatcher::input::Input;
use dispatcher::link::{Context, Expectations, Handle, Listener, NoObserver, RunDirectory, Token};
use proto::generate::Sampling;
use proto::span::Micros;
use proto::to_dispatcher::{End, Hello, Row, StepTokens};
use proto::{
    Attempt, Decoder, Generate, Generation, InstanceId, PROTOCOL_VERSION, RequestId, ToDispatcher,
    ToWorker, decode, encode,
};
use tokio::sync::mpsc;
use tokio::time::timeout;

pub(crate) const INSTANCE: InstanceId = InstanceId(1);
pub(crate) const GENERATION: Generation = Generation(4);

/// A wait that takes longer has failed; nothing passes because of it.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Rig {
    pub(crate) inputs: mpsc::Receiver<Input>,
    pub(crate) expectations: Expectations,
    socket: PathBuf,
    _directory: RunDirectory,
    _root: tempfile::TempDir,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let directory = RunDirectory::open(root.path()).unwrap();
        let listener = Listener::bind(&directory).unwrap();
        let (sender, inputs) = mpsc::channel(1024);
        let expectations = Expectations::new();
        let context = Context {
            clock: Clock::start(),
            inputs: sender,
            expectations: expectations.clone(),
            observer: Arc::new(NoObserver),
            build: "rig".into(),
        };
        tokio::spawn(listener.serve(context));
        Self {
            inputs,
            expectations,
            socket: directory.socket(),
            _directory: directory,
            _root: root,
        }
    }

    /// Expects this process, and returns the hello that it would be let in with.
    pub(crate) fn expected_hello(&self) -> Hello {
        let token = Token::generate().unwrap();
        let bytes = *token.as_bytes();
        let pid = std::process::id();
        self.expectations.expect(INSTANCE, GENERATION, pid, token);
        Hello {
            protocol: PROTOCOL_VERSION,
            build: "worker".into(),
            instance: INSTANCE,
            generation: GENERATION,
            pid,
            token: bytes,
        }
    }

    pub(crate) async fn connected(&mut self) -> (Worker, Handle) {
        let mut worker = Worker::connect(self);
        worker.say(&ToDispatcher::Hello(self.expected_hello()));
        let handle = self.connected_handle().await;
        assert!(matches!(worker.hear(), ToWorker::Hello { .. }));
        (worker, handle)
    }

    /// As `connected`, where blocking this thread would block the link.
    pub(crate) async fn connected_on_one_thread(&mut self) -> (Worker, Handle) {
        let mut worker = Worker::connect(self);
        worker.say(&ToDispatcher::Hello(self.expected_hello()));
        let handle = self.connected_handle().await;
        (worker, handle)
    }

    async fn connected_handle(&mut self) -> Handle {
        match self.next().await {
            Input::Connected {
                instance,
                generation,
                handle,
                build,
            } => {
                assert_eq!((instance, generation), (INSTANCE, GENERATION));
                assert_eq!(build, "worker");
                handle
            }
            other => panic!("{other:?}"),
        }
    }

    /// The next input but for counters.
    pub(crate) async fn next(&mut self) -> Input {
        loop {
            let input = self.next_of_all().await;
            if !matches!(input, Input::Progress { .. }) {
                return input;
            }
        }
    }

    pub(crate) async fn next_of_all(&mut self) -> Input {
        timeout(PATIENCE, self.inputs.recv())
            .await
            .expect("an input comes")
            .expect("the listener lives")
    }

    pub(crate) async fn until_ended(&mut self) -> Input {
        loop {
            let input = self.next().await;
            if matches!(input, Input::AttemptEnded { .. }) {
                return input;
            }
        }
    }

    /// The link's task has ended and has sent nothing after its end.
    pub(crate) async fn nothing_more(mut self) {
        // The listener holds the one sender left: dropping the root cannot close the channel, so
        // another link's whole life is put behind what must not come.
        let (worker, _handle) = self.connected().await;
        drop(worker);
        let next = self.next().await;
        assert!(matches!(next, Input::AttemptEnded { .. }), "{next:?}");
    }
}

/// A worker's end of the link, blocking.
pub(crate) struct Worker {
    stream: UnixStream,
    decoder: Decoder,
}

impl Worker {
    pub(crate) fn connect(rig: &Rig) -> Self {
        let stream = UnixStream::connect(&rig.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self {
            stream,
            decoder: Decoder::new(),
        }
    }

    pub(crate) fn say(&mut self, message: &ToDispatcher) {
        self.try_say(message).unwrap();
    }

    pub(crate) fn try_say(&mut self, message: &ToDispatcher) -> std::io::Result<()> {
        self.stream.write_all(&encode(message).unwrap())
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub(crate) fn hear(&mut self) -> ToWorker {
        let mut read = [0; 4096];
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                return decode(frame).unwrap();
            }
            let length = self.stream.read(&mut read).unwrap();
            assert!(length > 0, "the link ended");
            assert_eq!(self.decoder.push(&read[..length]), length);
        }
    }

    pub(crate) fn hear_end(&mut self) {
        assert_eq!(self.decoder.pending_bytes(), 0);
        let mut read = [0; 1];
        // A reset is an end too: the dispatcher leaves what it did not read.
        let length = self.stream.read(&mut read).unwrap_or(0);
        assert_eq!(length, 0, "the link goes on");
    }

    pub(crate) fn close(&mut self) {
        self.stream.shutdown(Shutdown::Both).unwrap();
    }
}

pub(crate) fn generate(request: RequestId, attempt: Attempt) -> Generate {
    Generate {
        request,
        attempt,
        prompt: vec![1, 2, 3],
        emitted: Vec::new(),
        released_bytes: 0,
        max_tokens: 64,
        sampling: Sampling::default(),
        stop: Vec::new(),
        stop_ids: Vec::new(),
        ignore_eos: false,
        logprobs: None,
        batch_invariant: false,
        cache_prompt: true,
    }
}

pub(crate) fn row(request: RequestId, attempt: Attempt, first_index: u32, tokens: u32) -> Row {
    let token = |index| proto::to_dispatcher::Token {
        id: index,
        text: " word".into(),
        released_bytes: u64::from(index + 1) * 5,
        logprobs: None,
    };
    Row {
        request,
        attempt,
        first_index,
        tokens: (first_index..first_index + tokens).map(token).collect(),
        tail: String::new(),
        end: None,
    }
}

pub(crate) fn end(row: Row, end: End) -> Row {
    Row {
        end: Some(end),
        ..row
    }
}

pub(crate) fn step(rows: Vec<Row>) -> ToDispatcher {
    ToDispatcher::Tokens(StepTokens {
        step: 1,
        duration: Micros(1000),
        batch: u32::try_from(rows.len()).unwrap(),
        prefill_tokens: 0,
        rows,
    })
}
