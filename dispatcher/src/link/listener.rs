//! Accepts workers on the run directory's socket and starts a link for each that is expected.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use interprocess::local_socket::tokio::prelude::*;
use interprocess::local_socket::{GenericFilePath, ListenerOptions};
use interprocess::os::unix::uds_local_socket::tokio as local_socket;
use thiserror::Error;
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc};

use super::directory::RunDirectory;
use super::session::Session;
use super::{COMMANDS_MAX, Context, Handle, handshake};
use crate::input::Input;

/// Connections that may be in their handshake at once; more are closed without a word.
const HANDSHAKES_MAX: usize = 64;

/// A pause after an accept that failed (out of descriptors, mostly), so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, Error)]
pub enum ListenError {
    #[error("listen at {0}: another program answers there")]
    InUse(PathBuf),
    #[error("listen at {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

/// The bound socket. Dropping it removes the socket's file.
#[derive(Debug)]
pub struct Listener {
    inner: local_socket::Listener,
    path: PathBuf,
}

impl Listener {
    /// Binds the directory's socket with mode 0600, removing the file of a dead dispatcher. Must be
    /// called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// Where someone listens there, and where the system refuses.
    pub fn bind(directory: &RunDirectory) -> Result<Self, ListenError> {
        let path = directory.socket();
        let failed = |source| ListenError::Io {
            path: path.clone(),
            source,
        };
        remove_stale(&path)?;
        let name = path
            .as_path()
            .to_fs_name::<GenericFilePath>()
            .map_err(failed)?;
        let inner = ListenerOptions::new()
            .name(name)
            .create_tokio_as::<local_socket::Listener>()
            .map_err(failed)?;
        // After the bind, because macOS can set no mode with it; the directory was closed before.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        Ok(Self { inner, path })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts workers until it is dropped. Links that have begun live on.
    pub async fn serve(self, context: Context) {
        let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
        loop {
            let stream = match self.inner.accept().await {
                Ok(stream) => UnixStream::from(stream),
                Err(error) => {
                    tracing::warn!(%error, "accepting a worker failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(permit) = Arc::clone(&handshakes).try_acquire_owned() else {
                tracing::warn!("too many connections are in their handshake; one was closed");
                continue;
            };
            let context = context.clone();
            tokio::spawn(async move {
                let connected = connect(stream, context).await;
                drop(permit);
                if let Some(session) = connected {
                    session.run().await;
                }
            });
        }
    }
}

async fn connect(mut stream: UnixStream, context: Context) -> Option<Session> {
    let (hello, decoder) = match handshake::run(&mut stream, &context).await {
        Ok(met) => met,
        Err(refusal) => {
            tracing::warn!(%refusal, "a connection to the link socket was refused");
            return None;
        }
    };
    let (sender, commands) = mpsc::channel(COMMANDS_MAX);
    let connected = Input::Connected {
        instance: hello.instance,
        generation: hello.generation,
        handle: Handle::new(sender),
        build: hello.build,
    };
    // Before the session, so that nothing of this generation reaches the driver earlier.
    context.inputs.send(connected).await.ok()?;
    let place = (hello.instance, hello.generation);
    Some(Session::new(stream, decoder, place, commands, context))
}

/// The lock of the run directory says that no dispatcher lives; this asks the socket itself, which
/// may be another program's.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let failed = |source| ListenError::Io {
        path: path.to_owned(),
        source,
    };
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(ListenError::InUse(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed)
        }
        Err(error) => Err(failed(error)),
    }
}
