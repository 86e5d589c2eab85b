//! Takes requests, keeps K workers alive, and matches the two.

pub mod cli;
pub mod clock;
pub mod config;
pub mod crash;
pub mod error;
pub mod gateway;
pub mod http;
pub mod input;
pub mod link;
pub mod log;
pub mod machine;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod relay;
pub mod signal;
pub mod state;
pub mod view;
