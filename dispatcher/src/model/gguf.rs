//! A GGUF file's header, read with bounds: the few figures that sizing needs, from a file nobody vouches for.
//!
//! The header's layout is that of the GGUF specification, versions 2 and 3, little-endian. No length
//! in the file is trusted: each is checked against what is left of a fixed budget before anything is
//! read or allocated for it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use thiserror::Error;

mod tensor;

pub use tensor::StepBytes;
use tensor::TensorInfo;

use crate::bus::Weights;

/// Bytes of header that are read at most. Vocabularies of 260,000 entries need about 12 MB.
const HEADER_BYTES_MAX: u64 = 64 << 20;
/// Metadata entries at most; models in the field have under 100.
const ENTRIES_MAX: u64 = 4096;
/// Tensors at most; the largest mixtures of experts have a few thousand.
const TENSORS_MAX: u64 = 65_536;
/// Files of one model at most.
const PARTS_MAX: u32 = 1000;
/// A key, or a tensor's name, at most.
const NAME_BYTES_MAX: u64 = 65_535;
/// A text value that is kept at most; longer ones (chat templates) are skipped.
const TEXT_BYTES_MAX: u64 = 4096;
/// Elements of a number array that are kept at most: one a layer.
const LAYERS_MAX: u64 = 4096;

/// Why a file cannot be used as a model.
#[derive(Debug, Error)]
pub enum GgufError {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("is not a GGUF file (it begins with \"{}\", not with \"GGUF\")", .0.escape_ascii())]
    Magic([u8; 4]),
    #[error("is a GGUF file of version {0}; versions 2 and 3 can be read")]
    Version(u32),
    #[error("is cut short: its header goes on after the end of the file")]
    HeaderCut,
    #[error(
        "is cut short: its tensors need {needed} bytes, the file has {found} \
         (an interrupted download? fetch it again)"
    )]
    TensorsCut { needed: u64, found: u64 },
    #[error("is damaged: {0}")]
    Damaged(String),
}

/// What the header says, as far as sizing needs it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// `general.architecture`, such as `llama` or `qwen2`.
    pub architecture: String,
    /// `general.name`, for people.
    pub name: Option<String>,
    /// Tokens of context that the model was trained for.
    pub context_length: Option<u32>,
    pub block_count: u32,
    /// Vocabulary size in tokens; 0 where the file has no vocabulary.
    pub vocabulary: u32,
    /// Bytes of KV cache of one token in one sequence, kept as 16-bit floats.
    pub kv_bytes_per_token: u64,
    /// Bytes of the whole file.
    pub file_bytes: u64,
    /// Bytes of all tensors together.
    pub tensor_bytes: u64,
    /// Of them, bytes in formats that ggml copies into a layout of its own on the CPU, once a process.
    pub repacked_bytes: u64,
    /// The inventory by what a step does with it.
    pub step_bytes: StepBytes,
    /// Experts of a layer, and how many of them a token uses; 0 in a dense model.
    pub experts: u32,
    pub experts_used: u32,
    /// Files of the model: 1 where it is whole.
    pub parts: u32,
}

impl Header {
    /// The weights as a decode step meets them.
    #[must_use]
    pub fn weights(&self) -> Weights {
        let mixture = self.experts > 0 && self.experts_used > 0;
        let (always, experts) = if mixture {
            (self.step_bytes.every_step(), self.step_bytes.experts)
        } else {
            let all = self.step_bytes.every_step();
            (all.saturating_add(self.step_bytes.experts), 0)
        };
        Weights {
            always_bytes: always,
            expert_bytes: experts,
            experts: self.experts,
            experts_used: self.experts_used,
        }
    }

    /// Adds what another file of the same model holds.
    fn join(&mut self, part: &Self) {
        self.file_bytes = self.file_bytes.saturating_add(part.file_bytes);
        self.tensor_bytes = self.tensor_bytes.saturating_add(part.tensor_bytes);
        self.repacked_bytes = self.repacked_bytes.saturating_add(part.repacked_bytes);
        self.step_bytes.join(part.step_bytes);
    }
}

