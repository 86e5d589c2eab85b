//! What is counted, under which names, and how it is read.

mod export;
mod histogram;
pub mod names;

pub use export::{Metrics, Route};
