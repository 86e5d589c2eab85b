//! A small HTTP client: one connection a request, bodies whole or as server-sent events.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};

/// Status and body of a GET.
pub fn get_blocking(address: &str, path: &str) -> (u16, String) {
    let head = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    let response = exchange(address, head.as_bytes());
    let response = String::from_utf8(response).unwrap();
    let (head, body) = response
        .split_once("\r\n\r\n")
        .unwrap_or_else(|| panic!("no head: {response}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let body = if head
        .to_ascii_lowercase()
        .contains("transfer-encoding: chunked")
    {
        dechunk(body)
    } else {
        body.to_owned()
    };
    (status, body)
}

fn exchange(address: &str, request: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(super::PATIENCE)).unwrap();
    stream.write_all(request).unwrap();
    let mut response = Vec::new();
    stream.read_to_end(&mut response).unwrap();
    response
}

fn dechunk(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        if size == 0 {
            break;
        }
        whole.push_str(&rest[..size]);
        body = rest[size..].trim_start_matches("\r\n");
    }
    whole
}

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Value,
}

/// POST of a JSON body; the whole answer.
pub fn post(address: &str, path: &str, body: &Value) -> Answer {
    post_bytes(address, path, body.to_string().as_bytes(), &[])
}

pub fn post_bytes(address: &str, path: &str, body: &[u8], headers: &[(&str, &str)]) -> Answer {
    let mut request = request_head(address, path, body.len(), headers).into_bytes();
    request.extend_from_slice(body);
    let response = exchange(address, &request);
    let text = String::from_utf8(response).unwrap();
    let (head, rest) = text
        .split_once("\r\n\r\n")
        .unwrap_or_else(|| panic!("no head: {text}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let chunked = head
        .to_ascii_lowercase()
        .contains("transfer-encoding: chunked");
    let rest = if chunked {
        dechunk(rest)
    } else {
        rest.to_owned()
    };
    let body = serde_json::from_str(&rest).unwrap_or(Value::String(rest));
    Answer {
        status,
        head: head.to_owned(),
        body,
    }
}

fn request_head(address: &str, path: &str, length: usize, headers: &[(&str, &str)]) -> String {
    let mut head = format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n"
    );
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    head
}

/// A chat request that streams.
pub fn chat(content: &str, max_tokens: u32) -> Value {
    json!({
        "messages": [{ "role": "user", "content": content }],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": true,
        "stream_options": { "include_usage": true },
    })
}

/// One stream, read event by event.
#[derive(Debug)]
pub struct Events {
    stream: TcpStream,
    raw: Vec<u8>,
    plain: Vec<u8>,
    head: Option<String>,
    pub status: u16,
    closed: bool,
}

/// What a stream gave in all.
#[derive(Debug, Clone, Default)]
pub struct Whole {
    pub status: u16,
    pub text: String,
    pub content_events: usize,
    pub finish_reasons: Vec<String>,
    pub done: usize,
    pub usage: Option<Value>,
    pub timings: Option<Value>,
    pub errors: Vec<Value>,
    /// The body where the status is not 200.
    pub body: String,
}

impl Events {
    /// Sends the request; nothing is read yet.
    pub fn open(address: &str, path: &str, body: &Value) -> Self {
        Self::open_with(address, path, body, &[])
    }

    pub fn open_with(address: &str, path: &str, body: &Value, headers: &[(&str, &str)]) -> Self {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(super::PATIENCE)).unwrap();
        let body = body.to_string();
        let mut request = request_head(address, path, body.len(), headers);
        request.push_str(&body);
        stream.write_all(request.as_bytes()).unwrap();
        Self {
            stream,
            raw: Vec::new(),
            plain: Vec::new(),
            head: None,
            status: 0,
            closed: false,
        }
    }

    pub fn set_read_timeout(&self, timeout: Duration) {
        self.stream.set_read_timeout(Some(timeout)).unwrap();
    }

    fn fill(&mut self) -> bool {
        let mut buffer = [0; 16 << 10];
        match self.stream.read(&mut buffer) {
            Ok(0) => self.closed = true,
            Ok(read) => self.raw.extend_from_slice(&buffer[..read]),
            Err(error) => panic!("stream broke: {error}"),
        }
        if self.head.is_none()
            && let Some(end) = self.raw.windows(4).position(|window| window == b"\r\n\r\n")
        {
            let head = String::from_utf8(self.raw[..end].to_vec()).unwrap();
            self.status = head.split(' ').nth(1).unwrap().parse().unwrap();
            self.raw.drain(..end + 4);
            self.head = Some(head);
        }
        if let Some(head) = &self.head {
            if head
                .to_ascii_lowercase()
                .contains("transfer-encoding: chunked")
            {
                while let Some(line) = self.raw.windows(2).position(|window| window == b"\r\n") {
                    let size = std::str::from_utf8(&self.raw[..line]).unwrap();
                    let size = usize::from_str_radix(size.trim(), 16).unwrap();
                    if self.raw.len() < line + 2 + size + 2 {
                        break;
                    }
                    self.plain
                        .extend_from_slice(&self.raw[line + 2..line + 2 + size]);
                    self.raw.drain(..line + 2 + size + 2);
                    if size == 0 {
                        self.closed = true;
                    }
                }
            } else {
                self.plain.append(&mut self.raw);
            }
        }
        !self.closed
    }

    pub fn head(&mut self) -> String {
        while self.head.is_none() {
            assert!(self.fill() || self.head.is_some(), "closed before the head");
        }
        self.head.clone().unwrap()
    }

    /// The next event's data, comments included as `: …`; `None` at the end.
    pub fn next(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.plain.windows(2).position(|window| window == b"\n\n") {
                let event: Vec<u8> = self.plain.drain(..end + 2).collect();
                let event = String::from_utf8(event).expect("events are UTF-8");
                let event = event.trim_end();
                return Some(event.strip_prefix("data: ").unwrap_or(event).to_owned());
            }
            if self.closed || !self.fill() {
                if self.plain.windows(2).any(|window| window == b"\n\n") {
                    continue;
                }
                return None;
            }
        }
    }

    /// The next event with text in it; panics at the end of the stream.
    pub fn next_text(&mut self) -> String {
        loop {
            let event = self.next().expect("the stream goes on");
            let Ok(value) = serde_json::from_str::<Value>(&event) else {
                continue;
            };
            assert!(value.get("error").is_none(), "{value}");
            if let Some(text) = text_of(&value)
                && !text.is_empty()
            {
                return text.to_owned();
            }
        }
    }

    /// Reads to the end.
    pub fn whole(&mut self) -> Whole {
        let mut whole = Whole::default();
        while let Some(event) = self.next() {
            whole.take(&event);
        }
        whole.status = self.status;
        whole.body = String::from_utf8_lossy(&self.plain).into_owned();
        whole
    }
}

