//! The writing end of the link: what the other threads have to say, as frames, in one order.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::Receiver;
use proto::codec::encode_into;
use proto::to_dispatcher::{PromptError, Ready, ToDispatcher};

use crate::batch::Event;
use crate::engine::TextModel;
use crate::exit;
use crate::rows::Rows;

/// Messages that may wait for the session thread. The engine waits when it is full, so it is
/// large: the dispatcher always reads.
pub const WAITING_MAX: usize = 1024;

/// Bytes of frames that are joined in one write at most, but for the last frame.
const WRITE_BYTES: usize = 64 << 10;

/// What the session thread is told.
#[derive(Debug)]
pub enum ToSession {
    Say(ToDispatcher),
    /// The engine is warm; its text side.
    Ready {
        ready: Box<Ready>,
        text: Arc<dyn TextModel>,
    },
    Engine(Event),
    /// The dispatcher drains. Where nothing is ready yet, there is nothing to wait for.
    Drain,
    /// Look at the flags.
    Wake,
}

/// Why the process ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    pub code: i32,
    /// For standard error.
    pub words: Option<String>,
}

impl Ending {
    #[must_use]
    pub fn new(code: i32, words: String) -> Self {
        Self {
            code,
            words: Some(words),
        }
    }

    /// Nothing to say.
    #[must_use]
    pub fn orderly() -> Self {
        Self {
            code: exit::ORDERLY,
            words: None,
        }
    }

    /// The dispatcher is gone.
    #[must_use]
    pub fn orphaned(how: &str) -> Self {
        Self::new(exit::ORPHANED, format!("the dispatcher is gone: {how}"))
    }
}

/// How the session thread and others know of each other's end.
#[derive(Debug, Default)]
pub struct Flags {
    /// Nothing is written any more once the frame under way is out.
    pub leaving: AtomicBool,
    /// `Drained` is being written: the end of file that follows is what was wanted.
    pub drained: AtomicBool,
}

/// Writes until drained, told to leave, or unable to; `None`: told to leave.
pub fn run(inbox: &Receiver<ToSession>, flags: &Flags, stream: &mut impl Write) -> Option<Ending> {
    let mut session = Session::default();
    while let Ok(told) = inbox.recv() {
        session.take(told);
        while session.bytes.len() < WRITE_BYTES && !session.drained {
            match inbox.try_recv() {
                Ok(told) => session.take(told),
                Err(_) => break,
            }
        }
        if flags.leaving.load(Ordering::Acquire) {
            return None;
        }
        if session.drained {
            flags.drained.store(true, Ordering::Release);
        }
        if let Err(error) = session.flush(stream) {
            return Some(Ending::orphaned(&error.to_string()));
        }
        if let Some(words) = session.fault {
            return Some(Ending::new(exit::PROTOCOL, words));
        }
        if session.drained {
            return Some(Ending::orderly());
        }
    }
    None
}

#[derive(Debug, Default)]
struct Session {
    rows: Option<Rows>,
    messages: Vec<ToDispatcher>,
    bytes: Vec<u8>,
    drained: bool,
    fault: Option<String>,
}

impl Session {
    fn take(&mut self, told: ToSession) {
        match told {
            // A heartbeat that was under way while the engine became ready.
            ToSession::Say(ToDispatcher::Loading { .. } | ToDispatcher::Warming { .. })
                if self.rows.is_some() => {}
            ToSession::Say(message) => self.messages.push(message),
            ToSession::Ready { ready, text } => {
                self.rows = Some(Rows::new(text, ready.slots));
                self.messages.push(ToDispatcher::Ready(ready));
            }
            ToSession::Engine(event) => {
                if let Some(rows) = &mut self.rows {
                    rows.tell(event, &mut self.messages);
                }
            }
            ToSession::Drain => {
                if self.rows.is_none() {
                    self.messages.push(ToDispatcher::Drained);
                }
            }
            ToSession::Wake => {}
        }
        for message in std::mem::take(&mut self.messages) {
            self.drained |= message == ToDispatcher::Drained;
            self.encode(&message);
        }
    }

    fn encode(&mut self, message: &ToDispatcher) {
        let Err(error) = encode_into(message, &mut self.bytes) else {
            return;
        };
        // Only a prompt's ids grow with what a client sends.
        let encoded = if let ToDispatcher::Tokenised { request, .. } = message {
            let refusal = ToDispatcher::Tokenised {
                request: *request,
                outcome: Err(PromptError::Template(format!(
                    "the prompt is too long: {error}"
                ))),
            };
            encode_into(&refusal, &mut self.bytes)
        } else {
            Err(error)
        };
        if let Err(error) = encoded {
            self.fault = Some(format!("cannot say what happened: {error}"));
        }
    }

