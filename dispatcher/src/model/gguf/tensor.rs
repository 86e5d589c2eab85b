//! The tensor inventory of a GGUF header: how many bytes, and how many of them are private copies.

use std::io::{Read, Seek};

use super::{Cursor, GgufError};

/// One tensor, as the header lists it.
#[derive(Debug)]
pub(super) struct TensorInfo {
    role: Role,
    kind: u32,
    /// Elements in a row (the first dimension), and elements in all.
    row: u64,
    elements: u64,
    /// From where the data begins.
    offset: u64,
    dimensions: u32,
}

/// What a step does with a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Read whole in every step.
    Always,
    /// Of the embedding a step reads one row a token, unless it is the output head too.
    Embedding,
    /// Rows of it are looked up, and nothing else.
    LookUp,
    Head,
    /// All experts of a layer.
    Experts,
}

impl Role {
    fn of(name: &str) -> Self {
        match name {
            "token_embd.weight" => Self::Embedding,
            "per_layer_token_embd.weight" => Self::LookUp,
            "output.weight" => Self::Head,
            _ if name.contains("_exps.") => Self::Experts,
            _ => Self::Always,
        }
    }
}

/// Bytes of the inventory by what a step does with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepBytes {
    pub(super) always: u64,
    pub(super) embedding: u64,
    pub(super) head: u64,
    pub(super) experts: u64,
}

impl StepBytes {
    fn add(&mut self, role: Role, bytes: u64) {
        let sum = match role {
            Role::Always => &mut self.always,
            Role::Embedding => &mut self.embedding,
            Role::Head => &mut self.head,
            Role::Experts => &mut self.experts,
            Role::LookUp => return,
        };
        *sum = sum.saturating_add(bytes);
    }

    /// Of two files of one model.
    pub(super) fn join(&mut self, other: Self) {
        for (role, bytes) in [
            (Role::Always, other.always),
            (Role::Embedding, other.embedding),
            (Role::Head, other.head),
            (Role::Experts, other.experts),
        ] {
            self.add(role, bytes);
        }
    }

    /// Bytes that every step reads: without a head of its own the embedding is the head.
    pub(super) fn every_step(&self) -> u64 {
        let head = if self.head > 0 {
            self.head
        } else {
            self.embedding
        };
        self.always.saturating_add(head)
    }
}

/// Sums over the inventory, in bytes.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub(super) bytes: u64,
    pub(super) repacked_bytes: u64,
    pub(super) step: StepBytes,
}

impl TensorInfo {
    pub(super) fn read<R: Read + Seek>(cursor: &mut Cursor<R>) -> Result<Self, GgufError> {
        let role = Role::of(&cursor.name("tensor name")?);
        let dimensions = cursor.u32()?;
        if !(1..=4).contains(&dimensions) {
            return Err(GgufError::Damaged(format!(
                "a tensor of {dimensions} dimensions is claimed"
            )));
        }
        let mut row = 1;
        let mut elements = 1_u64;
        for dimension in 0..dimensions {
            let extent = cursor.u64()?;
            if dimension == 0 {
                row = extent;
            }
            elements = elements
                .checked_mul(extent)
                .ok_or_else(|| GgufError::Damaged("a tensor is larger than any memory".into()))?;
        }
        Ok(Self {
            role,
            kind: cursor.u32()?,
            row,
            elements,
            offset: cursor.u64()?,
            dimensions,
        })
    }

    /// Bytes of this tensor; `None` for a format that this build does not know.
    fn bytes(&self) -> Result<Option<u64>, GgufError> {
        let Some((block_elements, block_bytes)) = block(self.kind) else {
            return Ok(None);
        };
        if !self.row.is_multiple_of(block_elements) {
            return Err(GgufError::Damaged(format!(
                "a tensor's rows of {} elements are not whole blocks of {block_elements}",
                self.row
            )));
        }
        (self.elements / block_elements)
            .checked_mul(block_bytes)
            .map(Some)
            .ok_or_else(|| GgufError::Damaged("a tensor is larger than any memory".into()))
    }

    /// ggml's CPU backend copies matrices in these formats into an interleaved layout of its own, so
    /// that their mapped pages are not shared between processes: Q4_0, Q4_K, IQ4_NL, MXFP4.
    fn is_repacked(&self) -> bool {
        self.dimensions >= 2 && matches!(self.kind, 2 | 12 | 20 | 39)
    }
}

/// Adds the inventory up and holds it against the file's length.
pub(super) fn totals(
    inventory: &[TensorInfo],
    data_begins: u64,
    file_bytes: u64,
) -> Result<Totals, GgufError> {
    let mut totals = Totals::default();
    let mut needed = data_begins;
    for tensor in inventory {
        // A format from the future: its tensor begins in the file at least.
        let bytes = tensor.bytes()?.unwrap_or(0);
        let end = data_begins
            .checked_add(tensor.offset)
            .and_then(|begin| begin.checked_add(bytes))
            .ok_or_else(|| GgufError::Damaged("a tensor ends after any file's end".into()))?;
        needed = needed.max(end);
        totals.bytes = totals.bytes.saturating_add(bytes);
        totals.step.add(tensor.role, bytes);
        if tensor.is_repacked() {
            totals.repacked_bytes = totals.repacked_bytes.saturating_add(bytes);
        }
    }
    if needed > file_bytes {
        return Err(GgufError::TensorsCut {
            needed,
            found: file_bytes,
        });
    }
    Ok(totals)
}

/// Elements and bytes of one block of a ggml format, by its number in `enum ggml_type`.
fn block(kind: u32) -> Option<(u64, u64)> {
    Some(match kind {
        0 | 26 => (1, 4),      // F32, I32
        1 | 25 | 30 => (1, 2), // F16, I16, BF16
        2 | 20 => (32, 18),    // Q4_0, IQ4_NL
        3 => (32, 20),         // Q4_1
        6 => (32, 22),         // Q5_0
        7 => (32, 24),         // Q5_1
        8 => (32, 34),         // Q8_0
        9 => (32, 36),         // Q8_1
        10 => (256, 84),       // Q2_K
        11 | 21 => (256, 110), // Q3_K, IQ3_S
        12 => (256, 144),      // Q4_K
        13 => (256, 176),      // Q5_K
        14 => (256, 210),      // Q6_K
        15 => (256, 292),      // Q8_K
        16 | 35 => (256, 66),  // IQ2_XXS, TQ2_0
        17 => (256, 74),       // IQ2_XS
        18 => (256, 98),       // IQ3_XXS
        19 => (256, 50),       // IQ1_S
        22 => (256, 82),       // IQ2_S
        23 => (256, 136),      // IQ4_XS
        24 => (1, 1),          // I8
        27 | 28 => (1, 8),     // I64, F64
        29 => (256, 56),       // IQ1_M
        34 => (256, 54),       // TQ1_0
        39 => (32, 17),        // MXFP4
        40 => (64, 36),        // NVFP4
        41 => (128, 18),       // Q1_0
        42 => (64, 18),        // Q2_0
        _ => return None,
    })
}
