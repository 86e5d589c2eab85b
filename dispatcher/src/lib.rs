//! Takes requests, keeps K workers alive, and matches the two.

mod budget;
pub mod cli;
pub mod clock;
pub mod config;
pub mod crash;
mod driver;
mod effect;
pub mod error;
mod fleet;
pub mod gateway;
pub mod http;
pub mod input;
mod ledger;
pub mod link;
pub mod log;
pub mod machine;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod process;
mod record;
pub mod relay;
pub mod run;
pub mod signal;
pub mod state;
pub mod view;
