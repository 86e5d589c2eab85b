//! Takes the tokenizer out of a GGUF file and fills its vocabulary up to a size.

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::{entry, text};
use crate::error::BenchError;

/// Bytes of a header at most; one with 300,000 tokens and their merges takes about 20 MB.
const HEADER_BYTES_MAX: u64 = 64 << 20;
const ARRAY: u32 = 9;
const I32: u32 = 5;
const F32: u32 = 6;
const TEXT: u32 = 8;
/// The type of a token that is plain text.
const NORMAL: i32 = 1;

/// The keys of a tokenizer, as bytes to be put into another header.
#[derive(Debug)]
pub(super) struct Vocabulary {
    pub(super) entries: Vec<Vec<u8>>,
}

impl Vocabulary {
    /// The tokenizer of `path`, with tokens added until it has `size`.
    pub(super) fn read(path: &Path, size: u32) -> Result<Self, BenchError> {
        let mut bytes = Vec::new();
        File::open(path)
            .and_then(|file| file.take(HEADER_BYTES_MAX).read_to_end(&mut bytes))
            .map_err(|source| BenchError::File {
                path: path.to_path_buf(),
                source,
            })?;
        Self::parse(&bytes, size as usize)
            .map_err(|words| BenchError::Usage(format!("--tokenizer {}: {words}", path.display())))
    }

    fn parse(bytes: &[u8], size: usize) -> Result<Self, String> {
        let mut reader = Reader { bytes };
        if reader.take(4)? != b"GGUF" {
            return Err("it is no GGUF file".into());
        }
        reader.take(4 + 8)?;
        let keys = reader.u64()?;
        let mut entries = Vec::new();
        let mut filled = false;
        for _ in 0..keys {
            let key = String::from_utf8_lossy(reader.string()?).into_owned();
            let kind = reader.u32()?;
            let start = reader.bytes;
            reader.skip(kind)?;
            let raw = &start[..start.len() - reader.bytes.len()];
            if !key.starts_with("tokenizer.") {
                continue;
            }
            let value = match key.as_str() {
                "tokenizer.ggml.tokens" => {
                    filled = true;
                    fill_tokens(raw, size)?
                }
                "tokenizer.ggml.token_type" => fill(raw, I32, size, &NORMAL.to_le_bytes())?,
                "tokenizer.ggml.scores" => fill(raw, F32, size, &0_f32.to_le_bytes())?,
                _ => raw.to_vec(),
            };
            entries.push(entry(&key, kind, &value));
        }
        if filled {
            Ok(Self { entries })
        } else {
            Err("it has no vocabulary".into())
        }
    }
}

/// Words that no merge leads to, so that the tokenizer itself never gives them.
fn fill_tokens(raw: &[u8], size: usize) -> Result<Vec<u8>, String> {
    let mut reader = Reader { bytes: raw };
    let (kind, there) = (reader.u32()?, reader.count()?);
    if kind != TEXT {
        return Err("its vocabulary is no list of strings".into());
    }
    if there > size {
        return Err(format!(
            "its {there} tokens are more than the shape's {size}"
        ));
    }
    let mut known = HashSet::new();
    for _ in 0..there {
        known.insert(reader.string()?);
    }
    let mut out = array(TEXT, size);
    out.extend(&raw[4 + 8..]);
    for n in there..size {
        let word = format!("Ġ#{n}");
        if known.contains(word.as_bytes()) {
            return Err(format!("it has a token {word:?} of its own"));
        }
        out.extend(text(&word));
    }
    Ok(out)
}

fn fill(raw: &[u8], kind: u32, size: usize, with: &[u8; 4]) -> Result<Vec<u8>, String> {
    let mut reader = Reader { bytes: raw };
    if reader.u32()? != kind {
        return Err("a list beside its vocabulary is of an unknown kind".into());
    }
    let there = reader.count()?;
    let mut out = array(kind, size);
    out.extend(&raw[4 + 8..]);
    out.extend(with.repeat(size.saturating_sub(there)));
    Ok(out)
}

fn array(kind: u32, length: usize) -> Vec<u8> {
    let mut out = kind.to_le_bytes().to_vec();
    out.extend((length as u64).to_le_bytes());
    out
}