/// Reads the header of the file at `path`, and of the other files where the model is split.
///
/// # Errors
/// Where a file cannot be opened, is no GGUF file, is cut short or contradicts itself.
pub fn read(path: &Path) -> Result<Header, GgufError> {
    let mut header = read_file(path)?;
    for part in 2..=header.parts {
        let sister = sister(path, part, header.parts)?;
        header.join(&read_file(&sister)?);
    }
    Ok(header)
}

/// The file of another part, by llama.cpp's naming.
fn sister(first: &Path, part: u32, parts: u32) -> Result<PathBuf, GgufError> {
    let name = first.file_name().and_then(|name| name.to_str());
    let stem = name
        .and_then(|name| name.strip_suffix(&format!("-00001-of-{parts:05}.gguf")))
        .ok_or_else(|| {
            GgufError::Damaged(format!(
                "it is one of {parts} files: name the first, whose name ends in -00001-of-{parts:05}.gguf"
            ))
        })?;
    Ok(first.with_file_name(format!("{stem}-{part:05}-of-{parts:05}.gguf")))
}

fn read_file(path: &Path) -> Result<Header, GgufError> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        let kind = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
        return Err(GgufError::Io(kind));
    }
    read_from(BufReader::new(file), metadata.len())
}

/// Reads a header from `source`, whose whole length is `file_bytes`.
///
/// # Errors
/// As [`read`].
pub fn read_from(source: impl Read + Seek, file_bytes: u64) -> Result<Header, GgufError> {
    let mut cursor = Cursor {
        source,
        at: 0,
        left: file_bytes.min(HEADER_BYTES_MAX),
        capped: file_bytes > HEADER_BYTES_MAX,
    };
    let magic = cursor.array::<4>()?;
    if &magic != b"GGUF" {
        return Err(GgufError::Magic(magic));
    }
    let version = cursor.u32()?;
    if !(2..=3).contains(&version) {
        return Err(GgufError::Version(version));
    }
    let tensors = cursor.count(TENSORS_MAX, "tensors")?;
    let entries = cursor.count(ENTRIES_MAX, "metadata entries")?;

    let mut metadata = BTreeMap::new();
    for _ in 0..entries {
        let key = cursor.name("metadata key")?;
        let kind = cursor.u32()?;
        let value = cursor.value(kind)?;
        metadata.insert(key, value);
    }
    let mut inventory = Vec::new();
    for _ in 0..tensors {
        inventory.push(TensorInfo::read(&mut cursor)?);
    }
    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(Value::Number(n)) if n.is_power_of_two() && *n <= 1 << 20 => *n,
        Some(_) => return Err(GgufError::Damaged("its alignment makes no sense".into())),
    };
    let data_begins = cursor.at.div_ceil(alignment) * alignment;
    let totals = tensor::totals(&inventory, data_begins, file_bytes)?;
    header(&metadata, file_bytes, &totals)
}

