//! The llama.cpp engine on a real model, held against a plain loop written directly on the library.
//!
//! Needs `SmolLM2-135M-Instruct.Q4_1.gguf` (98 MB): `DISPATCHER_TEST_MODEL` names it, else it is
//! looked for in the workspace's `models/`. Threads are set explicitly; run these one at a time.
#![cfg(feature = "llama")]
#![expect(
    clippy::print_stderr,
    reason = "near ties are counted for whoever reads a test's output"
)]

#[path = "../near_tie/mod.rs"]
mod near_tie;
mod plain;
mod stream;

mod engine;
mod load;
mod speed;
