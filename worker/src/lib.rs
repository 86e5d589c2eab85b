//! Holds one warmed engine and turns prompts into tokens.

pub mod engine;
pub mod prompt;
pub mod sampler;
