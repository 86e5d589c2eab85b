//! Bytes of a server-sent event stream become events, however the bytes were cut on their way.

use thiserror::Error;

/// An event may be this long; a server that sends more is refused, so that no buffer grows without a bound.
pub const EVENT_BYTES_MAX: usize = 1 << 20;

/// One thing that a stream said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item<'a> {
    /// A line that begins with a colon: a keep-alive.
    Comment(&'a str),
    /// The data of one event, its lines joined by line feeds.
    Event {
        name: Option<&'a str>,
        data: &'a str,
    },
}

/// Why a stream cannot be read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SseError {
    #[error("read an event of more than {EVENT_BYTES_MAX} bytes")]
    TooLong,
    #[error("read an event that is not UTF-8")]
    NotUtf8,
}

/// Incremental and bounded. A code point that was cut in two is whole again before anything decodes it.
#[derive(Debug, Default)]
pub struct Parser {
    /// The beginning of a line whose end is yet to come.
    line: Vec<u8>,
    data: Vec<u8>,
    name: Vec<u8>,
    has_data: bool,
    /// The last byte was a carriage return: a line feed that follows belongs to it.
    after_return: bool,
    began: bool,
}

impl Parser {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes and gives each completed item to `sink`.
    ///
    /// # Errors
    /// An event beyond [`EVENT_BYTES_MAX`], or one that is not UTF-8. The parser is of no use afterwards.
    pub fn push(
        &mut self,
        mut bytes: &[u8],
        sink: &mut impl FnMut(Item<'_>),
    ) -> Result<(), SseError> {
        if self.after_return && bytes.first() == Some(&b'\n') {
            bytes = &bytes[1..];
        }
        if !bytes.is_empty() {
            self.after_return = false;
        }
        while let Some(at) = memchr::memchr2(b'\n', b'\r', bytes) {
            let (head, rest) = bytes.split_at(at);
            if self.line.is_empty() {
                self.take_line(head, sink)?;
            } else {
                self.hold(head)?;
                let line = std::mem::take(&mut self.line);
                self.take_line(&line, sink)?;
                // The allocation is kept for the next cut line.
                self.line = line;
                self.line.clear();
            }
            bytes = match rest {
                [b'\r', b'\n', tail @ ..] => tail,
                [b'\r'] => {
                    self.after_return = true;
                    &[]
                }
                [_, tail @ ..] => tail,
                [] => &[],
            };
        }
        self.hold(bytes)
    }

    /// Whether an event was begun and not ended: the stream was cut.
    #[must_use]
    pub fn is_mid_event(&self) -> bool {
        self.has_data || !self.line.is_empty()
    }

    fn hold(&mut self, bytes: &[u8]) -> Result<(), SseError> {
        if self.line.len() + self.data.len() + bytes.len() > EVENT_BYTES_MAX {
            return Err(SseError::TooLong);
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn take_line(&mut self, line: &[u8], sink: &mut impl FnMut(Item<'_>)) -> Result<(), SseError> {
        let line = if self.began {
            line
        } else {
            self.began = true;
            line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line)
        };
        if line.is_empty() {
            return self.dispatch(sink);
        }
        if let Some(comment) = line.strip_prefix(b":") {
            let comment = std::str::from_utf8(comment).map_err(|_| SseError::NotUtf8)?;
            sink(Item::Comment(comment.strip_prefix(' ').unwrap_or(comment)));
            return Ok(());
        }
        let (field, value) = match memchr::memchr(b':', line) {
            Some(at) => (&line[..at], &line[at + 1..]),
            None => (line, &line[line.len()..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"data" => {
                if self.data.len() + value.len() + 1 > EVENT_BYTES_MAX {
                    return Err(SseError::TooLong);
                }
                if self.has_data {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(value);
                self.has_data = true;
            }
            b"event" => {
                self.name.clear();
                self.name.extend_from_slice(value);
            }
            // `id`, `retry` and unknown fields mean nothing to a measurement.
            _ => {}
        }
        Ok(())
    }

    fn dispatch(&mut self, sink: &mut impl FnMut(Item<'_>)) -> Result<(), SseError> {
        if self.has_data {
            let data = std::str::from_utf8(&self.data).map_err(|_| SseError::NotUtf8)?;
            let name = std::str::from_utf8(&self.name).map_err(|_| SseError::NotUtf8)?;
            sink(Item::Event {
                name: (!name.is_empty()).then_some(name),
                data,
            });
        }
        self.data.clear();
        self.name.clear();
        self.has_data = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn owned(item: Item<'_>) -> (Option<String>, String) {
        match item {
            Item::Comment(text) => (Some(":".into()), text.into()),
            Item::Event { name, data } => (name.map(Into::into), data.into()),
        }
    }

    fn parse(parts: &[&[u8]]) -> Result<Vec<(Option<String>, String)>, SseError> {
        let mut parser = Parser::new();
        let mut items = Vec::new();
        for part in parts {
            parser.push(part, &mut |item| items.push(owned(item)))?;
        }
        Ok(items)
    }

    #[test]
    fn every_kind_of_line_is_understood() {
        let text = b"\xef\xbb\xbf: keepalive\n\ndata: {\"a\":1}\r\n\r\nevent: error\rdata:x\rdata: y\r\rid: 3\n\ndata\n\n";
        let items = parse(&[text]).unwrap();
        assert_eq!(
            items,
            [
                (Some(":".into()), "keepalive".into()),
                (None, "{\"a\":1}".into()),
                (Some("error".into()), "x\ny".into()),
                (None, String::new()),
            ]
        );
    }

    #[test]
    fn a_cut_stream_is_seen_to_be_cut() {
        let mut parser = Parser::new();
        parser.push(b"data: whole\n\n", &mut |_| {}).unwrap();
        assert!(!parser.is_mid_event());
        parser.push(b"data: ha", &mut |_| {}).unwrap();
        assert!(parser.is_mid_event());
        parser.push(b"lf\n", &mut |_| {}).unwrap();
        assert!(parser.is_mid_event());
    }

    #[test]
    fn an_event_without_an_end_is_refused_before_it_fills_the_memory() {
        let mut parser = Parser::new();
        let piece = vec![b'a'; 1 << 16];
        let mut pushed = 0;
        let refused = loop {
            if let Err(error) = parser.push(&piece, &mut |_| {}) {
                break error;
            }
            pushed += piece.len();
            assert!(pushed <= EVENT_BYTES_MAX);
        };
        assert_eq!(refused, SseError::TooLong);

        let mut parser = Parser::new();
        let line = [b"data: ".as_slice(), &piece, b"\n"].concat();
        let lines = (0..EVENT_BYTES_MAX / piece.len() + 1)
            .find_map(|count| parser.push(&line, &mut |_| {}).err().map(|e| (count, e)));
        assert_eq!(lines.map(|(_, error)| error), Some(SseError::TooLong));
    }

    #[test]
    fn broken_utf_8_is_an_error_and_no_replacement_character() {
        assert_eq!(parse(&[b"data: \xff\n\n"]), Err(SseError::NotUtf8));
    }

    proptest! {
        #[test]
        fn a_stream_means_the_same_however_it_is_cut(
            events in prop::collection::vec(("[a-z]{0,3}", "[ -~é漢🦀]{0,12}", 0..3usize), 0..8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let mut text = String::new();
            for (name, data, ending) in &events {
                let end = ["\n", "\r\n", "\r"][*ending];
                if !name.is_empty() {
                    text += &format!("event: {name}{end}");
                }
                text += &format!("data: {data}{end}: ping{end}data: x{end}{end}");
            }
            let bytes = text.as_bytes();
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            at.extend([0, bytes.len()]);
            at.sort_unstable();
            let parts: Vec<&[u8]> = at.windows(2).map(|ends| &bytes[ends[0]..ends[1]]).collect();
            let single: Vec<&[u8]> = bytes.chunks(1).collect();
            let whole = parse(&[bytes]).unwrap();
            prop_assert_eq!(whole.len(), events.len() * 2);
            prop_assert_eq!(&parse(&parts).unwrap(), &whole);
            prop_assert_eq!(&parse(&single).unwrap(), &whole);
        }

        #[test]
        fn foreign_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&bytes.chunks(7).collect::<Vec<_>>());
        }
    }
}
