//! Outcomes to HTTP status, Retry-After and the OpenAI error body.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::machine::event::CancelCause;
use crate::machine::{Denied, Failure, Outcome, QueueBound};

/// A refusal or failure as the client sees it. `docs/API.md` has the table.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    /// The `type` of the OpenAI error object.
    pub(crate) kind: &'static str,
    pub(crate) message: String,
    pub(crate) param: Option<Box<str>>,
    pub(crate) code: &'static str,
    /// When trying again may help.
    pub(crate) retry_after: Option<Duration>,
    /// Further members of the error object, such as the queue's depth and limit.
    pub(crate) extra: Vec<(&'static str, Value)>,
}

const INVALID_REQUEST: &str = "invalid_request_error";
const SERVER_ERROR: &str = "server_error";
const RATE_LIMIT: &str = "rate_limit_error";
const TIMEOUT: &str = "timeout_error";

/// After the crash of an engine another one is usually up by then.
const CRASH_RETRY: Duration = Duration::from_secs(1);

impl ApiError {
    /// An error of this status without param, Retry-After or further members.
    pub(crate) fn new(
        status: StatusCode,
        kind: &'static str,
        code: &'static str,
        message: impl Into<String>,
    ) -> Self {
        Self {
            status,
            kind,
            message: message.into(),
            param: None,
            code,
            retry_after: None,
            extra: Vec::new(),
        }
    }

