//! Counts the events of a stream without reading their JSON.

use memchr::memmem;

/// A line may be this long.
const LINE_BYTES_MAX: usize = 1 << 20;

/// What streams have said so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// `data:` lines, `[DONE]` included.
    pub(crate) events: u64,
    /// Events whose text is not empty.
    pub(crate) tokens: u64,
    /// `completion_tokens` of the usage chunk.
    pub(crate) usage_tokens: u64,
    pub(crate) errors: u64,
    pub(crate) done: bool,
}

/// Finds lines and classifies them. The rest of a cut line stays in the buffer.
#[derive(Debug)]
pub(crate) struct Scanner {
    content: memmem::Finder<'static>,
    text: memmem::Finder<'static>,
    usage: memmem::Finder<'static>,
}

impl Scanner {
    pub(crate) fn new() -> Self {
        Self {
            // Also the end of `"reasoning_content":"`.
            content: memmem::Finder::new(b"content\":\""),
            text: memmem::Finder::new(b"\"text\":\""),
            usage: memmem::Finder::new(b"\"completion_tokens\":"),
        }
    }

    /// Takes all whole lines out of `body`. False: a line without an end.
    pub(crate) fn scan(&self, body: &mut Vec<u8>, counts: &mut Counts) -> bool {
        let mut from = 0;
        while let Some(length) = memchr::memchr(b'\n', &body[from..]) {
            self.line(&body[from..from + length], counts);
            from += length + 1;
        }
        body.drain(..from);
        body.len() <= LINE_BYTES_MAX
    }

    fn line(&self, line: &[u8], counts: &mut Counts) {
        let Some(data) = line.strip_prefix(b"data:") else {
            return;
        };
        let data = data.strip_prefix(b" ").unwrap_or(data);
        counts.events += 1;
        let text = self.content.find(data).map(|at| at + 10);
        let text = text.or_else(|| self.text.find(data).map(|at| at + 8));
        if text.is_some_and(|at| data.get(at).is_some_and(|&byte| byte != b'"')) {
            counts.tokens += 1;
        } else if data.starts_with(b"[DONE]") {
            counts.done = true;
        } else if data.starts_with(b"{\"error\":{") {
            counts.errors += 1;
        } else if let Some(at) = self.usage.find(data) {
            let digits = data[at + 20..].iter().skip_while(|byte| **byte == b' ');
            let digits = digits.take_while(|byte| byte.is_ascii_digit());
            counts.usage_tokens = digits.fold(0, |sum: u64, digit| {
                sum.saturating_mul(10)
                    .saturating_add(u64::from(digit - b'0'))
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_counted_the_same_in_any_pieces() {
        let stream = concat!(
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
            ": keepalive\n\n",
            "data: {\"choices\":[{\"delta\":{\"content\":\" a\"}}]}\n\n",
            "data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"\\\"\"}}]}\r\n\r\n",
            "data: {\"choices\":[{\"text\":\"b\"}]}\n\n",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":31,\"total_tokens\":40}}\n\n",
            "data: [DONE]\n\n",
        );
        for size in [1, 3, 50, 5_000] {
            let scanner = Scanner::new();
            let (mut body, mut counts) = (Vec::new(), Counts::default());
            for part in stream.as_bytes().chunks(size) {
                body.extend_from_slice(part);
                assert!(scanner.scan(&mut body, &mut counts));
            }
            let wanted = Counts {
                events: 6,
                tokens: 3,
                usage_tokens: 31,
                errors: 0,
                done: true,
            };
            assert_eq!(counts, wanted, "in parts of {size}");
        }
    }

    #[test]
    fn an_error_event_is_one() {
        let (mut body, mut counts) = (
            b"data: {\"error\":{\"code\":\"x\"}}\n\n".to_vec(),
            Counts::default(),
        );
        Scanner::new().scan(&mut body, &mut counts);
        assert_eq!((counts.events, counts.errors, counts.done), (1, 1, false));
    }

    #[test]
    fn a_line_without_an_end_is_given_up() {
        let mut body = vec![b'x'; LINE_BYTES_MAX + 1];
        assert!(!Scanner::new().scan(&mut body, &mut Counts::default()));
    }
}
