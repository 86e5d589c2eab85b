//! Message to bytes and back: the only file that names the wire crate.
//!
//! Types elsewhere derive [`Encode`] and [`Decode`], which are the wire crate's derives under names of ours.

pub(crate) use wincode::{SchemaRead as Decode, SchemaWrite as Encode};
