//! The protocol's version and the rule for accepting a peer's.

/// The version this build speaks. Any change to a message's bytes raises it.
pub const PROTOCOL_VERSION: u32 = 1;

/// Whether a peer that speaks `theirs` can be understood: only the same version can.
///
/// The build may differ (an upgrade on disk while the dispatcher runs); the version may not.
#[must_use]
pub fn accepts(theirs: u32) -> bool {
    theirs == PROTOCOL_VERSION
}
