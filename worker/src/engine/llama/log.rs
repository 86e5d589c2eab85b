//! Takes llama.cpp's log: warnings go to stderr, the last ones are kept as words for a failed load.

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_void};
use std::io::Write;
use std::sync::{Mutex, Once, PoisonError};

use llama_cpp_sys_2::{
    GGML_LOG_LEVEL_CONT, GGML_LOG_LEVEL_ERROR, GGML_LOG_LEVEL_WARN, ggml_log_level,
};

/// Lines kept.
const KEPT_MAX: usize = 16;
/// Longest line kept, bytes; what comes after it is dropped.
const LINE_BYTES_MAX: usize = 1000;

/// The line being put together, and those that are complete. A line may come in pieces.
struct Tail {
    level: ggml_log_level,
    line: String,
    kept: VecDeque<String>,
    /// What the last load said of its layers: on GPUs, and all.
    offloaded: Option<(u32, u32)>,
}

static TAIL: Mutex<Tail> = Mutex::new(Tail {
    level: 0,
    line: String::new(),
    kept: VecDeque::new(),
    offloaded: None,
});

/// From now on llama.cpp and ggml log here; again is harmless.
pub(super) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        #[expect(
            unsafe_code,
            reason = "the safe crate either drops the log or panics on a line without a level"
        )]
        // SAFETY: `receive` has the signature that llama.h names, lives as long as the program, may
        // be called from any thread, and uses no user data. The setting is global and made once.
        unsafe {
            llama_cpp_sys_2::llama_log_set(Some(receive), std::ptr::null_mut());
        }
    });
}

/// The warnings and errors since the last call, oldest first.
pub(super) fn take() -> Vec<String> {
    TAIL.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .kept
        .drain(..)
        .collect()
}

/// The layers that the last load put on GPUs, and how many the model has, in llama.cpp's words: there
/// is no call that tells.
pub(super) fn offloaded() -> Option<(u32, u32)> {
    TAIL.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .offloaded
        .take()
}

/// `load_tensors: offloaded 29/29 layers to GPU`
fn layers(line: &str) -> Option<(u32, u32)> {
    let (_, rest) = line.split_once(": offloaded ")?;
    let (counts, _) = rest.split_once(" layers to GPU")?;
    let (there, all) = counts.split_once('/')?;
    Some((there.parse().ok()?, all.parse().ok()?))
}

extern "C" fn receive(level: ggml_log_level, text: *const c_char, _: *mut c_void) {
    if text.is_null() {
        return;
    }
    #[expect(unsafe_code, reason = "a C string can be read in no other way")]
    // SAFETY: not null; ggml passes a NUL-terminated buffer that lives until this returns.
    let text = unsafe { CStr::from_ptr(text) };
    let mut tail = TAIL.lock().unwrap_or_else(PoisonError::into_inner);
    tail.push(level, &text.to_string_lossy());
}

impl Tail {
    fn push(&mut self, level: ggml_log_level, text: &str) {
        if level != GGML_LOG_LEVEL_CONT {
            self.level = level;
        }
        if let Some(layers) = layers(text) {
            self.offloaded = Some(layers);
        }
        if self.level != GGML_LOG_LEVEL_WARN && self.level != GGML_LOG_LEVEL_ERROR {
            return;
        }
        for piece in text.split_inclusive('\n') {
            let room = LINE_BYTES_MAX.saturating_sub(self.line.len());
            let fits = piece.floor_char_boundary(room);
            self.line.push_str(&piece[..fits]);
            if piece.ends_with('\n') {
                self.finish();
            }
        }
    }

    fn finish(&mut self) {
        let line = std::mem::take(&mut self.line);
        let line = line.trim();
        if line.is_empty() {
            return;
        }
        // A closed stderr is no reason to stop serving.
        let _ = writeln!(std::io::stderr(), "llama.cpp: {line}");
        if self.kept.len() == KEPT_MAX {
            self.kept.pop_front();
        }
        self.kept.push_back(line.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::{GGML_LOG_LEVEL_CONT, GGML_LOG_LEVEL_ERROR, KEPT_MAX, LINE_BYTES_MAX, Tail};
    use std::collections::VecDeque;

    fn tail() -> Tail {
        Tail {
            level: 0,
            line: String::new(),
            kept: VecDeque::new(),
            offloaded: None,
        }
    }

    #[test]
    fn the_layers_on_the_gpu_are_read_from_the_line_that_tells_them() {
        let mut tail = tail();
        tail.push(2, "load_tensors: offloading output layer to GPU\n");
        assert_eq!(tail.offloaded, None);
        tail.push(2, "load_tensors: offloaded 29/29 layers to GPU\n");
        assert_eq!(tail.offloaded, Some((29, 29)));
        tail.push(2, "load_tensors: offloaded many/29 layers to GPU\n");
        assert_eq!(tail.offloaded, Some((29, 29)));
    }

    #[test]
    fn a_line_in_pieces_is_kept_whole_and_information_not_at_all() {
        let mut tail = tail();
        tail.push(GGML_LOG_LEVEL_CONT, "before any line\n");
        tail.push(2, "loading\n");
        tail.push(GGML_LOG_LEVEL_CONT, "....\n");
        tail.push(GGML_LOG_LEVEL_ERROR, "unknown ");
        tail.push(GGML_LOG_LEVEL_CONT, "architecture\nnext\n");
        assert_eq!(tail.kept, ["unknown architecture", "next"]);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut tail = tail();
        for n in 0..100 {
            tail.push(GGML_LOG_LEVEL_ERROR, &format!("{n}{}\n", "é".repeat(5000)));
        }
        assert!(tail.kept.len() <= KEPT_MAX);
        assert!(tail.kept.iter().all(|l| l.len() <= LINE_BYTES_MAX));
        // The line end was beyond the bound of each line, so they run together: still bounded.
        assert!(tail.line.len() <= LINE_BYTES_MAX);
    }
}
