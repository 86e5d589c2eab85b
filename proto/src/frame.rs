//! Length-prefixed framing over byte slices: push bytes, pull frames, one size cap.
//!
//! A frame is a little-endian `u32` length in bytes, then that many bytes. The length counts the
//! message alone, is never 0 and never over [`FRAME_BYTES_MAX`].

use crate::error::ProtoError;

/// The longest message in bytes, its length prefix not counted.
///
/// A prompt of a million token ids is 4 MiB; a step of 512 rows with 20 logprobs each is under 1 MiB.
pub const FRAME_BYTES_MAX: usize = 16 << 20;

/// Bytes of the length prefix.
pub const PREFIX_BYTES: usize = size_of::<u32>();

/// The buffer of a decoder that has seen only small frames stays this small.
const CAPACITY_MIN_BYTES: usize = 4 << 10;

/// Cuts a stream of bytes into frames.
///
/// It holds at most one frame's bytes beyond what was pushed since the last pull, and it never
/// reserves memory on the word of a length prefix alone: the buffer at most doubles with the bytes
/// that did arrive, and never passes the cap.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Bytes of `buffer` before this are of frames that were pulled.
    start: usize,
    cap: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    /// A decoder with the protocol's own cap.
    #[must_use]
    pub fn new() -> Self {
        Self::with_cap(FRAME_BYTES_MAX)
    }

    /// A decoder with a lower cap in bytes, for peers that have not yet shown who they are.
    #[must_use]
    pub fn with_cap(cap: usize) -> Self {
        Self {
            buffer: Vec::new(),
            start: 0,
            cap: cap.min(FRAME_BYTES_MAX),
        }
    }

    /// Moves the cap, in bytes; what has been pushed stays.
    pub fn set_cap(&mut self, cap: usize) {
        self.cap = cap.min(FRAME_BYTES_MAX);
    }

    /// Takes bytes from the front of `bytes` and says how many. Pull frames until there is none,
    /// then push the rest.
    ///
    /// It takes all of them, or as many as fit below the cap. At least one fits after
    /// [`Decoder::next_frame`] has said that there is no whole frame.
    #[must_use = "what was not taken must be pushed again"]
    pub fn push(&mut self, bytes: &[u8]) -> usize {
        self.compact();
        let limit = self.cap + PREFIX_BYTES;
        let taken = bytes.len().min(limit.saturating_sub(self.buffer.len()));
        let needed = self.buffer.len() + taken;
        if needed > self.buffer.capacity() {
            let grown = (self.buffer.capacity() * 2).clamp(CAPACITY_MIN_BYTES.min(limit), limit);
            self.buffer
                .reserve_exact(grown.max(needed) - self.buffer.len());
        }
        self.buffer.extend_from_slice(&bytes[..taken]);
        taken
    }

    /// The next whole frame's message, without its prefix; `None`: more bytes are needed.
    ///
    /// # Errors
    ///
    /// [`ProtoError::FrameEmpty`] and [`ProtoError::FrameTooLarge`], as soon as the prefix is
    /// there. The stream cannot be read on after either: the same error comes again.
    pub fn next_frame(&mut self) -> Result<Option<&[u8]>, ProtoError> {
        let unread = &self.buffer[self.start..];
        let Some((prefix, rest)) = unread.split_first_chunk::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let announced = u32::from_le_bytes(*prefix);
        if announced == 0 {
            return Err(ProtoError::FrameEmpty);
        }
        let too_large = ProtoError::FrameTooLarge {
            announced: u64::from(announced),
            cap: self.cap,
        };
        let Ok(length) = usize::try_from(announced) else {
            return Err(too_large);
        };
        if length > self.cap {
            return Err(too_large);
        }
        if rest.len() < length {
            return Ok(None);
        }
        let begin = self.start + PREFIX_BYTES;
        self.start = begin + length;
        Ok(Some(&self.buffer[begin..self.start]))
    }

    /// Bytes that were pushed and are not part of a pulled frame.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        self.buffer.len() - self.start
    }

    fn compact(&mut self) {
        if self.start == self.buffer.len() {
            self.buffer.clear();
        } else if self.start > 0 {
            self.buffer.drain(..self.start);
        }
        self.start = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framed(message: &[u8]) -> Vec<u8> {
        let mut bytes = u32::try_from(message.len()).unwrap().to_le_bytes().to_vec();
        bytes.extend_from_slice(message);
        bytes
    }

    fn pull_all(decoder: &mut Decoder, mut bytes: &[u8]) -> Result<Vec<Vec<u8>>, ProtoError> {
        let mut frames = Vec::new();
        while !bytes.is_empty() {
            let taken = decoder.push(bytes);
            assert!(taken > 0, "a decoder without a whole frame takes bytes");
            bytes = &bytes[taken..];
            while let Some(frame) = decoder.next_frame()? {
                frames.push(frame.to_vec());
            }
        }
        Ok(frames)
    }

    #[test]
    fn frames_come_out_the_same_however_the_bytes_are_cut() {
        let mut stream = framed(b"one");
        stream.extend(framed(&[7; 300]));
        stream.extend(framed(b"x"));
        for size in 1..stream.len() {
            let mut decoder = Decoder::new();
            let mut frames = Vec::new();
            for part in stream.chunks(size) {
                frames.extend(pull_all(&mut decoder, part).unwrap());
            }
            assert_eq!(
                frames,
                [b"one".to_vec(), vec![7; 300], b"x".to_vec()],
                "cut every {size} bytes"
            );
            assert_eq!(decoder.pending_bytes(), 0);
        }
    }

    #[test]
    fn a_frame_of_exactly_the_cap_passes_and_one_byte_more_does_not() {
        let mut decoder = Decoder::with_cap(100);
        assert_eq!(pull_all(&mut decoder, &framed(&[1; 100])).unwrap().len(), 1);
        let error = pull_all(&mut decoder, &framed(&[1; 101])).unwrap_err();
        assert_eq!(
            error,
            ProtoError::FrameTooLarge {
                announced: 101,
                cap: 100
            }
        );
        assert_eq!(decoder.next_frame().unwrap_err(), error, "it stays broken");
    }

    #[test]
    fn an_empty_frame_is_refused() {
        let mut decoder = Decoder::new();
        let error = pull_all(&mut decoder, &[0; 4]).unwrap_err();
        assert_eq!(error, ProtoError::FrameEmpty);
    }

    #[test]
    fn an_announced_length_reserves_nothing() {
        let mut decoder = Decoder::new();
        let announced = u32::try_from(FRAME_BYTES_MAX).unwrap().to_le_bytes();
        assert!(pull_all(&mut decoder, &announced).unwrap().is_empty());
        assert!(decoder.buffer.capacity() <= CAPACITY_MIN_BYTES);
    }

    #[test]
    fn the_buffer_never_passes_the_cap_and_its_prefix() {
        let mut decoder = Decoder::new();
        let stream = framed(&vec![3; FRAME_BYTES_MAX]);
        let mut rest = &stream[..];
        while !rest.is_empty() {
            let taken = decoder.push(&rest[..rest.len().min(64 << 10)]);
            rest = &rest[taken..];
            assert!(decoder.buffer.capacity() <= FRAME_BYTES_MAX + PREFIX_BYTES);
        }
        assert_eq!(
            decoder.next_frame().unwrap().unwrap().len(),
            FRAME_BYTES_MAX
        );
    }
}
