//! The run directory: one dispatcher's sockets and pid files, closed to everyone else.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

/// The longest socket path in bytes: macOS's `sun_path` has 104 with its final zero byte. The
/// bound is the same everywhere, so that a configuration does not work on one system alone.
pub const SOCKET_PATH_BYTES_MAX: usize = 103;

const SOCKET_NAME: &str = "link.sock";
const LOCK_NAME: &str = "dispatcher.lock";

/// A dispatcher that was killed holds its lock until the kernel has ended its last thread, which
/// its successor may come before. A living one is refused after this wait.
const LOCK_WAIT: Duration = Duration::from_secs(2);
const LOCK_POLL: Duration = Duration::from_millis(10);

/// Why a directory cannot be a dispatcher's run directory. All of it is the operator's to change.
#[derive(Debug, Error)]
pub enum DirectoryError {
    #[error(
        "use {path} as socket: {length} bytes are over the system's bound of {SOCKET_PATH_BYTES_MAX}; choose a shorter run directory"
    )]
    PathTooLong { path: PathBuf, length: usize },
    #[error("use {0} as run directory: it is not a directory")]
    NotADirectory(PathBuf),
    #[error("use {path} as run directory: it belongs to user {owner}")]
    ForeignOwner { path: PathBuf, owner: u32 },
    #[error("use {0} as run directory: another dispatcher runs in it")]
    InUse(PathBuf),
    #[error("open {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

/// A directory that is ours alone for as long as this lives.
#[derive(Debug)]
pub struct RunDirectory {
    path: PathBuf,
    /// Locked. The lock ends with this process, however that ends.
    _lock: File,
}

impl RunDirectory {
    /// Creates the directory with mode 0700 (or narrows an existing one of ours to it) and takes
    /// its lock, for which it waits up to 2 s.
    ///
    /// # Errors
    ///
    /// Where the socket's path would be too long, where the directory is another user's or another
    /// dispatcher's, and where the file system refuses.
    pub fn open(path: &Path) -> Result<Self, DirectoryError> {
        let io = |source| DirectoryError::Io {
            path: path.to_owned(),
            source,
        };
        let socket = path.join(SOCKET_NAME);
        let length = socket.as_os_str().len();
        if length > SOCKET_PATH_BYTES_MAX {
            return Err(DirectoryError::PathTooLong {
                path: socket,
                length,
            });
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(io)?;
        }
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(io(error)),
            _ => {}
        }
        // Without following a link: its target may be anyone's.
        let found = fs::symlink_metadata(path).map_err(io)?;
        if !found.is_dir() {
            return Err(DirectoryError::NotADirectory(path.to_owned()));
        }
        if found.uid() != nix::unistd::geteuid().as_raw() {
            return Err(DirectoryError::ForeignOwner {
                path: path.to_owned(),
                owner: found.uid(),
            });
        }
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(io)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path.join(LOCK_NAME))
            .map_err(io)?;
        match lock_within(&lock, LOCK_WAIT) {
            Ok(()) => Ok(Self {
                path: path.to_owned(),
                _lock: lock,
            }),
            Err(TryLockError::WouldBlock) => Err(DirectoryError::InUse(path.to_owned())),
            Err(TryLockError::Error(error)) => Err(io(error)),
        }
    }

    /// Whether a dispatcher holds the directory `path` now.
    #[must_use]
    pub fn is_in_use(path: &Path) -> bool {
        File::open(path.join(LOCK_NAME))
            .is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where workers connect.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.path.join(SOCKET_NAME)
    }
}

fn lock_within(lock: &File, patience: Duration) -> Result<(), TryLockError> {
    let deadline = Instant::now() + patience;
    loop {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(LOCK_POLL),
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_let_go_within_the_wait_is_taken() {
        let root = tempfile::tempdir().unwrap();
        let first = RunDirectory::open(root.path()).unwrap();
        let path = root.path().to_owned();
        let second = thread::spawn(move || RunDirectory::open(&path));
        drop(first);
        assert!(second.join().unwrap().is_ok());
    }

    #[test]
    fn the_directory_is_closed_to_others_even_where_it_was_open() {
        let root = tempfile::tempdir().unwrap();
        for name in ["new/deep", "old"] {
            let path = root.path().join(name);
            if name == "old" {
                fs::create_dir(&path).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
            }
            let directory = RunDirectory::open(&path).unwrap();
            let mode = fs::metadata(directory.path()).unwrap().mode();
            assert_eq!(mode & 0o777, 0o700, "{name}");
        }
    }

    #[test]
    fn a_socket_path_over_macos_bound_is_refused_before_anything_is_created() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("x".repeat(SOCKET_PATH_BYTES_MAX));
        let error = RunDirectory::open(&path).unwrap_err();
        assert!(matches!(error, DirectoryError::PathTooLong { .. }));
        assert!(!path.exists());
    }

    #[test]
    fn a_second_dispatcher_is_refused_and_one_after_the_first_is_not() {
        let root = tempfile::tempdir().unwrap();
        let first = RunDirectory::open(root.path()).unwrap();
        let error = RunDirectory::open(root.path()).unwrap_err();
        assert!(matches!(error, DirectoryError::InUse(_)), "{error}");
        drop(first);
        RunDirectory::open(root.path()).unwrap();
    }

    #[test]
    fn a_link_to_a_directory_is_not_a_run_directory() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("target")).unwrap();
        let link = root.path().join("link");
        std::os::unix::fs::symlink(root.path().join("target"), &link).unwrap();
        let error = RunDirectory::open(&link).unwrap_err();
        assert!(matches!(error, DirectoryError::NotADirectory(_)), "{error}");
    }
}
