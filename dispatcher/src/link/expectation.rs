//! Which workers may connect: the register of those that were spawned and have not yet said hello.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::to_dispatcher::Hello;
use proto::{Generation, InstanceId, PROTOCOL_VERSION, ProtoError};
use subtle::ConstantTimeEq;
use thiserror::Error;

/// A one-time secret that only the spawned process was told. It has no useful `Debug`.
#[derive(Clone)]
pub struct Token([u8; 32]);

impl Token {
    /// A new one from the system's randomness.
    ///
    /// # Errors
    ///
    /// Where the system has none to give.
    pub fn generate() -> std::io::Result<Self> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(|error| std::io::Error::other(error.to_string()))?;
        Ok(Self(bytes))
    }

    /// The bytes, to be written to the child's standard input and nowhere else.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl From<[u8; 32]> for Token {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Who is at the other end of a socket, as the system says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) pid: u32,
    pub(super) uid: u32,
}

/// Why a connection did not become a link. The text is what the peer is told.
#[derive(Debug, Error)]
pub enum Refusal {
    #[error("no hello came within {0:?}")]
    Silent(Duration),
    #[error("the connection closed before its hello")]
    Closed,
    #[error("the first message was not a hello")]
    NotHello,
    #[error("the hello could not be read: {0}")]
    Malformed(#[from] ProtoError),
    #[error(
        "protocol version {theirs} is not this dispatcher's {PROTOCOL_VERSION}: worker and dispatcher were installed from different releases"
    )]
    Version { theirs: u32 },
    #[error("no worker of instance {instance}, generation {generation} is expected")]
    Unexpected {
        instance: InstanceId,
        generation: Generation,
    },
    #[error("the peer runs as user {found}, not as {expected}")]
    User { expected: u32, found: u32 },
    #[error("the peer is process {found}, not process {expected} that was spawned")]
    Process { expected: u32, found: u32 },
    #[error("the token is not the one that was handed to the worker")]
    Token,
    #[error("the socket failed: {0}")]
    Io(#[from] std::io::Error),
}

#[derive(Debug)]
struct Expected {
    pid: u32,
    token: Token,
}

type Place = (InstanceId, Generation);

/// The register. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Expectations(Arc<Mutex<HashMap<Place, Expected>>>);

impl Expectations {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets process `pid` connect, once, with `token`. To be called after the process exists and
    /// before the token is written to it: it cannot say hello in between.
    pub fn expect(&self, instance: InstanceId, generation: Generation, pid: u32, token: Token) {
        self.lock()
            .insert((instance, generation), Expected { pid, token });
    }

    /// Takes the permission back. `true`: this generation never connected and never will, so no
    /// link will send its `AttemptEnded`. `false`: it did connect, and the link sends it.
    pub fn forget(&self, instance: InstanceId, generation: Generation) -> bool {
        self.lock().remove(&(instance, generation)).is_some()
    }

    /// Checks a hello against the register and uses the permission up where all is right. A
    /// refused peer uses up nothing: a stranger must not be able to lock the worker out.
    pub(super) fn claim(&self, hello: &Hello, peer: Peer) -> Result<(), Refusal> {
        if !proto::version::accepts(hello.protocol) {
            return Err(Refusal::Version {
                theirs: hello.protocol,
            });
        }
        let own = nix::unistd::geteuid().as_raw();
        if peer.uid != own {
            return Err(Refusal::User {
                expected: own,
                found: peer.uid,
            });
        }
        let place = (hello.instance, hello.generation);
        let mut register = self.lock();
        let Some(expected) = register.get(&place) else {
            return Err(Refusal::Unexpected {
                instance: hello.instance,
                generation: hello.generation,
            });
        };
        for found in [peer.pid, hello.pid] {
            if found != expected.pid {
                return Err(Refusal::Process {
                    expected: expected.pid,
                    found,
                });
            }
        }
        if !bool::from(expected.token.0.ct_eq(&hello.token)) {
            return Err(Refusal::Token);
        }
        register.remove(&place);
        Ok(())
    }

    // A panic while the lock was held leaves plain data behind.
    fn lock(&self) -> MutexGuard<'_, HashMap<Place, Expected>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INSTANCE: InstanceId = InstanceId(2);
    const GENERATION: Generation = Generation(9);

    fn hello() -> Hello {
        Hello {
            protocol: PROTOCOL_VERSION,
            build: "test".into(),
            instance: INSTANCE,
            generation: GENERATION,
            pid: 77,
            token: [5; 32],
        }
    }

    fn peer() -> Peer {
        Peer {
            pid: 77,
            uid: nix::unistd::geteuid().as_raw(),
        }
    }

    fn expecting() -> Expectations {
        let expectations = Expectations::new();
        expectations.expect(INSTANCE, GENERATION, 77, Token::from([5; 32]));
        expectations
    }

    #[test]
    fn the_expected_worker_is_let_in_once() {
        let expectations = expecting();
        expectations.claim(&hello(), peer()).unwrap();
        let again = expectations.claim(&hello(), peer()).unwrap_err();
        assert!(matches!(again, Refusal::Unexpected { .. }), "{again}");
        assert!(!expectations.forget(INSTANCE, GENERATION), "it connected");
    }

    #[test]
    fn each_thing_that_is_wrong_is_refused_with_its_own_words_and_uses_up_nothing() {
        let expectations = expecting();
        let mut version = hello();
        version.protocol += 1;
        let mut generation = hello();
        generation.generation = GENERATION.next();
        let mut instance = hello();
        instance.instance = InstanceId(3);
        let mut pid = hello();
        pid.pid = 78;
        let mut token = hello();
        token.token[31] ^= 1;
        let stranger = Peer { pid: 78, ..peer() };
        let other_user = Peer {
            uid: peer().uid + 1,
            ..peer()
        };
        for (hello, peer, words) in [
            (version, peer(), "is not this dispatcher's"),
            (generation, peer(), "generation 10 is expected"),
            (instance, peer(), "no worker of instance 3"),
            (pid, peer(), "the peer is process 78, not process 77"),
            (token, peer(), "the token is not"),
            (hello(), stranger, "the peer is process 78, not process 77"),
            (hello(), other_user, "the peer runs as user"),
        ] {
            let refusal = expectations.claim(&hello, peer).unwrap_err().to_string();
            assert!(refusal.contains(words), "{refusal}");
        }
        expectations.claim(&hello(), peer()).unwrap();
    }

    #[test]
    fn a_forgotten_worker_is_no_longer_expected() {
        let expectations = expecting();
        assert!(expectations.forget(INSTANCE, GENERATION));
        assert!(!expectations.forget(INSTANCE, GENERATION));
        let refusal = expectations.claim(&hello(), peer()).unwrap_err();
        assert!(matches!(refusal, Refusal::Unexpected { .. }), "{refusal}");
    }

    #[test]
    fn a_token_shows_nothing_of_itself() {
        let token = Token::generate().unwrap();
        assert_ne!(token.as_bytes(), Token::generate().unwrap().as_bytes());
        assert_eq!(format!("{token:?}"), "Token(..)");
    }
}