    fn flush(&mut self, stream: &mut impl Write) -> io::Result<()> {
        let written = stream.write_all(&self.bytes);
        self.bytes.clear();
        if self.bytes.capacity() > 4 * WRITE_BYTES {
            self.bytes.shrink_to(WRITE_BYTES);
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::bounded;
    use proto::span::Micros;
    use proto::to_dispatcher::{ModelIdentity, Tokenised};
    use proto::{Decoder, FRAME_BYTES_MAX, RequestId, decode};

    use super::*;
    use crate::engine::scripted::ScriptedText;

    fn ready() -> ToSession {
        let ready = Ready {
            engine: "scripted".into(),
            model: ModelIdentity {
                name: "m".into(),
                hash: [0; 32],
            },
            device: "script".into(),
            slots: 2,
            context_tokens: 64,
            vocabulary: 300,
            longest_token_bytes: 8,
            weight_bytes_per_step: 1,
            kv_bytes_per_token: 1,
            load: Micros(1),
            warm_up: Micros(1),
        };
        ToSession::Ready {
            ready: Box::new(ready),
            text: Arc::new(ScriptedText),
        }
    }

    /// All that is written of `told`, and why it ended.
    fn written(told: Vec<ToSession>, flags: &Flags) -> (Vec<ToDispatcher>, Option<Ending>) {
        let (sender, inbox) = bounded(told.len());
        for told in told {
            sender.send(told).unwrap();
        }
        drop(sender);
        let mut bytes = Vec::new();
        let ending = run(&inbox, flags, &mut bytes);
        let (mut decoder, mut rest, mut messages) = (Decoder::new(), &bytes[..], Vec::new());
        while !rest.is_empty() {
            rest = &rest[decoder.push(rest)..];
            while let Some(frame) = decoder.next_frame().unwrap() {
                messages.push(decode(frame).unwrap());
            }
        }
        assert_eq!(decoder.pending_bytes(), 0, "only whole frames are written");
        (messages, ending)
    }

    fn loading() -> ToSession {
        ToSession::Say(ToDispatcher::Loading { permille: 7 })
    }

    #[test]
    fn nothing_of_the_load_is_said_after_ready() {
        let told = vec![loading(), ready(), loading()];
        let (messages, ending) = written(told, &Flags::default());
        assert_eq!(messages.len(), 2);
        assert!(matches!(messages[1], ToDispatcher::Ready(_)));
        assert_eq!(ending, None);
    }

    #[test]
    fn a_drain_before_ready_is_over_at_once_and_one_after_waits_for_the_engine() {
        let flags = Flags::default();
        let (messages, ending) = written(vec![ToSession::Drain, loading()], &flags);
        assert_eq!(messages, [ToDispatcher::Drained]);
        assert_eq!(ending, Some(Ending::orderly()));
        assert!(flags.drained.load(Ordering::Acquire));

        let told = vec![ready(), ToSession::Drain, ToSession::Engine(Event::Drained)];
        let (messages, ending) = written(told, &Flags::default());
        assert_eq!(messages.len(), 2);
        assert_eq!(ending, Some(Ending::orderly()));
    }

    #[test]
    fn nothing_more_is_written_once_it_is_to_leave() {
        let flags = Flags::default();
        flags.leaving.store(true, Ordering::Release);
        assert_eq!(written(vec![loading()], &flags), (Vec::new(), None));
    }

    #[test]
    fn a_prompt_too_long_for_a_frame_is_refused_in_words() {
        let told = ToSession::Say(ToDispatcher::Tokenised {
            request: RequestId(1),
            outcome: Ok(Tokenised {
                ids: vec![0; FRAME_BYTES_MAX / 4],
            }),
        });
        let (messages, ending) = written(vec![told], &Flags::default());
        assert!(matches!(
            &messages[..],
            [ToDispatcher::Tokenised { outcome: Err(PromptError::Template(words)), .. }]
                if words.contains("too long")
        ));
        assert_eq!(ending, None);
    }

    #[test]
    fn a_message_that_fits_no_frame_ends_the_process() {
        let told = ToSession::Say(ToDispatcher::Failed {
            request: RequestId(1),
            attempt: proto::Attempt(1),
            error: proto::to_dispatcher::RequestError::Engine("x".repeat(FRAME_BYTES_MAX)),
        });
        let (messages, ending) = written(vec![told], &Flags::default());
        assert!(messages.is_empty());
        assert_eq!(ending.unwrap().code, exit::PROTOCOL);
    }
}
