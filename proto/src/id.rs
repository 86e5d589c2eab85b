//! Names of things that both processes mean: requests, places, incarnations, attempts, tokens.

use serde::{Deserialize, Serialize};

use crate::codec::{Decode, Encode};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
            Serialize, Deserialize, Encode, Decode,
        )]
        pub struct $name(pub $inner);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// One request, unique for the life of one dispatcher.
    RequestId(u64)
}
id! {
    /// A numbered place in the pool, 0..K-1. The process that fills it changes; the place stays.
    InstanceId(u32)
}
id! {
    /// Which incarnation of an instance. Each spawn takes the next one; what carries an older one is stale.
    Generation(u64)
}
id! {
    /// Which assignment of a request to a worker. The first is 1; each failover takes the next one.
    Attempt(u32)
}

/// An index into the model's vocabulary.
pub type TokenId = u32;

impl Attempt {
    /// The attempt after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl Generation {
    /// The generation after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}
