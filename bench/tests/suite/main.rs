//! The bench against servers that are known to the last millisecond, or known to be bad.
#![expect(clippy::unwrap_used, reason = "a test may end at the first surprise")]

mod chaos;
mod flood;
mod measuring;
mod study;
mod support;
mod verbs;
