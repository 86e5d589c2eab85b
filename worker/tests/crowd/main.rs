//! The promises under load, each held by the real programs with the scripted engine.
//!
//! Bounds that a busy machine would break are five times the promise here; `scripts/promises` runs
//! the same tests with the promise itself. Every figure is printed.

#![expect(
    clippy::unwrap_used,
    reason = "what fails in a crowd's helper fails the test"
)]

#[path = "../system/mod.rs"]
mod system;

mod disconnects;
mod fairness;
mod fan_out;
mod operations;
mod overload;
mod priority;
mod reloads;
mod slow_readers;
