//! Writes definitions: all of them checked first, each whole or not at all.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use super::ServiceError;
use super::stamp::{Origin, Syntax, origin, seal};

/// One file that is to be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Definition {
    pub(super) path: PathBuf,
    /// Without its stamp.
    pub(super) text: String,
    pub(super) syntax: Syntax,
}

impl Definition {
    #[must_use]
    pub(super) fn sealed(&self) -> String {
        seal(&self.text, self.syntax)
    }

    /// What is there now; `None`: nothing.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub(super) fn found(&self) -> Result<Option<(String, Origin)>, ServiceError> {
        match fs::read_to_string(&self.path) {
            Ok(text) => {
                let origin = origin(&text);
                Ok(Some((text, origin)))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(ServiceError::file(&self.path, cause)),
        }
    }
}

/// Writes `all`; returns those whose content is new. With `force` also over what another wrote.
///
/// # Errors
/// Where one that is there is newer, edited or another's, before any is written; or where a folder
/// cannot be written, and then the file is the one that was there.
pub(super) fn write(all: &[Definition], force: bool) -> Result<Vec<PathBuf>, ServiceError> {
    let mut new = Vec::new();
    for one in all {
        let sealed = one.sealed();
        match one.found()? {
            Some((text, _)) if text == sealed => continue,
            Some((_, Origin::Ours)) | None => {}
            Some(_) if force => {}
            Some((_, origin)) => {
                return Err(ServiceError::Occupied {
                    path: one.path.clone(),
                    origin,
                });
            }
        }
        new.push((one.path.clone(), sealed));
    }
    for (path, text) in &new {
        write_whole(path, text.as_bytes(), 0o644)
            .map_err(|cause| ServiceError::file(path, cause))?;
    }
    Ok(new.into_iter().map(|(path, _)| path).collect())
}

/// Removes those that are there; returns them. With `force` also what another wrote.
///
/// # Errors
/// As [`write`].
pub(super) fn remove(all: &[Definition], force: bool) -> Result<Vec<PathBuf>, ServiceError> {
    let mut there = Vec::new();
    for one in all {
        match one.found()? {
            None => {}
            Some((_, Origin::Foreign)) if !force => {
                return Err(ServiceError::Occupied {
                    path: one.path.clone(),
                    origin: Origin::Foreign,
                });
            }
            Some(_) => there.push(one.path.clone()),
        }
    }
    for path in &there {
        fs::remove_file(path).map_err(|cause| ServiceError::file(path, cause))?;
    }
    Ok(there)
}

/// Writes a file beside its place and moves it there: a full disk leaves what was there before.
///
/// # Errors
/// Where the file system refuses.
pub(crate) fn write_whole(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = folder.join(format!(".{name}.{}", std::process::id()));
    let written = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(&temporary)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // What is half-written is nobody's; where even this fails, the cause is the same.
        let _ = fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definitions(folder: &Path) -> Vec<Definition> {
        ["a.service", "b.socket"]
            .iter()
            .map(|name| Definition {
                path: folder.join("Zoë's units").join(name),
                text: format!("[Unit]\nDescription={name}\n"),
                syntax: Syntax::Unit,
            })
            .collect()
    }

    #[test]
    fn what_is_new_is_written_and_what_is_the_same_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let mut all = definitions(folder.path());
        assert_eq!(write(&all, false).unwrap().len(), 2);
        assert_eq!(write(&all, false).unwrap(), Vec::<PathBuf>::new());
        all[1].text.push_str("After=x\n");
        assert_eq!(write(&all, false).unwrap(), [all[1].path.clone()]);
        let left: Vec<_> = fs::read_dir(all[0].path.parent().unwrap())
            .unwrap()
            .collect();
        assert_eq!(left.len(), 2, "a temporary file is left: {left:?}");
        assert_eq!(remove(&all, false).unwrap().len(), 2);
        assert_eq!(remove(&all, false).unwrap().len(), 0);
    }

    #[test]
    fn what_is_edited_or_newer_or_foreign_stops_all_before_anything_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let all = definitions(folder.path());
        write(&all, false).unwrap();
        let sealed = all[1].sealed();
        for (there, word) in [
            (format!("{sealed}# mine\n"), "edited"),
            (sealed.replace(env!("CARGO_PKG_VERSION"), "9.9.9"), "9.9.9"),
            ("[Unit]\n".to_owned(), "not written by"),
        ] {
            fs::write(&all[1].path, &there).unwrap();
            fs::remove_file(&all[0].path).unwrap();
            let refusal = write(&all, false).unwrap_err().to_string();
            assert!(
                refusal.contains(word) && refusal.contains("--force"),
                "{refusal}"
            );
            assert!(!all[0].path.exists());
            assert_eq!(write(&all, true).unwrap().len(), 2);
            assert_eq!(fs::read_to_string(&all[1].path).unwrap(), sealed);
        }
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named_and_nothing_is_left_half_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut all = definitions(folder.path());
        // A folder stands where the file should be: the rename fails, whoever runs this.
        fs::create_dir_all(all[0].path.join("x")).unwrap();
        let refusal = write_whole(&all[0].path, b"x", 0o644).unwrap_err();
        assert_ne!(refusal.kind(), io::ErrorKind::NotFound);
        let parent = all[0].path.parent().unwrap();
        assert_eq!(fs::read_dir(parent).unwrap().count(), 1);
        all[0].path = "/dev/full/dispatcher.service".into();
        let refusal = write(&all[..1], false).unwrap_err().to_string();
        assert!(
            refusal.contains("/dev/full/dispatcher.service"),
            "{refusal}"
        );
    }
}
