//! `dispatcher bench …`: hands over to `dispatcher-bench`, which lies beside this program.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use super::VerbError;

/// Becomes `dispatcher-bench` with `words`; returns only where it cannot.
///
/// # Errors
/// Where that program cannot be run.
pub fn run(executable: &Path, words: &[OsString]) -> Result<Infallible, VerbError> {
    let path = executable.with_file_name("dispatcher-bench");
    let cause = Command::new(&path).args(words).exec();
    Err(VerbError::Program { path, cause })
}
