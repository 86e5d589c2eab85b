//! What a run leaves behind.

pub mod jsonl;
pub mod markdown;
pub mod svg;
