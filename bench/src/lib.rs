//! Measures any OpenAI-compatible endpoint, queue included.
//!
//! A run is: a [`workload`] (what is asked), an [`arrival`] process (when), a [`client`] (how one
//! request is sent and read), and [`load`], which drives one by the others. Each request ends as one
//! [`sample::Sample`], however it ends; samples go to a JSONL file as they come, and everything that
//! is reported is computed from samples by [`statistics`].

pub mod arrival;
pub mod bus;
pub mod ceiling;
pub mod cell;
pub mod chaos;
pub mod chunk;
pub mod cli;
pub mod client;
pub mod clock;
pub mod contract;
pub mod endpoint;
pub mod error;
pub mod flood;
pub mod host;
pub mod load;
pub mod mark;
pub mod plan;
pub mod process;
pub mod progress;
pub mod random;
pub mod record;
pub mod report;
pub mod sample;
pub mod sse;
pub mod statistics;
pub mod status;
pub mod steady;
pub mod strain;
pub mod sweep;
pub mod synth;
pub mod target;
pub mod verbs;
pub mod verdict;
pub mod workload;
