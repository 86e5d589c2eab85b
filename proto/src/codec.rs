//! Message to bytes and back: the only file that names the wire crate.
//!
//! Types elsewhere derive [`Encode`] and [`Decode`], which are the wire crate's derives under names of ours.
//! The bytes are those of bincode 1 in its default configuration: fixed-width little-endian
//! integers, `u64` lengths, `u32` variant numbers.

use wincode::ReadError;
use wincode::WriteError;
use wincode::config::Configuration;
pub(crate) use wincode::{SchemaRead as Decode, SchemaWrite as Encode};

use crate::error::ProtoError;
use crate::frame::{FRAME_BYTES_MAX, PREFIX_BYTES};
use crate::to_dispatcher::ToDispatcher;
use crate::to_worker::ToWorker;

/// The default configuration, but for the memory that a sequence's announced length may reserve.
type Wire = Configuration<true, FRAME_BYTES_MAX>;

mod sealed {
    use super::ProtoError;

    pub trait Message: Sized {
        fn write(&self, out: &mut Vec<u8>) -> Result<(), ProtoError>;
        fn read(frame: &[u8]) -> Result<Self, ProtoError>;
    }
}

/// What can be a frame: [`ToWorker`] and [`ToDispatcher`].
pub trait Message: sealed::Message {}

macro_rules! message {
    ($name:ty) => {
        impl sealed::Message for $name {
            fn write(&self, out: &mut Vec<u8>) -> Result<(), ProtoError> {
                <Self as Encode<Wire>>::write(out, self).map_err(not_written)
            }

            fn read(mut frame: &[u8]) -> Result<Self, ProtoError> {
                let message = <Self as Decode<'_, Wire>>::get(&mut frame).map_err(not_read)?;
                match frame.len() {
                    0 => Ok(message),
                    stray => Err(ProtoError::TrailingBytes(stray)),
                }
            }
        }

        impl Message for $name {}
    };
}

message!(ToWorker);
message!(ToDispatcher);

/// Appends one whole frame, prefix and message, to `out`. On an error `out` is as it was.
///
/// Pass the same buffer again and again: nothing is allocated once it is large enough.
///
/// # Errors
///
/// [`ProtoError::MessageTooLarge`]: over [`FRAME_BYTES_MAX`] bytes.
pub fn encode_into<M: Message>(message: &M, out: &mut Vec<u8>) -> Result<(), ProtoError> {
    let start = out.len();
    out.extend_from_slice(&[0; PREFIX_BYTES]);
    let body = out.len();
    let written = message.write(out).and_then(|()| {
        let length = out.len() - body;
        u32::try_from(length)
            .ok()
            .filter(|_| length <= FRAME_BYTES_MAX)
            .ok_or(ProtoError::MessageTooLarge {
                length,
                cap: FRAME_BYTES_MAX,
            })
    });
    match written {
        Ok(length) => {
            out[start..body].copy_from_slice(&length.to_le_bytes());
            Ok(())
        }
        Err(error) => {
            out.truncate(start);
            Err(error)
        }
    }
}

/// One whole frame in a buffer of its own.
///
/// # Errors
///
/// As [`encode_into`].
pub fn encode<M: Message>(message: &M) -> Result<Vec<u8>, ProtoError> {
    let mut out = Vec::new();
    encode_into(message, &mut out)?;
    Ok(out)
}

/// The message in `frame`, which is one frame without its prefix.
///
/// # Errors
///
/// [`ProtoError::Malformed`] where the bytes are no message, [`ProtoError::TrailingBytes`] where
/// they are more than one.
pub fn decode<M: Message>(frame: &[u8]) -> Result<M, ProtoError> {
    M::read(frame)
}

fn not_read(error: ReadError) -> ProtoError {
    ProtoError::Malformed(error.to_string())
}

fn not_written(error: WriteError) -> ProtoError {
    let length = match error {
        WriteError::PreallocationSizeLimit { needed, .. } => needed,
        // Writing to memory fails for no other reason than size.
        _ => usize::MAX,
    };
    ProtoError::MessageTooLarge {
        length,
        cap: FRAME_BYTES_MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::to_worker::PromptInput;
    use crate::{Decoder, RequestId};

    fn text(length: usize) -> ToWorker {
        ToWorker::Tokenise {
            request: RequestId(1),
            input: PromptInput::Text("x".repeat(length)),
        }
    }

    #[test]
    fn frames_are_appended_one_after_another() {
        let mut out = b"before".to_vec();
        encode_into(&ToWorker::Drain, &mut out).unwrap();
        encode_into(&text(3), &mut out).unwrap();
        let mut decoder = Decoder::new();
        assert_eq!(decoder.push(&out[6..]), out.len() - 6);
        let first = decode::<ToWorker>(decoder.next_frame().unwrap().unwrap());
        assert_eq!(first.unwrap(), ToWorker::Drain);
        let second = decode::<ToWorker>(decoder.next_frame().unwrap().unwrap());
        assert_eq!(second.unwrap(), text(3));
        assert_eq!(decoder.next_frame().unwrap(), None);
    }

    #[test]
    fn a_message_over_the_cap_leaves_the_buffer_as_it_was() {
        let overhead = encode(&text(0)).unwrap().len() - PREFIX_BYTES;
        assert!(encode(&text(FRAME_BYTES_MAX - overhead)).is_ok());
        for length in [FRAME_BYTES_MAX - overhead + 1, FRAME_BYTES_MAX + 1] {
            let mut out = b"before".to_vec();
            let error = encode_into(&text(length), &mut out).unwrap_err();
            assert!(
                matches!(error, ProtoError::MessageTooLarge { cap, .. } if cap == FRAME_BYTES_MAX)
            );
            assert_eq!(out, b"before");
        }
    }

    #[test]
    fn stray_bytes_after_a_message_are_counted() {
        let mut frame = encode(&ToWorker::Drain).unwrap().split_off(PREFIX_BYTES);
        frame.extend([0; 3]);
        let error = decode::<ToWorker>(&frame).unwrap_err();
        assert_eq!(error, ProtoError::TrailingBytes(3));
    }

    #[test]
    fn an_unknown_variant_is_malformed_and_not_a_panic() {
        let error = decode::<ToDispatcher>(&[0xff; 16]).unwrap_err();
        assert!(matches!(error, ProtoError::Malformed(_)), "{error}");
    }
}
