//! A worker's output: lines into the log, and the last of them kept for the post-mortem.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use proto::{Generation, InstanceId};
use tokio::io::{AsyncRead, AsyncReadExt};

/// Lines that are kept.
const LINES_MAX: usize = 40;

/// Bytes of a line that are kept and logged; the rest of it is dropped.
const LINE_BYTES_MAX: usize = 500;

/// The last lines of both streams together, in the order of their arrival.
#[derive(Clone, Debug, Default)]
pub(super) struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    fn push(&self, line: String) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == LINES_MAX {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    pub(super) fn take(&self) -> Vec<String> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *lines).into()
    }
}

/// Reads `stream` to its end. `name`: `stdout` or `stderr`.
pub(super) async fn follow(
    mut stream: impl AsyncRead + Unpin,
    name: &'static str,
    instance: InstanceId,
    generation: Generation,
    tail: Tail,
) {
    let mut lines = Lines::default();
    let mut read = [0; 4 << 10];
    let mut keep = |line: String| {
        tracing::info!(target: "worker", %instance, %generation, stream = name, "{line}");
        tail.push(line);
    };
    loop {
        match stream.read(&mut read).await {
            // A pipe that cannot be read has nothing more to say.
            Ok(0) | Err(_) => break,
            Ok(length) => lines.push(&read[..length], &mut keep),
        }
    }
    lines.finish(&mut keep);
}

/// Bytes to lines of bounded length.
#[derive(Debug, Default)]
struct Lines {
    line: Vec<u8>,
}

impl Lines {
    fn push(&mut self, bytes: &[u8], keep: &mut impl FnMut(String)) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, ended) = match part.split_last() {
                Some((b'\n', text)) => (text, true),
                _ => (part, false),
            };
            let room = LINE_BYTES_MAX - self.line.len();
            self.line.extend_from_slice(&text[..text.len().min(room)]);
            if ended {
                self.finish(keep);
            }
        }
    }

    fn finish(&mut self, keep: &mut impl FnMut(String)) {
        let text = String::from_utf8_lossy(&self.line);
        // Progress bars return the carriage, and half a character at the cut grows when replaced.
        let mut line = text.trim_end().to_owned();
        line.truncate(line.floor_char_boundary(LINE_BYTES_MAX));
        if !line.is_empty() {
            keep(line);
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(parts: &[&[u8]]) -> Vec<String> {
        let mut found = Vec::new();
        let mut lines = Lines::default();
        let mut keep = |line| found.push(line);
        for part in parts {
            lines.push(part, &mut keep);
        }
        lines.finish(&mut keep);
        found
    }

    #[test]
    fn lines_are_whole_however_they_are_read_and_the_last_needs_no_end() {
        assert_eq!(
            lines(&[b"one\ntw", b"o\n\n", b"three\r\nfour"]),
            ["one", "two", "three", "four"]
        );
    }

    #[test]
    fn a_long_line_is_cut_and_what_follows_it_is_whole() {
        let long = vec![b'x'; 100_000];
        let found = lines(&[&long, &long, b"\nnext\n"]);
        assert_eq!(found, ["x".repeat(LINE_BYTES_MAX), "next".to_owned()]);
    }

    #[test]
    fn a_line_that_is_cut_inside_a_character_stays_within_its_bound() {
        let found = lines(&["界".repeat(400).as_bytes()]);
        assert!(found[0].len() <= LINE_BYTES_MAX);
        assert!(found[0].starts_with("界界"));
    }

    #[test]
    fn the_tail_keeps_the_last_lines_alone() {
        let tail = Tail::default();
        for number in 0..100 {
            tail.push(number.to_string());
        }
        let kept = tail.take();
        assert_eq!(kept.len(), LINES_MAX);
        assert_eq!((kept[0].as_str(), kept[39].as_str()), ("60", "99"));
    }
}
