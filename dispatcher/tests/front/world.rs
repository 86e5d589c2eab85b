//! A front on a real socket, with the test in the driver's place, and a small client.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dispatcher::clock::Clock;
use dispatcher::gateway::{Command, Gateway, Submission};
use dispatcher::http::{self, Front, FrontConfig};
use dispatcher::machine::Tick;
use dispatcher::machine::event::CancelCause;
use dispatcher::metrics::Metrics;
use dispatcher::relay::{self, Accept};
use dispatcher::view::View;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use proto::to_dispatcher::{End, Row, Token};
use proto::{Attempt, FinishReason, InstanceId, RequestId};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

/// Longer than anything here takes: what is still awaited then never comes.
const NEVER: Duration = Duration::from_secs(600);

pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(NEVER, future)
        .await
        .expect("it never came")
}

pub(crate) struct World {
    pub(crate) address: SocketAddr,
    pub(crate) commands: mpsc::Receiver<Command>,
    pub(crate) view: watch::Sender<Arc<View>>,
    stop: Option<oneshot::Sender<()>>,
    server: JoinHandle<()>,
}

/// A request that reached the driver.
pub(crate) struct Arrived {
    pub(crate) request: RequestId,
    pub(crate) submission: Box<Submission>,
    pub(crate) relay: relay::Sender,
    sent: u32,
}

pub(crate) fn config() -> FrontConfig {
    FrontConfig {
        served_model: "tiny".into(),
        ..FrontConfig::default()
    }
}

impl World {
    pub(crate) async fn start(config: FrontConfig) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (view, watched) = watch::channel(Arc::new(View::default()));
        let (gateway, commands) = Gateway::new(Clock::start(), watched);
        let metrics = Metrics::new(1, &config.served_model);
        let front = Front {
            gateway,
            metrics,
            config,
        };
        let (stop, stopped) = oneshot::channel();
        let server = tokio::spawn(http::serve(listener, front, async {
            let _ = stopped.await;
        }));
        Self {
            address,
            commands,
            view,
            stop: Some(stop),
            server,
        }
    }

    pub(crate) async fn arrived(&mut self) -> Arrived {
        match within(self.commands.recv()).await.unwrap() {
            Command::Submit {
                request,
                submission,
                relay,
            } => {
                relay.assign(Attempt(1), InstanceId(0), 3, Tick::from_micros(1));
                Arrived {
                    request,
                    submission,
                    relay,
                    sent: 0,
                }
            }
            other => panic!("not a submission: {other:?}"),
        }
    }

    pub(crate) async fn cancelled(&mut self) -> (RequestId, CancelCause) {
        match within(self.commands.recv()).await.unwrap() {
            Command::Cancel { request, cause } => (request, cause),
            other => panic!("not a cancel: {other:?}"),
        }
    }

    pub(crate) fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    pub(crate) async fn stopped(self) {
        within(self.server).await.unwrap();
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(self.address).await
    }
}

impl Arrived {
    /// One step's row of these tokens.
    pub(crate) fn tokens(&mut self, texts: &[&str]) -> Accept {
        self.row(texts, None)
    }

    pub(crate) fn finish(&mut self, texts: &[&str], reason: FinishReason) -> Accept {
        self.row(texts, Some(End::Finished(reason)))
    }

    fn row(&mut self, texts: &[&str], end: Option<End>) -> Accept {
        let tokens: Vec<Token> = texts
            .iter()
            .map(|text| Token {
                id: 1,
                text: (*text).into(),
                released_bytes: 0,
                logprobs: None,
            })
            .collect();
        let row = Row {
            request: self.request,
            attempt: Attempt(1),
            first_index: self.sent,
            tokens,
            end,
        };
        self.sent += u32::try_from(texts.len()).unwrap();
        self.relay.accept(row, 2, Tick::from_micros(5))
    }
}

/// One connection.
pub(crate) struct Client {
    sender: hyper::client::conn::http1::SendRequest<Full<Bytes>>,
    connection: JoinHandle<()>,
}

#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .unwrap();
        let connection = tokio::spawn(async {
            let _ = connection.await;
        });
        Self { sender, connection }
    }

    /// Sends a request; the reply's body is still to be read.
    pub(crate) async fn open(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> hyper::Response<Incoming> {
        within(self.sender.send_request(request)).await.unwrap()
    }

    pub(crate) async fn send(&mut self, request: Request<Full<Bytes>>) -> Reply {
        let (head, body) = self.open(request).await.into_parts();
        let bytes = within(body.collect()).await.unwrap().to_bytes();
        Reply {
            status: head.status,
            headers: head.headers,
            body: String::from_utf8(bytes.to_vec()).unwrap(),
        }
    }

    pub(crate) async fn get(&mut self, path: &str) -> Reply {
        let request = Request::get(path).body(Full::default()).unwrap();
        self.send(request).await
    }

    /// As a client that goes away: the socket is closed.
    pub(crate) async fn leave(self) {
        self.connection.abort();
        let _ = self.connection.await;
    }
}

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETIONS: &str = "/v1/completions";

pub(crate) fn post(path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    Request::post(path)
        .header("content-type", "application/json")
        .body(Full::new(body.into()))
        .unwrap()
}

/// A chat request with these further members.
pub(crate) fn chat(more: &str) -> String {
    format!(r#"{{"messages":[{{"role":"user","content":"hi"}}]{more}}}"#)
}

/// The data of each event.
pub(crate) fn events(body: &str) -> Vec<&str> {
    body.split_terminator("\n\n")
        .filter_map(|event| event.strip_prefix("data: "))
        .collect()
}

/// What the stream's events say, put together.
pub(crate) fn text(body: &str) -> String {
    events(body)
        .iter()
        .filter(|data| **data != "[DONE]")
        .map(|data| {
            let event: serde_json::Value = serde_json::from_str(data).unwrap();
            let choice = &event["choices"][0];
            let text = choice["delta"]["content"]
                .as_str()
                .or(choice["text"].as_str());
            text.unwrap_or_default().to_owned()
        })
        .collect()
}
