//! What tells two models apart without reading all of either.

use std::fs::Metadata;
use std::time::UNIX_EPOCH;

use proto::to_dispatcher::ModelIdentity;

/// Collects what identifies a model: its header, its tensor inventory, its files' sizes and times.
#[derive(Clone, Debug)]
pub struct Identity(blake3::Hasher);

impl Default for Identity {
    fn default() -> Self {
        Self::new()
    }
}

impl Identity {
    #[must_use]
    pub fn new() -> Self {
        Self(blake3::Hasher::new_derive_key(
            "dispatcher model identity 1",
        ))
    }

    /// Adds one part: header bytes, or an entry of the tensor inventory. Each is hashed with its
    /// length, so that no two lists of parts read the same.
    pub fn part(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    /// Adds a file's size and modification time. A time before 1970, or none, counts as 1970.
    pub fn file(&mut self, metadata: &Metadata) {
        let modified = metadata.modified().ok();
        let since = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        self.part(&metadata.len().to_le_bytes());
        self.part(&since.unwrap_or_default().as_nanos().to_le_bytes());
    }

    #[must_use]
    pub fn finish(&self, name: String) -> ModelIdentity {
        ModelIdentity {
            name,
            hash: *self.0.finalize().as_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(parts: &[&[u8]]) -> [u8; 32] {
        let mut identity = Identity::new();
        for part in parts {
            identity.part(part);
        }
        identity.finish("m".into()).hash
    }

    #[test]
    fn where_one_part_ends_and_the_next_begins_counts() {
        assert_eq!(hash(&[b"ab", b"c"]), hash(&[b"ab", b"c"]));
        assert_ne!(hash(&[b"ab", b"c"]), hash(&[b"a", b"bc"]));
    }

    #[test]
    fn a_file_of_another_size_is_another_model() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        let of = |contents: &[u8]| {
            std::fs::write(&path, contents).unwrap();
            let mut identity = Identity::new();
            identity.file(&std::fs::metadata(&path).unwrap());
            identity.finish("m".into()).hash
        };
        assert_ne!(of(b"one"), of(b"more"));
    }
}
