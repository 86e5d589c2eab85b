//! What is counted, under which names, and how it is read.

mod export;
mod histogram;
pub mod names;
mod observe;
mod scrape;

pub use export::{Metrics, Route};
