//! How the process ends: its exit codes, and the way out that waits for nobody.

/// Drained, or told to leave before there was any work.
pub const ORDERLY: i32 = 0;
/// A load failed for a reason that may pass (memory, a device): try again later.
pub const LOAD_FAILED: i32 = 1;
/// The dispatcher is gone: end of file on the socket or on standard input.
pub const ORPHANED: i32 = 69;
/// The engine said that it is poisoned. A panic ends in SIGABRT instead.
pub const POISONED: i32 = 70;
/// The dispatcher cannot be reached or does not read.
pub const UNREACHABLE: i32 = 74;
/// The dispatcher broke the protocol.
pub const PROTOCOL: i32 = 76;
/// Configuration: the same again would fail the same way, so do not retry. Also where the
/// dispatcher refused the handshake.
pub const CONFIGURATION: i32 = 78;

/// Ends the process at once, whatever its other threads are in the middle of.
///
/// The usual exit runs C++ destructors under an engine that is still computing, which can hang or
/// crash for minutes of a long step.
pub fn now(code: i32) -> ! {
    #[expect(unsafe_code, reason = "no safe crate has _exit")]
    // SAFETY: `_exit` takes any integer, touches no memory of ours and does not return.
    unsafe {
        nix::libc::_exit(code)
    }
}

/// Says why on standard error, then ends the process at once.
pub fn with_words(code: i32, words: &str) -> ! {
    say(words);
    now(code)
}

/// One line for the dispatcher's log and its post-mortem.
#[expect(
    clippy::print_stderr,
    reason = "a worker's standard error is its log: the dispatcher reads it"
)]
pub fn say(words: &str) {
    eprintln!("{words}");
}

/// From now on a panic on any thread ends the process by SIGABRT, after its message.
///
/// A panic that ended the engine's thread alone would leave a process that holds requests and
/// never steps again.
pub fn abort_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        std::process::abort();
    }));
}