fn text_of(value: &Value) -> Option<&str> {
    let choice = value["choices"].get(0)?;
    choice["delta"]["content"]
        .as_str()
        .or_else(|| choice["text"].as_str())
}

impl Whole {
    pub fn take(&mut self, event: &str) {
        if event == "[DONE]" {
            self.done += 1;
            return;
        }
        let Ok(value) = serde_json::from_str::<Value>(event) else {
            return;
        };
        if value.get("error").is_some() {
            self.errors.push(value);
            return;
        }
        if let Some(text) = text_of(&value)
            && !text.is_empty()
        {
            self.text.push_str(text);
            self.content_events += 1;
        }
        if let Some(reason) = value["choices"]
            .get(0)
            .and_then(|c| c["finish_reason"].as_str())
        {
            self.finish_reasons.push(reason.to_owned());
        }
        if value["usage"].is_object() {
            self.usage = Some(value["usage"].clone());
        }
        if value["timings"].is_object() {
            self.timings = Some(value["timings"].clone());
        }
    }

    /// Panics unless the stream is one complete, successful answer.
    pub fn assert_complete(&self) -> &Self {
        assert_eq!(self.status, 200, "{self:?}");
        assert!(self.errors.is_empty(), "{self:?}");
        assert_eq!(self.finish_reasons.len(), 1, "{self:?}");
        assert_eq!(self.done, 1, "{self:?}");
        self
    }
}

/// A whole stream at once.
pub fn stream(address: &str, body: &Value) -> Whole {
    Events::open(address, "/v1/chat/completions", body).whole()
}
