//! What is counted, under which names, and how it is read.

mod export;
mod histogram;
mod observe;
pub mod names;

pub use export::{Metrics, Route};
