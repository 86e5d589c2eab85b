//! One stream's text: token ids in, released text out, resumable from the ids alone.

use proto::TokenId;

use crate::detokenize::Utf8Stream;
use crate::engine::TextModel;
use crate::stop::StopMatcher;

/// The text state of one stream.
///
/// It is a function of the stream's token ids and stop strings, so that a resumed stream rebuilds
/// it by taking the ids of earlier attempts in again.
#[derive(Clone, Debug)]
pub struct TextStream {
    characters: Utf8Stream,
    stop: StopMatcher,
    /// Bytes released so far, those of earlier attempts included.
    released_bytes: u64,
    /// Bytes that earlier attempts released and the replay has not reached.
    suppressed_bytes: u64,
    /// Text that the replay released and earlier attempts had not.
    owed: String,
    stopped: bool,
    piece: Vec<u8>,
    decoded: String,
}

impl TextStream {
    /// A stream that `emitted` has begun, of whose text `released_bytes` bytes were handed on.
    #[must_use]
    pub fn resume(
        model: &dyn TextModel,
        emitted: &[TokenId],
        released_bytes: u64,
        stop: &[String],
    ) -> Self {
        let mut stream = Self {
            characters: Utf8Stream::default(),
            stop: StopMatcher::new(stop),
            released_bytes: 0,
            suppressed_bytes: released_bytes,
            owed: String::new(),
            stopped: false,
            piece: Vec::new(),
            decoded: String::new(),
        };
        let mut owed = String::new();
        for &token in emitted {
            if stream.push(model, token, &mut owed) {
                break;
            }
        }
        stream.released_bytes = released_bytes;
        stream.owed = owed;
        stream
    }

    /// Takes one token and appends to `out` the text it releases. `true`: a stop string is
    /// complete, and the stream is over.
    pub fn push(&mut self, model: &dyn TextModel, token: TokenId, out: &mut String) -> bool {
        if self.stopped {
            return true;
        }
        self.piece.clear();
        model.piece(token, &mut self.piece);
        self.decoded.clear();
        self.characters.push(&self.piece, &mut self.decoded);
        let start = self.pay_owed(out);
        self.stopped = self.stop.push(&self.decoded, out);
        self.account(start, out);
        self.stopped
    }

    /// The stream ended: appends what was held back, unless a stop string ended it. `true`: the
    /// last of the text completed a stop string.
    pub fn finish(&mut self, out: &mut String) -> bool {
        let start = self.pay_owed(out);
        if !self.stopped {
            self.decoded.clear();
            self.characters.finish(&mut self.decoded);
            self.stopped = self.stop.push(&self.decoded, out);
            if !self.stopped {
                self.stop.finish(out);
            }
        }
        self.account(start, out);
        self.stopped
    }

    /// Whether a stop string was completed.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Bytes of this stream's text released so far.
    #[must_use]
    pub fn released_bytes(&self) -> u64 {
        self.released_bytes
    }

    fn pay_owed(&mut self, out: &mut String) -> usize {
        let start = out.len();
        out.push_str(&self.owed);
        self.owed.clear();
        start
    }

    /// Counts what stands in `out` from `start`, less what the client already has.
    fn account(&mut self, start: usize, out: &mut String) {
        if self.suppressed_bytes > 0 {
            let appended = &out[start..];
            let wanted = usize::try_from(self.suppressed_bytes).unwrap_or(usize::MAX);
            // A count from a peer may point into a character: what is left of it is not sent twice.
            let cut = appended.ceil_char_boundary(wanted.min(appended.len()));
            self.suppressed_bytes = self.suppressed_bytes.saturating_sub(cut as u64);
            out.drain(start..start + cut);
        }
        self.released_bytes += (out.len() - start) as u64;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::engine::ChatTemplateSource;

    /// Every byte is a token.
    struct Bytes;

    impl TextModel for Bytes {
        fn tokenise(&self, text: &str, _: bool) -> Vec<TokenId> {
            text.bytes().map(TokenId::from).collect()
        }
        fn piece(&self, token: TokenId, into: &mut Vec<u8>) {
            into.extend(u8::try_from(token));
        }
        fn is_end(&self, _: TokenId) -> bool {
            false
        }
        fn vocabulary(&self) -> u32 {
            256
        }
        fn longest_token_bytes(&self) -> u32 {
            1
        }
        fn chat_template(&self) -> Option<ChatTemplateSource> {
            None
        }
    }

    /// Runs `tokens` to the end from a given point; the text and whether a stop string ended it.
    fn run(stream: &mut TextStream, tokens: &[TokenId]) -> (String, bool) {
        let mut out = String::new();
        for &token in tokens {
            if stream.push(&Bytes, token, &mut out) {
                return (out, true);
            }
        }
        let stopped = stream.finish(&mut out);
        (out, stopped)
    }

    #[test]
    fn text_held_back_before_a_death_is_released_after_it() {
        let tokens = Bytes.tokenise("say ST", false);
        let stop = ["STOP".to_string()];
        let mut first = TextStream::resume(&Bytes, &[], 0, &stop);
        let mut before = String::new();
        for &token in &tokens {
            assert!(!first.push(&Bytes, token, &mut before));
        }
        assert_eq!(before, "say ");
        let mut second = TextStream::resume(&Bytes, &tokens, first.released_bytes(), &stop);
        let (after, stopped) = run(&mut second, &Bytes.tokenise("IR", false));
        assert_eq!((after.as_str(), stopped), ("STIR", false));
        assert_eq!(second.released_bytes(), 8);
    }

    #[test]
    fn emitted_tokens_that_already_hold_a_stop_string_are_a_finished_stream() {
        let tokens = Bytes.tokenise("one STOP", false);
        let mut stream = TextStream::resume(&Bytes, &tokens, 2, &["STOP".to_string()]);
        assert!(stream.is_stopped());
        let mut owed = String::new();
        assert!(stream.finish(&mut owed));
        assert_eq!(owed, "e ");
        assert_eq!(stream.released_bytes(), 4);
    }

    #[test]
    fn a_released_count_inside_a_character_sends_no_byte_twice() {
        let tokens = Bytes.tokenise("é!", false);
        let mut stream = TextStream::resume(&Bytes, &tokens, 1, &[]);
        let mut owed = String::new();
        stream.finish(&mut owed);
        assert_eq!(owed, "!");
    }

    proptest! {
        #[test]
        fn a_stream_resumed_after_any_token_reads_as_if_nothing_had_happened(
            bytes in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..40),
                "[abé🦀]{0,20}".prop_map(String::into_bytes),
            ],
            stop in prop::collection::vec("[abé🦀]{1,4}", 0..3),
            cut in any::<prop::sample::Index>(),
        ) {
            let tokens: Vec<TokenId> = bytes.iter().copied().map(TokenId::from).collect();
            let whole = run(&mut TextStream::resume(&Bytes, &[], 0, &stop), &tokens);

            let cut = cut.index(tokens.len() + 1);
            let mut first = TextStream::resume(&Bytes, &[], 0, &stop);
            let mut text = String::new();
            for &token in &tokens[..cut] {
                if first.push(&Bytes, token, &mut text) {
                    break;
                }
            }
            prop_assert_eq!(first.released_bytes(), text.len() as u64);
            let mut second = TextStream::resume(&Bytes, &tokens[..cut], text.len() as u64, &stop);
            let (after, stopped) = run(&mut second, &tokens[cut..]);
            text.push_str(&after);
            prop_assert_eq!((text, stopped), whole);
        }
    }
}