/// What is left of a header. Every step is checked: the file is foreign.
struct Reader<'b> {
    bytes: &'b [u8],
}

impl<'b> Reader<'b> {
    fn take(&mut self, length: usize) -> Result<&'b [u8], String> {
        let (taken, left) = self
            .bytes
            .split_at_checked(length)
            .ok_or("its header is cut short or too long")?;
        self.bytes = left;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, String> {
        let bytes = self.take(4)?.try_into().map_err(|_| "unreachable length")?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn u64(&mut self) -> Result<u64, String> {
        let bytes = self.take(8)?.try_into().map_err(|_| "unreachable length")?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn count(&mut self) -> Result<usize, String> {
        usize::try_from(self.u64()?).map_err(|e| e.to_string())
    }

    fn string(&mut self) -> Result<&'b [u8], String> {
        let length = self.count()?;
        self.take(length)
    }

    /// Over one value of the given kind.
    fn skip(&mut self, kind: u32) -> Result<(), String> {
        let fixed = |kind| match kind {
            0 | 1 | 7 => Some(1),
            2 | 3 => Some(2),
            4..=6 => Some(4),
            10..=12 => Some(8),
            _ => None,
        };
        if let Some(size) = fixed(kind) {
            return self.take(size).map(|_| ());
        }
        match kind {
            TEXT => self.string().map(|_| ()),
            ARRAY => {
                let (inner, count) = (self.u32()?, self.count()?);
                match fixed(inner) {
                    Some(size) => self.take(count.saturating_mul(size)).map(|_| ()),
                    None if inner == TEXT => (0..count).try_for_each(|_| self.skip(TEXT)),
                    None => Err(format!("its header has a list of kind {inner}")),
                }
            }
            _ => Err(format!("its header has a value of kind {kind}")),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A header with a vocabulary and one key that is none of the tokenizer's.
    pub(in super::super) fn gguf(tokens: &[&str]) -> Vec<u8> {
        let mut list = array(TEXT, tokens.len());
        for token in tokens {
            list.extend(text(token));
        }
        let mut types = array(I32, tokens.len());
        types.extend(3_i32.to_le_bytes().repeat(tokens.len()));
        let keys = [
            entry("general.name", TEXT, &text("small")),
            entry("tokenizer.ggml.model", TEXT, &text("gpt2")),
            entry("tokenizer.ggml.tokens", ARRAY, &list),
            entry("tokenizer.ggml.token_type", ARRAY, &types),
        ];
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend(0_u64.to_le_bytes());
        out.extend((keys.len() as u64).to_le_bytes());
        out.extend(keys.concat());
        out
    }

    #[test]
    fn the_tokenizer_is_taken_and_filled_up_and_the_rest_is_left() {
        let vocabulary = Vocabulary::parse(&gguf(&["a", "b"]), 4).unwrap();
        let mut tokens = array(TEXT, 4);
        for token in ["a", "b", "Ġ#2", "Ġ#3"] {
            tokens.extend(text(token));
        }
        let mut types = array(I32, 4);
        for kind in [3_i32, 3, NORMAL, NORMAL] {
            types.extend(kind.to_le_bytes());
        }
        assert_eq!(
            vocabulary.entries,
            [
                entry("tokenizer.ggml.model", TEXT, &text("gpt2")),
                entry("tokenizer.ggml.tokens", ARRAY, &tokens),
                entry("tokenizer.ggml.token_type", ARRAY, &types),
            ]
        );
    }

    #[test]
    fn a_file_that_does_not_fit_or_is_cut_short_ends_in_words() {
        let whole = gguf(&["a", "b"]);
        for length in 0..whole.len() {
            assert!(Vocabulary::parse(&whole[..length], 4).is_err(), "{length}");
        }
        assert!(
            Vocabulary::parse(&whole, 1)
                .unwrap_err()
                .contains("more than")
        );
        let taken = gguf(&["a", "Ġ#2"]);
        assert!(
            Vocabulary::parse(&taken, 4)
                .unwrap_err()
                .contains("of its own")
        );
        let mut endless = whole;
        endless[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Vocabulary::parse(&endless, 4).is_err());
    }
}