    /// 400: the client's fault.
    pub(crate) fn invalid(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, INVALID_REQUEST, code, message)
    }

    /// 400: this parameter's value is out of its range.
    pub(crate) fn value(param: &str, message: impl Into<String>) -> Self {
        Self::invalid("invalid_value", message).with_param(param)
    }

    /// 400: a known parameter that this server does not implement.
    pub(crate) fn unsupported(param: &str, message: impl Into<String>) -> Self {
        Self::invalid("unsupported_parameter", message).with_param(param)
    }

    /// 503 with a Retry-After.
    pub(crate) fn unavailable(
        code: &'static str,
        message: impl Into<String>,
        retry: Duration,
    ) -> Self {
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, SERVER_ERROR, code, message);
        error.retry_after = Some(retry);
        error
    }

    #[must_use]
    pub(crate) fn with_param(mut self, param: impl Into<Box<str>>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// What an unfinished request's outcome is to its client; `None` where it completed.
    #[must_use]
    pub(crate) fn of_outcome(outcome: &Outcome) -> Option<Self> {
        match outcome {
            Outcome::Completed { .. } => None,
            Outcome::Denied(denied) => Some(Self::of_denied(denied)),
            Outcome::Failed(failure) => Some(Self::of_failure(failure)),
            Outcome::Cancelled(cause) => Some(Self::of_cancel(*cause)),
        }
    }

    fn of_denied(denied: &Denied) -> Self {
        match denied {
            Denied::QueueFull {
                bound,
                depth,
                limit,
                retry_after,
            } => Self::queue_full(*bound, *depth, *limit, *retry_after),
            Denied::Draining { retry_after } => Self::unavailable(
                "draining",
                "the server is shutting down and takes no new requests",
                *retry_after,
            ),
            Denied::NoInstance { retry_after } => Self::unavailable(
                "no_instance",
                "no instance of the model can serve; /ready says why",
                *retry_after,
            ),
            Denied::Parked { cause, retry_after } => Self::unavailable(
                "parked",
                format!("the server's configuration cannot work: {cause}"),
                *retry_after,
            ),
            Denied::OutOfMemory { retry_after } => Self::unavailable(
                "out_of_memory",
                "memory is short: the request was shed before it started",
                *retry_after,
            ),
            Denied::QueueTimeout { waited } => Self::new(
                StatusCode::GATEWAY_TIMEOUT,
                TIMEOUT,
                "queue_timeout",
                format!(
                    "the request waited {:.1} s in the queue, longer than allowed, and was not started",
                    waited.as_secs_f64()
                ),
            ),
            Denied::DeadlineExceeded => Self::deadline(),
            Denied::PromptTooLong {
                prompt_tokens,
                context_tokens,
            } => Self::invalid(
                "context_length_exceeded",
                format!(
                    "the prompt has {prompt_tokens} tokens, which leaves no room for output in a context of {context_tokens} tokens"
                ),
            ),
            Denied::PromptTooLarge { bytes, limit_bytes } => Self::invalid(
                "context_length_exceeded",
                format!(
                    "the prompt has {bytes} bytes; at most {limit_bytes} bytes can fit the context"
                ),
            ),
            Denied::PromptRejected(words) => Self::invalid("invalid_prompt", words.clone()),
            Denied::Quarantined { retry_after } => Self::unavailable(
                "prompt_quarantined",
                "this prompt ended the engine repeatedly and is refused for a while",
                *retry_after,
            ),
        }
    }

    fn of_failure(failure: &Failure) -> Self {
        match failure {
            Failure::Rejected(words) => Self::invalid("rejected_by_engine", words.clone()),
            Failure::Engine(words) => Self::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                SERVER_ERROR,
                "engine_error",
                format!("the engine gave this request up: {words}"),
            ),
            Failure::WorkerDied { oom, deaths } => Self::unavailable(
                if *oom { "worker_oom" } else { "worker_crashed" },
                format!(
                    "{deaths} {} while serving this request{}",
                    if *deaths == 1 {
                        "worker died"
                    } else {
                        "workers died"
                    },
                    if *oom { ", out of memory" } else { "" }
                ),
                CRASH_RETRY,
            ),
            Failure::NoInstance => Self::unavailable(
                "no_instance",
                "no instance with the same model is left to go on with this request",
                CRASH_RETRY,
            ),
            Failure::Draining => Self::unavailable(
                "draining",
                "the server shut down before this request was finished",
                CRASH_RETRY,
            ),
            Failure::DeadlineExceeded => Self::deadline(),
        }
    }

    fn queue_full(bound: QueueBound, depth: u64, limit: u64, retry_after: Duration) -> Self {
        let (word, text) = match bound {
            QueueBound::Entries => ("entries", "the queue is full"),
            QueueBound::Bytes => ("bytes", "the queue is full by bytes"),
            QueueBound::Tokens => ("tokens", "the queue is full by estimated tokens"),
            QueueBound::KeyShare => ("key_share", "this API key's share of the queue is used up"),
        };
        let mut error = Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            RATE_LIMIT,
            "queue_full",
            format!("{text}: {depth} of {limit}"),
        );
        error.retry_after = Some(retry_after);
        error.extra = vec![
            ("bound", json!(word)),
            ("depth", json!(depth)),
            ("limit", json!(limit)),
        ];
        error
    }

    fn deadline() -> Self {
        Self::new(
            StatusCode::GATEWAY_TIMEOUT,
            TIMEOUT,
            "deadline_exceeded",
            "the request's own deadline passed before it was finished",
        )
    }

    fn of_cancel(cause: CancelCause) -> Self {
        // 499 as nginx says it: nobody is expected to read this.
        let status = StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST);
        let (code, message) = match cause {
            CancelCause::ClientDisconnect => ("client_disconnect", "the client closed the request"),
            CancelCause::SlowReader => (
                "slow_reader",
                "the client did not read its stream fast enough",
            ),
        };
        Self::new(status, INVALID_REQUEST, code, message)
    }

    /// The object that stands under `error`.
    #[must_use]
    pub(crate) fn body(&self) -> Value {
        let mut error = Map::new();
        error.insert("message".into(), json!(self.message));
        error.insert("type".into(), json!(self.kind));
        error.insert("param".into(), json!(self.param));
        error.insert("code".into(), json!(self.code));
        for (name, value) in &self.extra {
            error.insert((*name).into(), value.clone());
        }
        json!({ "error": error })
    }

    /// Whole seconds, at least 1.
    fn retry_after_seconds(&self) -> Option<u64> {
        let wait = self.retry_after?;
        Some((wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1))
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_seconds() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retry_after_is_whole_seconds_rounded_up_and_never_zero() {
        for (wait_ms, seconds) in [(0, 1), (1, 1), (1000, 1), (1001, 2), (59_999, 60)] {
            let error = ApiError::unavailable("x", "y", Duration::from_millis(wait_ms));
            let response = error.into_response();
            assert_eq!(
                response.headers()[header::RETRY_AFTER].to_str().unwrap(),
                seconds.to_string()
            );
        }
    }

    #[test]
    fn every_outcome_but_completion_has_a_status_and_a_code() {
        let retry_after = Duration::from_secs(3);
        let outcomes = [
            Outcome::Denied(Denied::QueueFull {
                bound: QueueBound::KeyShare,
                depth: 4,
                limit: 4,
                retry_after,
            }),
            Outcome::Denied(Denied::Draining { retry_after }),
            Outcome::Denied(Denied::NoInstance { retry_after }),
            Outcome::Denied(Denied::Parked {
                cause: "no model".into(),
                retry_after,
            }),
            Outcome::Denied(Denied::OutOfMemory { retry_after }),
            Outcome::Denied(Denied::QueueTimeout {
                waited: Duration::from_millis(1500),
            }),
            Outcome::Denied(Denied::DeadlineExceeded),
            Outcome::Denied(Denied::PromptTooLong {
                prompt_tokens: 9,
                context_tokens: 8,
            }),
            Outcome::Denied(Denied::PromptTooLarge {
                bytes: 9,
                limit_bytes: 8,
            }),
            Outcome::Denied(Denied::PromptRejected("no such role".into())),
            Outcome::Denied(Denied::Quarantined { retry_after }),
            Outcome::Failed(Failure::Rejected("logit bias".into())),
            Outcome::Failed(Failure::Engine("NaN in the logits".into())),
            Outcome::Failed(Failure::WorkerDied {
                oom: false,
                deaths: 2,
            }),
            Outcome::Failed(Failure::WorkerDied {
                oom: true,
                deaths: 1,
            }),
            Outcome::Failed(Failure::NoInstance),
            Outcome::Failed(Failure::Draining),
            Outcome::Failed(Failure::DeadlineExceeded),
            Outcome::Cancelled(CancelCause::ClientDisconnect),
            Outcome::Cancelled(CancelCause::SlowReader),
        ];
        let table: Vec<String> = outcomes
            .iter()
            .map(|outcome| {
                let error = ApiError::of_outcome(outcome).unwrap();
                format!(
                    "{} retry-after {:?} {}",
                    error.status.as_u16(),
                    error.retry_after_seconds(),
                    error.body()
                )
            })
            .collect();
        insta::assert_snapshot!(table.join("\n"));
    }
}
