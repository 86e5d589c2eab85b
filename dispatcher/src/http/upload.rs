//! Reads a request's body: bounded in bytes and time, for one request and for all together.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout_at};

use super::error::ApiError;

/// A body that is too large is read and thrown away up to this many bytes and this long: a client
/// that still writes when the connection closes sees a reset instead of the answer.
const DISCARD_BYTES_MAX: usize = 64 << 20;
const DISCARD_TIME_MAX: Duration = Duration::from_secs(5);

/// Bounds of uploads, and the bytes that all of them hold now.
#[derive(Debug)]
pub(crate) struct Uploads {
    pub(crate) bytes_max: usize,
    pub(crate) total_bytes_max: usize,
    pub(crate) time_max: Duration,
    held: AtomicUsize,
}

/// A body in memory. Its bytes count until it is dropped.
#[derive(Debug)]
pub(crate) struct Upload<'a> {
    pub(crate) bytes: Vec<u8>,
    uploads: &'a Uploads,
    counted: usize,
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        self.uploads.held.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

impl Uploads {
    #[must_use]
    pub(crate) fn new(bytes_max: usize, total_bytes_max: usize, time_max: Duration) -> Self {
        Self {
            bytes_max,
            total_bytes_max,
            time_max,
            held: AtomicUsize::new(0),
        }
    }

    /// Reads all of `body`.
    ///
    /// # Errors
    ///
    /// 413 too large, 408 too slow, 503 where all uploads together are too large, 400 where the
    /// client broke off, 415 where it says that it is not JSON.
    pub(crate) async fn read(
        &self,
        headers: &HeaderMap,
        mut body: Body,
    ) -> Result<Upload<'_>, ApiError> {
        json_type(headers)?;
        let declared = headers
            .get(header::CONTENT_LENGTH)
            .and_then(|value| value.to_str().ok())
            .and_then(|text| text.parse::<usize>().ok());
        if declared.is_some_and(|length| length > self.bytes_max) {
            // A client that waits for `100 Continue` has sent nothing yet.
            if !headers.contains_key(header::EXPECT) {
                discard(&mut body).await;
            }
            return Err(self.too_large());
        }
        let deadline = Instant::now() + self.time_max;
        let mut upload = Upload {
            bytes: Vec::with_capacity(declared.unwrap_or(0).min(64 << 10)),
            uploads: self,
            counted: 0,
        };
        loop {
            let frame = match timeout_at(deadline, body.frame()).await {
                Ok(None) => return Ok(upload),
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(error))) => {
                    return Err(ApiError::invalid(
                        "incomplete_body",
                        format!("the body could not be read: {error}"),
                    ));
                }
                Err(_) => {
                    return Err(ApiError::new(
                        StatusCode::REQUEST_TIMEOUT,
                        "timeout_error",
                        "body_timeout",
                        format!(
                            "the body did not arrive within {} s",
                            self.time_max.as_secs()
                        ),
                    ));
                }
            };
            let Ok(data) = frame.into_data() else {
                continue;
            };
            if upload.bytes.len() + data.len() > self.bytes_max {
                drop(upload);
                discard(&mut body).await;
                return Err(self.too_large());
            }
            let held = self.held.fetch_add(data.len(), Ordering::Relaxed) + data.len();
            upload.counted += data.len();
            if held > self.total_bytes_max {
                return Err(ApiError::unavailable(
                    "uploads_full",
                    "too many large requests arrive at once",
                    Duration::from_secs(1),
                ));
            }
            upload.bytes.extend_from_slice(&data);
        }
    }

    fn too_large(&self) -> ApiError {
        ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "invalid_request_error",
            "request_too_large",
            format!("the body is larger than {} bytes", self.bytes_max),
        )
    }
}

/// A page in a browser may send anything but JSON here without asking first.
fn json_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else {
        return Ok(());
    };
    let essence = value.as_bytes().split(|&byte| byte == b';').next();
    let essence = essence.unwrap_or_default().trim_ascii();
    if essence.eq_ignore_ascii_case(b"application/json") {
        return Ok(());
    }
    Err(ApiError::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "invalid_request_error",
        "unsupported_media_type",
        "the content type must be `application/json`",
    ))
}

async fn discard(body: &mut Body) {
    let deadline = Instant::now() + DISCARD_TIME_MAX;
    let mut bytes = 0;
    while bytes < DISCARD_BYTES_MAX {
        match timeout_at(deadline, body.frame()).await {
            Ok(Some(Ok(frame))) => bytes += frame.data_ref().map_or(0, |data| data.len()),
            _ => return,
        }
    }
}
