//! The sockets that launchd keeps for this job under the name `Listeners`.

use std::ffi::{CStr, c_char, c_int};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use nix::libc;

/// The key in the property list's `Sockets`.
const NAME: &CStr = c"Listeners";

#[expect(unsafe_code, reason = "launch.h has no safe wrapper")]
// SAFETY: the signature is launch.h's.
unsafe extern "C" {
    fn launch_activate_socket(
        name: *const c_char,
        descriptors: *mut *mut c_int,
        count: *mut libc::size_t,
    ) -> c_int;
}

/// Takes them; none where launchd did not start this process or its job has no such sockets.
///
/// # Errors
/// Where launchd refuses, for instance because they were taken before.
#[expect(unsafe_code, reason = "launch.h has no safe wrapper")]
pub(super) fn activate() -> io::Result<Vec<OwnedFd>> {
    let mut descriptors = std::ptr::null_mut();
    let mut count = 0;
    // SAFETY: the name ends with a zero byte, and both results are written to variables that outlive
    // the call.
    let error =
        unsafe { launch_activate_socket(NAME.as_ptr(), &raw mut descriptors, &raw mut count) };
    match error {
        0 => {}
        libc::ESRCH | libc::ENOENT => return Ok(Vec::new()),
        other => return Err(io::Error::from_raw_os_error(other)),
    }
    if descriptors.is_null() {
        return Ok(Vec::new());
    }
    // SAFETY: on success launchd gives an array of `count` descriptors, allocated for us to free; each
    // is open and nobody else's, and is taken once.
    let taken = unsafe {
        let taken = std::slice::from_raw_parts(descriptors, count)
            .iter()
            .map(|descriptor| OwnedFd::from_raw_fd(*descriptor))
            .collect();
        libc::free(descriptors.cast());
        taken
    };
    Ok(taken)
}
