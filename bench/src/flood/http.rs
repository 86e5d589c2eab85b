//! As much of HTTP/1.1 as reading a response at full speed needs: the head, and what frames the body.

use thiserror::Error;

/// A head may be this long.
const HEAD_BYTES_MAX: usize = 32 << 10;

/// Why a response cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum HttpError {
    #[error("read a response head of more than {HEAD_BYTES_MAX} bytes")]
    HeadTooLong,
    #[error("read a response head")]
    BadHead,
    #[error("read a chunk size")]
    BadChunk,
}

/// Where in a response the bytes stand.
#[derive(Debug)]
enum State {
    Head,
    /// In a chunk's size line. `seen`: there was a digit. `digits`: more may follow.
    Size {
        bytes: u64,
        seen: bool,
        digits: bool,
    },
    Data {
        left: u64,
    },
    /// Behind a chunk's data: a line end.
    AfterData,
    /// In the lines behind the last chunk. `empty`: nothing in this line yet.
    Trailer {
        empty: bool,
    },
    Length {
        left: u64,
    },
    UntilClose,
    End,
}

/// Takes a response apart, however it was cut.
#[derive(Debug)]
pub(crate) struct Response {
    state: State,
    head: Vec<u8>,
    pub(crate) status: u16,
    /// The server closes the connection behind this response.
    pub(crate) closes: bool,
}

impl Response {
    pub(crate) fn new() -> Self {
        Self {
            state: State::Head,
            head: Vec::new(),
            status: 0,
            closes: false,
        }
    }

    /// For the next response on the same connection.
    pub(crate) fn reset(&mut self) {
        self.state = State::Head;
        self.head.clear();
        self.status = 0;
        self.closes = false;
    }

    pub(crate) fn is_complete(&self) -> bool {
        matches!(self.state, State::End)
    }

    /// The connection has ended: whether that is a proper end of this response.
    pub(crate) fn may_end_here(&self) -> bool {
        matches!(self.state, State::UntilClose | State::End)
    }

    /// Takes bytes off the connection and appends the body's among them to `body`. Bytes behind the response are dropped: nothing was asked.
    pub(crate) fn push(&mut self, mut bytes: &[u8], body: &mut Vec<u8>) -> Result<(), HttpError> {
        while !bytes.is_empty() {
            bytes = match self.state {
                State::Head => self.push_head(bytes)?,
                State::Size {
                    bytes: size,
                    seen,
                    digits,
                } => self.push_size(bytes, size, seen, digits)?,
                State::Data { left } => {
                    let (taken, rest) = split(bytes, left);
                    body.extend_from_slice(taken);
                    let left = left - taken.len() as u64;
                    self.state = if left == 0 {
                        State::AfterData
                    } else {
                        State::Data { left }
                    };
                    rest
                }
                State::AfterData => {
                    match bytes[0] {
                        b'\n' => self.state = SIZE,
                        b'\r' => {}
                        _ => return Err(HttpError::BadChunk),
                    }
                    &bytes[1..]
                }
                State::Trailer { empty } => {
                    match bytes[0] {
                        b'\n' if empty => self.state = State::End,
                        b'\n' => self.state = State::Trailer { empty: true },
                        b'\r' => {}
                        _ => self.state = State::Trailer { empty: false },
                    }
                    &bytes[1..]
                }
                State::Length { left } => {
                    let (taken, rest) = split(bytes, left);
                    body.extend_from_slice(taken);
                    self.state = length(left - taken.len() as u64);
                    rest
                }
                State::UntilClose => {
                    body.extend_from_slice(bytes);
                    &[]
                }
                State::End => &[],
            };
        }
        Ok(())
    }

