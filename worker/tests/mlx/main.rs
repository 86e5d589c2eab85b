//! The MLX engine held to mlx-lm, to itself in company, and to its manners with bad folders.

#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]
#![expect(
    clippy::print_stdout,
    reason = "near ties and seeds are to be seen in the tests' output"
)]

mod bad_folders;
mod company;
#[path = "../near_tie/mod.rs"]
mod near_tie;
mod parity;
mod plain;
mod seats;
mod served;
#[path = "../system/mod.rs"]
mod system;
