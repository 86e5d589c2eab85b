//! Who asks: API keys compared in constant time, and the hash that a key is known by.

use axum::http::{HeaderMap, StatusCode, header};
use subtle::{Choice, ConstantTimeEq};

use super::error::ApiError;
use crate::machine::event::KeyId;

/// The keys that are let in. None at all: everyone is.
#[derive(Clone, Default)]
pub(crate) struct Keys {
    digests: Vec<[u8; 32]>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keys({})", self.digests.len())
    }
}

impl Keys {
    #[must_use]
    pub(crate) fn new(keys: &[String]) -> Self {
        Self {
            digests: keys
                .iter()
                .map(|key| *blake3::hash(key.as_bytes()).as_bytes())
                .collect(),
        }
    }

    /// The asker's share in the queue is kept under the id that this returns.
    ///
    /// # Errors
    ///
    /// 401: keys are asked for, and none of them was given.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<KeyId, ApiError> {
        let given = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.as_bytes().split_at_checked(7))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "))
            .map(|(_, key)| key.trim_ascii())
            .filter(|key| !key.is_empty());
        let Some(given) = given else {
            return if self.digests.is_empty() {
                Ok(KeyId::default())
            } else {
                Err(unauthorized(
                    "an API key is needed: `Authorization: Bearer KEY`",
                ))
            };
        };
        // Hashing first makes all lengths equal, and every key is compared, so that time tells nothing.
        let digest = *blake3::hash(given).as_bytes();
        let known = self
            .digests
            .iter()
            .fold(Choice::from(0), |known, key| known | key.ct_eq(&digest));
        if self.digests.is_empty() || bool::from(known) {
            let mut head = [0; 8];
            head.copy_from_slice(&digest[..8]);
            return Ok(KeyId(u64::from_le_bytes(head)));
        }
        Err(unauthorized("the API key is not one of this server's"))
    }
}

fn unauthorized(message: &str) -> ApiError {
    ApiError::new(
        StatusCode::UNAUTHORIZED,
        "authentication_error",
        "invalid_api_key",
        message,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn bearer(key: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static(key))])
    }

    #[test]
    fn without_keys_everyone_is_let_in_and_told_apart_by_what_they_give() {
        let keys = Keys::new(&[]);
        assert_eq!(keys.check(&HeaderMap::new()).unwrap(), KeyId(0));
        let (one, two) = (bearer("Bearer a"), bearer("bearer b"));
        assert_ne!(keys.check(&one).unwrap(), keys.check(&two).unwrap());
        assert_ne!(keys.check(&one).unwrap(), KeyId(0));
    }

    #[test]
    fn with_keys_only_their_holders_are_let_in() {
        let keys = Keys::new(&["a".into(), "long key".into()]);
        assert!(keys.check(&bearer("Bearer a")).is_ok());
        assert!(keys.check(&bearer("Bearer long key")).is_ok());
        for wrong in ["Bearer b", "Bearer ", "Basic a", "a", "Bearer aa"] {
            assert_eq!(
                keys.check(&bearer(wrong)).unwrap_err().status,
                401,
                "{wrong}"
            );
        }
        assert_eq!(keys.check(&HeaderMap::new()).unwrap_err().status, 401);
    }
}