fn header(
    metadata: &BTreeMap<String, Value>,
    file_bytes: u64,
    totals: &tensor::Totals,
) -> Result<Header, GgufError> {
    let plain = |key: &str| match metadata.get(key) {
        Some(Value::Number(n)) => u32::try_from(*n).ok(),
        _ => None,
    };
    let parts = plain("split.count").unwrap_or(1).max(1);
    if parts > PARTS_MAX {
        return Err(GgufError::Damaged(format!("it claims {parts} parts")));
    }
    if plain("split.no").is_some_and(|number| number > 0) {
        // A later part has tensors and no figures of its own.
        return Ok(Header {
            file_bytes,
            tensor_bytes: totals.bytes,
            repacked_bytes: totals.repacked_bytes,
            step_bytes: totals.step,
            parts,
            ..Header::default()
        });
    }
    let Some(Value::Text(architecture)) = metadata.get("general.architecture") else {
        return Err(GgufError::Damaged("it names no architecture".into()));
    };
    let number = |suffix: &str| -> Option<u64> {
        match metadata.get(&format!("{architecture}.{suffix}")) {
            Some(Value::Number(n)) => Some(*n),
            _ => None,
        }
    };
    let small = |suffix: &str| number(suffix).and_then(|n| u32::try_from(n).ok());
    let block_count = small("block_count")
        .filter(|n| u64::from(*n) <= LAYERS_MAX)
        .ok_or_else(|| GgufError::Damaged("it does not say how many layers it has".into()))?;

    // Heads may be given once, or layer by layer.
    let heads = number("attention.head_count").unwrap_or(0);
    let kv_heads_sum = match metadata.get(&format!("{architecture}.attention.head_count_kv")) {
        Some(Value::Number(n)) => n.saturating_mul(u64::from(block_count)),
        Some(Value::Numbers(each)) => each.iter().fold(0_u64, |sum, n| sum.saturating_add(*n)),
        _ => heads.saturating_mul(u64::from(block_count)),
    };
    let head_length = number("embedding_length")
        .unwrap_or(0)
        .checked_div(heads)
        .unwrap_or(0);
    let key_length = number("attention.key_length").unwrap_or(head_length);
    let value_length = number("attention.value_length").unwrap_or(head_length);
    let kv_bytes_per_token = kv_heads_sum
        .saturating_mul(key_length.saturating_add(value_length))
        .saturating_mul(2);

    let vocabulary = match metadata.get("tokenizer.ggml.tokens") {
        Some(Value::Skipped { elements }) => u32::try_from(*elements).unwrap_or(u32::MAX),
        _ => 0,
    };
    Ok(Header {
        architecture: architecture.clone(),
        name: match metadata.get("general.name") {
            Some(Value::Text(name)) => Some(name.clone()),
            _ => None,
        },
        context_length: small("context_length").filter(|n| *n > 0),
        block_count,
        vocabulary,
        kv_bytes_per_token,
        file_bytes,
        tensor_bytes: totals.bytes,
        repacked_bytes: totals.repacked_bytes,
        step_bytes: totals.step,
        experts: small("expert_count").unwrap_or(0),
        experts_used: small("expert_used_count").unwrap_or(0),
        parts,
    })
}

/// A metadata value, as far as it is kept.
#[derive(Debug)]
enum Value {
    Number(u64),
    Numbers(Vec<u64>),
    Text(String),
    /// Something else, of so many elements.
    Skipped {
        elements: u64,
    },
}

/// Reads little-endian values and never past its budget.
struct Cursor<R> {
    source: R,
    at: u64,
    left: u64,
    /// The budget is our bound, not the file's end.
    capped: bool,
}