    fn push_size<'a>(
        &mut self,
        bytes: &'a [u8],
        mut size: u64,
        mut seen: bool,
        mut digits: bool,
    ) -> Result<&'a [u8], HttpError> {
        for (at, &byte) in bytes.iter().enumerate() {
            match byte {
                b'\n' if !seen => return Err(HttpError::BadChunk),
                b'\n' => {
                    self.state = if size == 0 {
                        State::Trailer { empty: true }
                    } else {
                        State::Data { left: size }
                    };
                    return Ok(&bytes[at + 1..]);
                }
                _ => match char::from(byte).to_digit(16) {
                    Some(digit) if digits => {
                        let shifted = size.checked_mul(16).ok_or(HttpError::BadChunk)?;
                        size = shifted + u64::from(digit);
                        seen = true;
                    }
                    // The rest of the line is an extension, or the carriage return.
                    _ => digits = false,
                },
            }
        }
        self.state = State::Size {
            bytes: size,
            seen,
            digits,
        };
        Ok(&[])
    }

    fn push_head<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], HttpError> {
        let before = self.head.len();
        self.head.extend_from_slice(bytes);
        let Some(end) = memchr::memmem::find(&self.head, b"\r\n\r\n") else {
            return if self.head.len() > HEAD_BYTES_MAX {
                Err(HttpError::HeadTooLong)
            } else {
                Ok(&[])
            };
        };
        let head = std::str::from_utf8(&self.head[..end]).map_err(|_| HttpError::BadHead)?;
        let mut lines = head.split("\r\n");
        let mut words = lines.next().unwrap_or_default().split(' ');
        if !words
            .next()
            .is_some_and(|version| version.starts_with("HTTP/1."))
        {
            return Err(HttpError::BadHead);
        }
        let status = words.next().and_then(|word| word.parse().ok());
        self.status = status.ok_or(HttpError::BadHead)?;
        self.state = State::UntilClose;
        for line in lines {
            let (name, value) = line.split_once(':').ok_or(HttpError::BadHead)?;
            let value = value.trim();
            if name.eq_ignore_ascii_case("transfer-encoding")
                && value.eq_ignore_ascii_case("chunked")
            {
                self.state = SIZE;
            } else if name.eq_ignore_ascii_case("content-length") {
                self.state = length(value.parse().map_err(|_| HttpError::BadHead)?);
            } else if name.eq_ignore_ascii_case("connection") {
                self.closes = value.eq_ignore_ascii_case("close");
            }
        }
        Ok(&bytes[end + 4 - before..])
    }
}

const SIZE: State = State::Size {
    bytes: 0,
    seen: false,
    digits: true,
};

fn length(left: u64) -> State {
    if left == 0 {
        State::End
    } else {
        State::Length { left }
    }
}

fn split(bytes: &[u8], at: u64) -> (&[u8], &[u8]) {
    bytes.split_at(usize::try_from(at).map_or(bytes.len(), |at| at.min(bytes.len())))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_three_framings_are_read() {
        for (head, body, ends) in [
            ("Content-Length: 5\r\n", "hello", true),
            (
                "transfer-encoding: chunked\r\n",
                "3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\nT: v\r\n\r\n",
                true,
            ),
            ("connection: close\r\n", "hello", false),
        ] {
            let text = format!("HTTP/1.1 200 OK\r\n{head}\r\n{body}");
            for size in [1, 2, 7, 1_000] {
                let mut response = Response::new();
                let mut out = Vec::new();
                for part in text.as_bytes().chunks(size) {
                    response.push(part, &mut out).unwrap();
                }
                assert_eq!(out, b"hello", "{head} in parts of {size}");
                assert_eq!(response.is_complete(), ends);
                assert!(response.may_end_here());
                assert_eq!(response.closes, !ends);
            }
        }
    }

    #[test]
    fn a_cut_body_is_no_end() {
        let mut response = Response::new();
        let mut out = Vec::new();
        let text = b"HTTP/1.1 503 X\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab";
        response.push(text, &mut out).unwrap();
        assert!(!response.may_end_here());
        assert_eq!(response.status, 503);
    }

    proptest! {
        #[test]
        fn foreign_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut out = Vec::new();
            let _ = Response::new().push(&bytes, &mut out);
            let mut response = Response::new();
            response.push(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", &mut out).unwrap();
            let _ = response.push(&bytes, &mut out);
        }
    }
}
