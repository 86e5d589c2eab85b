//! The HTTP front over real sockets, with the test in the driver's place.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests are not seen as tests by the lint"
)]

mod bad_input;
mod disconnects;
mod operations;
mod refusals;
mod streams;
mod world;
