//! A dispatcher of a few lines: starts one real worker process and speaks with it.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use proto::to_dispatcher::{End, Hello, Ready, Row};
use proto::{
    Attempt, Decoder, Generate, PROTOCOL_VERSION, RequestId, Sampling, ToDispatcher, ToWorker,
    TokenId, decode, encode,
};

/// No answer takes longer on a machine that works, however loaded.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

const TOKEN: [u8; 32] = [7; 32];

/// One worker process and the dispatcher's end of its link.
pub(crate) struct Worker {
    pub(crate) child: Child,
    pub(crate) stdin: Option<ChildStdin>,
    pub(crate) stream: UnixStream,
    decoder: Decoder,
    _folder: tempfile::TempDir,
}

impl Worker {
    /// Starts a scripted worker of four slots and shakes hands.
    pub(crate) fn start(script: &str) -> Self {
        Self::start_with(script, &["--slots", "4"])
    }

    pub(crate) fn start_with(script: &str, extra: &[&str]) -> Self {
        let (mut worker, hello) = Self::connect(script, extra);
        assert_eq!(hello.protocol, PROTOCOL_VERSION);
        assert_eq!(hello.pid, worker.child.id());
        assert_eq!(hello.token, TOKEN);
        worker.say(&ToWorker::Hello {
            protocol: PROTOCOL_VERSION,
            build: "a test".into(),
        });
        worker
    }

    /// Starts one and hears its `Hello`.
    pub(crate) fn connect(script: &str, extra: &[&str]) -> (Self, Hello) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_dispatcher-worker"))
            .args([
                "--instance",
                "2",
                "--generation",
                "5",
                "--engine",
                "scripted",
            ])
            .args(["--model", "dummy", "--scripted", script])
            .args(["--parent-pid", &std::process::id().to_string()])
            .arg("--socket")
            .arg(&path)
            .args(extra)
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(&TOKEN).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut worker = Self {
            child,
            stdin: Some(stdin),
            stream,
            decoder: Decoder::new(),
            _folder: folder,
        };
        match worker.hear() {
            Some(ToDispatcher::Hello(hello)) => (worker, hello),
            other => panic!("the first words are {other:?}"),
        }
    }

    /// Starts one and waits until it is ready.
    pub(crate) fn ready(script: &str) -> Self {
        let mut worker = Self::start(script);
        worker.await_ready();
        worker
    }

    pub(crate) fn say(&mut self, message: &ToWorker) {
        self.stream.write_all(&encode(message).unwrap()).unwrap();
    }

    pub(crate) fn generate(&mut self, generate: Generate) {
        self.say(&ToWorker::Generate(Box::new(generate)));
    }

    /// The next message; `None` at the end of file.
    pub(crate) fn hear(&mut self) -> Option<ToDispatcher> {
        let mut buffer = [0; 64 << 10];
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                return Some(decode(frame).unwrap());
            }
            let read = match self.stream.read(&mut buffer) {
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => 0,
                Err(error) => panic!("nothing heard: {error}"),
            };
            if read == 0 {
                return None;
            }
            let mut bytes = &buffer[..read];
            while !bytes.is_empty() {
                bytes = &bytes[self.decoder.push(bytes)..];
            }
        }
    }

    /// Hears until `wanted` finds what it looks for.
    pub(crate) fn hear_until<T>(&mut self, mut wanted: impl FnMut(ToDispatcher) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let message = self.hear().expect("the worker went while it was heard");
            if let Some(found) = wanted(message) {
                return found;
            }
            assert!(
                Instant::now() < deadline,
                "it never says what is waited for"
            );
        }
    }

    pub(crate) fn await_ready(&mut self) -> Ready {
        self.hear_until(|message| match message {
            ToDispatcher::Ready(ready) => Some(*ready),
            _ => None,
        })
    }

    /// Hears rows until each of `requests` has ended.
    pub(crate) fn collect(&mut self, requests: &[u64]) -> Vec<Stream> {
        let mut streams: Vec<Stream> = requests.iter().map(|id| Stream::new(*id)).collect();
        self.hear_until(|message| {
            match message {
                ToDispatcher::Tokens(step) => {
                    for row in step.rows {
                        let stream = streams.iter_mut().find(|s| s.request == row.request);
                        stream
                            .expect("a row of a request that nobody waits for")
                            .take(row);
                    }
                }
                ToDispatcher::Failed { request, error, .. } => {
                    panic!("request {request} failed: {error:?}")
                }
                _ => {}
            }
            streams
                .iter()
                .all(|stream| stream.end.is_some())
                .then_some(())
        });
        streams
    }

    /// Bytes heard that are no whole frame.
    pub(crate) fn pending_bytes(&self) -> usize {
        self.decoder.pending_bytes()
    }

    /// One stream from its beginning to its end.
    pub(crate) fn stream(&mut self, asked: Generate) -> Stream {
        let request = asked.request.0;
        let first_index = asked.emitted.len();
        self.generate(asked);
        let mut stream = self.collect(&[request]).remove(0);
        stream.first_index = first_index;
        stream
    }

    /// Waits for the process's end, and says how long that took.
    pub(crate) fn exit(&mut self) -> (ExitStatus, Duration) {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status, began.elapsed());
            }
            assert!(began.elapsed() < PATIENCE, "the worker does not end");
            std::thread::yield_now();
        }
    }

    /// What it printed; after its end.
    pub(crate) fn stderr(&mut self) -> String {
        let mut text = String::new();
        let mut stderr = self.child.stderr.take().unwrap();
        stderr.read_to_string(&mut text).unwrap();
        text
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What one request got.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stream {
    pub(crate) request: RequestId,
    pub(crate) ids: Vec<TokenId>,
    /// Released bytes after each token.
    pub(crate) released: Vec<u64>,
    pub(crate) text: String,
    pub(crate) end: Option<End>,
    pub(crate) rows: usize,
    first_index: usize,
}

impl Stream {
    fn new(request: u64) -> Self {
        Self {
            request: RequestId(request),
            ids: Vec::new(),
            released: Vec::new(),
            text: String::new(),
            end: None,
            rows: 0,
            first_index: 0,
        }
    }

    fn take(&mut self, row: Row) {
        assert_eq!(self.end, None, "a row after the end");
        if self.ids.is_empty() {
            self.first_index = usize::try_from(row.first_index).unwrap();
        }
        assert_eq!(
            usize::try_from(row.first_index).unwrap(),
            self.first_index + self.ids.len(),
            "a gap"
        );
        for token in row.tokens {
            self.ids.push(token.id);
            self.text.push_str(&token.text);
            self.released.push(token.released_bytes);
        }
        self.text.push_str(&row.tail);
        self.end = row.end;
        self.rows += 1;
    }
}

/// A request for `max_tokens` tokens after `prompt`, greedy.
pub(crate) fn asked(request: u64, prompt: &str, max_tokens: u32) -> Generate {
    use worker::engine::TextModel;
    Generate {
        request: RequestId(request),
        attempt: Attempt(1),
        prompt: worker::engine::scripted::ScriptedText.tokenise(prompt, true),
        emitted: Vec::new(),
        released_bytes: 0,
        max_tokens,
        sampling: Sampling {
            temperature: 0.0,
            ..Sampling::default()
        },
        stop: Vec::new(),
        stop_ids: Vec::new(),
        ignore_eos: false,
        logprobs: None,
        batch_invariant: false,
        cache_prompt: true,
    }
}
