//! What a dispatcher and its workers may say to each other, and how it becomes bytes.
//!
//! One worker speaks with one dispatcher over one stream socket. The order:
//!
//! 1. The worker connects and speaks first: [`ToDispatcher::Hello`] (protocol version, build, place,
//!    generation, the one-time token it was handed on an inherited pipe).
//! 2. The dispatcher checks version, place, generation, token and peer, and answers
//!    [`ToWorker::Hello`], or [`ToWorker::Refused`] with words, after which it closes.
//! 3. The worker loads ([`ToDispatcher::Loading`], repeated), warms up ([`ToDispatcher::Warming`],
//!    repeated) and says [`ToDispatcher::Ready`] once.
//! 4. From then on the dispatcher sends `Tokenise`, `Generate` and `Cancel` as it likes. A
//!    `Tokenise` is answered by one `Tokenised`. A `Generate` is answered by at most one `Started`,
//!    then rows in `Tokens` frames, the last of which carries the row's end; or by one `Failed`.
//!    A `Cancel` is answered by a row with `End::Cancelled`, or by nothing where the attempt had
//!    already ended. One `Tokens` frame carries all rows of one engine step.
//! 5. `Progress` comes at least once per [`PROGRESS_INTERVAL_MS`] whatever else happens: its step
//!    counter is moved by the engine thread only, so a silent engine shows.
//! 6. After `Drain` the worker takes no new `Generate`; it says `Drained` when its slots are empty
//!    and exits. End of file on either side ends the attempt of every request on the link.
//!
//! Clocks never cross processes: messages carry durations ([`span`]), never instants.

pub mod codec;
pub mod error;
pub mod frame;
pub mod generate;
pub mod id;
pub mod span;
pub mod to_dispatcher;
pub mod to_worker;
pub mod version;

pub use codec::{decode, encode, encode_into};
pub use error::ProtoError;
pub use frame::{Decoder, FRAME_BYTES_MAX};
pub use generate::{FinishReason, Generate, Sampling, Usage};
pub use id::{Attempt, Generation, InstanceId, RequestId, TokenId};
pub use to_dispatcher::ToDispatcher;
pub use to_worker::ToWorker;
pub use version::PROTOCOL_VERSION;

/// A worker sends `Progress` at least this often, busy or idle.
pub const PROGRESS_INTERVAL_MS: u64 = 200;
