//! The least of an HTTP client, for a server of our own on this machine. It blocks.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

/// An answer of more bytes is not one.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// Asks for `path` at `address` and returns the status and the body.
///
/// # Errors
/// Where the server cannot be reached, does not answer within `patience`, or does not answer in JSON.
pub(super) fn ask(
    address: &str,
    path: &str,
    body: Option<&Value>,
    patience: Duration,
) -> io::Result<(u16, Value)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    // HTTP/1.0 has no chunks: the body is all that follows the head.
    let request = match body {
        None => format!("GET {path} HTTP/1.0\r\n\r\n"),
        Some(body) => {
            let text = body.to_string();
            format!(
                "POST {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{text}",
                text.len()
            )
        }
    };
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer)?;
    parse(&answer).ok_or_else(|| io::Error::other("its answer is not understood"))
}

fn parse(answer: &[u8]) -> Option<(u16, Value)> {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&answer[..end]).ok()?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some((status, serde_json::from_slice(&answer[end + 4..]).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_its_status_and_its_json() {
        let answer = b"HTTP/1.0 503 Service Unavailable\r\nx: y\r\n\r\n{\"ready\":false}";
        let (status, body) = parse(answer).unwrap();
        assert_eq!((status, body["ready"].as_bool()), (503, Some(false)));
        for broken in [&b""[..], b"HTTP/1.0 200 OK\r\n", b"HTTP/1.0 x\r\n\r\n{}"] {
            assert_eq!(parse(broken), None);
        }
    }
}
