//! Bytes of tokens to text that never splits a UTF-8 character.

/// Decodes a stream of bytes, however it is cut, to the text that
/// [`String::from_utf8_lossy`] gives for the whole of it.
#[derive(Clone, Debug, Default)]
pub struct Utf8Stream {
    /// The first bytes of a character whose rest has not come: at most three.
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Appends to `out` what `bytes` completes. Bytes that can be no part of UTF-8 become U+FFFD.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        if self.pending.is_empty() {
            let rest = decode(bytes, out);
            self.pending.extend_from_slice(rest);
        } else {
            let mut joined = std::mem::take(&mut self.pending);
            joined.extend_from_slice(bytes);
            let kept = decode(&joined, out).len();
            joined.drain(..joined.len() - kept);
            self.pending = joined;
        }
    }

    /// The stream is over: half a character becomes one U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Appends whole characters and returns the bytes of a begun one.
fn decode<'a>(mut bytes: &'a [u8], out: &mut String) -> &'a [u8] {
    loop {
        match std::str::from_utf8(bytes) {
            Ok(text) => {
                out.push_str(text);
                return &[];
            }
            Err(error) => {
                let (valid, rest) = bytes.split_at(error.valid_up_to());
                // Checked just above; the lossy form only spares an unwrap.
                out.push_str(&String::from_utf8_lossy(valid));
                let Some(wrong) = error.error_len() else {
                    return rest;
                };
                out.push(char::REPLACEMENT_CHARACTER);
                bytes = &rest[wrong..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn streamed<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
        let mut stream = Utf8Stream::default();
        let mut text = String::new();
        for part in parts {
            stream.push(part, &mut text);
            assert!(stream.pending.len() <= 3, "only a begun character waits");
        }
        stream.finish(&mut text);
        text
    }

    #[test]
    fn a_character_cut_in_four_comes_whole_with_its_last_byte() {
        let mut stream = Utf8Stream::default();
        let mut text = String::new();
        for byte in &"🦀".as_bytes()[..3] {
            stream.push(&[*byte], &mut text);
            assert_eq!(text, "");
        }
        stream.push(&"🦀".as_bytes()[3..], &mut text);
        assert_eq!(text, "🦀");
    }

    #[test]
    fn a_character_that_never_ends_becomes_one_replacement() {
        assert_eq!(streamed([&b"a\xf0\x9f\xa6"[..]]), "a\u{fffd}");
    }

    #[test]
    fn every_two_byte_sequence_decodes_as_the_whole_would() {
        for first in 0..=255_u8 {
            for second in 0..=255_u8 {
                let whole = [first, second];
                assert_eq!(
                    streamed([&whole[..1], &whole[1..]]),
                    String::from_utf8_lossy(&whole),
                    "{whole:?}"
                );
            }
        }
    }

    /// Pieces of real characters and stray bytes, so that broken sequences are common.
    fn hostile_bytes() -> impl Strategy<Value = Vec<u8>> {
        let fragment = prop_oneof![
            any::<u8>().prop_map(|byte| vec![byte]),
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            (any::<char>(), 0..4_usize).prop_map(|(c, cut)| {
                let bytes = c.to_string().into_bytes();
                bytes[..cut.min(bytes.len())].to_vec()
            }),
        ];
        prop::collection::vec(fragment, 0..24).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn any_bytes_cut_anywhere_give_what_the_lossy_whole_gives(
            bytes in hostile_bytes(),
            sizes in prop::collection::vec(0..5_usize, 0..64),
        ) {
            let mut rest = &bytes[..];
            let mut parts = Vec::new();
            for size in sizes {
                let (part, after) = rest.split_at(size.min(rest.len()));
                parts.push(part);
                rest = after;
            }
            parts.push(rest);
            prop_assert_eq!(streamed(parts), String::from_utf8_lossy(&bytes));
        }
    }
}
