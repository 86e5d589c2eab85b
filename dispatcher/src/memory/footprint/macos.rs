//! The physical footprint of a process on macOS, for which no safe crate asks without a build-time dependency on Apple's headers.

use nix::libc;

/// In bytes; `None` where the process is gone or is another user's.
#[expect(
    unsafe_code,
    reason = "proc_pid_rusage has no safe wrapper that builds without Apple's headers"
)]
pub(super) fn physical_footprint(pid: u32) -> Option<u64> {
    let pid = libc::c_int::try_from(pid).ok()?;
    let mut usage = std::mem::MaybeUninit::<libc::rusage_info_v4>::zeroed();
    // SAFETY: the flavour names the structure that the buffer has room for, the kernel writes no more
    // than that, and the buffer outlives the call.
    let result =
        unsafe { libc::proc_pid_rusage(pid, libc::RUSAGE_INFO_V4, usage.as_mut_ptr().cast()) };
    if result != 0 {
        return None;
    }
    // SAFETY: the structure holds integers alone, so that zeroed memory is one too, and the call has
    // filled it.
    Some(unsafe { usage.assume_init() }.ri_phys_footprint)
}