impl<R: Read + Seek> Cursor<R> {
    fn take(&mut self, bytes: u64) -> Result<(), GgufError> {
        if bytes > self.left {
            return Err(if self.capped {
                GgufError::Damaged(format!(
                    "its header is longer than {} MiB",
                    HEADER_BYTES_MAX >> 20
                ))
            } else {
                GgufError::HeaderCut
            });
        }
        self.left -= bytes;
        self.at += bytes;
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        self.take(N as u64)?;
        let mut bytes = [0; N];
        self.source.read_exact(&mut bytes).map_err(cut)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn count(&mut self, max: u64, what: &str) -> Result<u64, GgufError> {
        let count = self.u64()?;
        if count > max {
            return Err(GgufError::Damaged(format!("it claims {count} {what}")));
        }
        Ok(count)
    }

    fn skip(&mut self, bytes: u64) -> Result<(), GgufError> {
        self.take(bytes)?;
        let step = i64::try_from(bytes).map_err(|_| GgufError::HeaderCut)?;
        self.source.seek_relative(step)?;
        Ok(())
    }

    fn text(&mut self, bytes: u64) -> Result<String, GgufError> {
        self.take(bytes)?;
        let mut text = Vec::new();
        let read = self
            .source
            .by_ref()
            .take(bytes)
            .read_to_end(&mut text)
            .map_err(cut)?;
        if read as u64 != bytes {
            return Err(GgufError::HeaderCut);
        }
        String::from_utf8(text)
            .map_err(|_| GgufError::Damaged("one of its texts is not UTF-8".into()))
    }

    fn name(&mut self, what: &str) -> Result<String, GgufError> {
        let bytes = self.u64()?;
        if bytes > NAME_BYTES_MAX {
            return Err(GgufError::Damaged(format!(
                "a {what} of {bytes} bytes is claimed"
            )));
        }
        self.text(bytes)
    }

    fn value(&mut self, kind: u32) -> Result<Value, GgufError> {
        match kind {
            STRING => {
                let bytes = self.u64()?;
                if bytes <= TEXT_BYTES_MAX {
                    self.text(bytes).map(Value::Text)
                } else {
                    self.skip(bytes)?;
                    Ok(Value::Skipped { elements: 1 })
                }
            }
            ARRAY => self.elements(),
            _ => self.number(kind).map(|number| match number {
                Some(number) => Value::Number(number),
                None => Value::Skipped { elements: 1 },
            }),
        }
    }

    fn elements(&mut self) -> Result<Value, GgufError> {
        let kind = self.u32()?;
        let elements = self.u64()?;
        if kind == STRING {
            // Each has a length of its own of 8 bytes: no more of them fit than that.
            if elements > self.left / 8 {
                return Err(GgufError::Damaged(format!(
                    "an array claims {elements} texts"
                )));
            }
            for _ in 0..elements {
                let bytes = self.u64()?;
                self.skip(bytes)?;
            }
            return Ok(Value::Skipped { elements });
        }
        let width = width(kind)?;
        let bytes = elements
            .checked_mul(width)
            .ok_or_else(|| GgufError::Damaged(format!("an array claims {elements} numbers")))?;
        if elements > LAYERS_MAX {
            self.skip(bytes)?;
            return Ok(Value::Skipped { elements });
        }
        let mut numbers = Vec::new();
        for _ in 0..elements {
            numbers.extend(self.number(kind)?);
        }
        Ok(Value::Numbers(numbers))
    }

    /// An integer that is not negative; `None` for all other scalars.
    fn number(&mut self, kind: u32) -> Result<Option<u64>, GgufError> {
        Ok(match width(kind)? {
            1 => {
                let [byte] = self.array::<1>()?;
                (kind == 0).then_some(u64::from(byte))
            }
            2 => {
                let bytes = self.array::<2>()?;
                (kind == 2).then_some(u64::from(u16::from_le_bytes(bytes)))
            }
            4 => {
                let bytes = self.array::<4>()?;
                match kind {
                    4 => Some(u64::from(u32::from_le_bytes(bytes))),
                    5 => u64::try_from(i32::from_le_bytes(bytes)).ok(),
                    _ => None,
                }
            }
            _ => {
                let bytes = self.array::<8>()?;
                match kind {
                    10 => Some(u64::from_le_bytes(bytes)),
                    11 => u64::try_from(i64::from_le_bytes(bytes)).ok(),
                    _ => None,
                }
            }
        })
    }
}

const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Bytes of a scalar of this kind. Arrays of arrays do not occur in models and are refused.
fn width(kind: u32) -> Result<u64, GgufError> {
    match kind {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        10..=12 => Ok(8),
        _ => Err(GgufError::Damaged(format!(
            "a value has the unknown type {kind}"
        ))),
    }
}

fn cut(error: io::Error) -> GgufError {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        GgufError::HeaderCut
    } else {
        GgufError::Io(error)
    }
}

#[cfg(test)]
mod tests;
