//! What a malformed peer can do to us. None of it is a panic.

use thiserror::Error;

#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ProtoError {
    /// The peer announced a frame over the cap. The link must be reset.
    #[error("frame of {announced} bytes is over the cap of {cap}")]
    FrameTooLarge { announced: u64, cap: usize },
    /// The peer announced a frame without a message in it.
    #[error("frame is empty")]
    FrameEmpty,
    /// The bytes are no message of this protocol version.
    #[error("frame is not a message: {0}")]
    Malformed(String),
    /// A whole message, then bytes that belong to nothing.
    #[error("message is followed by {0} stray bytes")]
    TrailingBytes(usize),
    /// Our own message does not fit: our fault, not the peer's.
    #[error("message of {length} bytes is over the cap of {cap}")]
    MessageTooLarge { length: usize, cap: usize },
}
