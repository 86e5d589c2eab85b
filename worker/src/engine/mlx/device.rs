//! Which device MLX computes on here, how much memory it may take, and on which thread.

use std::sync::{Mutex, PoisonError};
use std::thread::ThreadId;

use mlx_rs::{Device, DeviceType, memory};
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

use super::transient;
use crate::engine::LoadError;

/// What decides how the model is laid out and stepped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backend {
    /// Its packed kernels are scalar and accumulate in the type of the scales, so that all
    /// computing here is in float32.
    Cpu,
    Metal,
    Cuda,
}

impl Backend {
    pub(super) fn detect() -> Result<Self, LoadError> {
        let kind = Device::try_default()
            .and_then(|device| device.get_type())
            .map_err(|e| transient(format!("asking MLX for its device: {}", e.what())))?;
        Ok(match kind {
            DeviceType::Cpu => Self::Cpu,
            DeviceType::Gpu if cfg!(target_os = "macos") => Self::Metal,
            DeviceType::Gpu => Self::Cuda,
        })
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Cpu => "MLX CPU (float32)",
            Self::Metal => "MLX Metal",
            Self::Cuda => "MLX CUDA",
        }
    }

    /// Rows to compute where `rows` are needed. On CUDA the packed matrix product runs its kernel
    /// for vectors once a row below 8 rows, and kernels are compiled for each new shape: 2 to 7 rows
    /// are padded to 8, more to the next power of two. Elsewhere padding was not measured to help.
    pub(super) fn padded(self, rows: usize) -> usize {
        match self {
            Self::Cuda if rows > 1 => rows.next_power_of_two().max(8),
            _ => rows,
        }
    }

    /// The row counts to run before serving, so that no request waits for a kernel to be compiled or
    /// chosen. CUDA compiles for every count that `padded` gives; elsewhere kernels are ready-made.
    pub(super) fn shapes(self, slots: u32) -> Vec<usize> {
        let slots = slots as usize;
        let largest = match self {
            Self::Cuda => self.padded(slots + super::schedule::CHUNK_MAX as usize),
            Self::Cpu | Self::Metal => slots + super::schedule::CHUNK_MIN as usize,
        };
        let mut shapes = vec![1];
        while shapes.last().is_some_and(|&last| last < largest) {
            let next = shapes.last().map_or(1, |&last| self.padded(last * 2));
            shapes.push(next.min(largest));
        }
        shapes
    }
}

/// MLX keeps freed buffers for reuse, without a bound by default.
const BUFFER_CACHE_BYTES: u64 = 512 << 20;
/// What a pass needs beside weights and caches: activations and logits.
const WORKING_BYTES: u64 = 2 << 30;

/// Bounds MLX's memory: weights, caches and a working margin.
pub(super) fn bound_memory(weight_bytes: u64, cache_bytes: u64) -> Result<(), LoadError> {
    let limit = weight_bytes
        .saturating_add(cache_bytes)
        .saturating_add(WORKING_BYTES + BUFFER_CACHE_BYTES);
    let set = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    memory::set_memory_limit(set(limit))
        .and_then(|_| memory::set_cache_limit(set(BUFFER_CACHE_BYTES)))
        .map(|_| ())
        .map_err(|e| transient(format!("bounding MLX's memory: {}", e.what())))
}

/// Bytes of memory that this process can have at most: the machine's, or its cgroup's where that is
/// less. `None` where the system does not say.
pub(super) fn machine_bytes() -> Option<u64> {
    let memory = MemoryRefreshKind::nothing().with_ram();
    let system = System::new_with_specifics(RefreshKind::nothing().with_memory(memory)).ok()?;
    let cgroup = system.cgroup_limits().map(|limits| limits.total_memory);
    let whole = system.total_memory();
    let least = cgroup
        .filter(|&bytes| bytes > 0)
        .map_or(whole, |c| c.min(whole));
    (least > 0).then_some(least)
}

/// Which thread uses MLX, and through how many engines.
static USER: Mutex<Option<(ThreadId, usize)>> = Mutex::new(None);

/// The right of one thread to use MLX. MLX's streams belong to threads, and Metal aborts the process
/// where two of them meet in one command buffer.
#[derive(Debug)]
pub(super) struct Claim(());

impl Claim {
    /// `None` while another thread has an engine.
    pub(super) fn take() -> Option<Self> {
        let mut user = USER.lock().unwrap_or_else(PoisonError::into_inner);
        let own = std::thread::current().id();
        match &mut *user {
            Some((thread, _)) if *thread != own => None,
            Some((_, engines)) => {
                *engines += 1;
                Some(Self(()))
            }
            none => {
                *none = Some((own, 1));
                Some(Self(()))
            }
        }
    }

    /// Fails in debug builds on any other thread than the one that claimed.
    pub(super) fn assert_held(&self) {
        debug_assert!(
            matches!(&*USER.lock().unwrap_or_else(PoisonError::into_inner),
                Some((thread, _)) if *thread == std::thread::current().id()),
            "MLX is used by a second thread"
        );
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut user = USER.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *user {
            Some((_, engines)) if *engines > 1 => *engines -= 1,
            other => *other = None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_thread_gets_no_claim_until_the_first_lets_go() {
        let first = Claim::take().unwrap();
        let again = Claim::take().unwrap();
        let elsewhere = || {
            std::thread::spawn(|| Claim::take().is_some())
                .join()
                .unwrap()
        };
        assert!(!elsewhere());
        drop(first);
        assert!(!elsewhere());
        drop(again);
        assert!(elsewhere());
    }

    #[test]
    fn only_cuda_pads_rows() {
        assert_eq!(
            [1, 2, 7, 9, 33].map(|n| Backend::Cuda.padded(n)),
            [1, 8, 8, 16, 64]
        );
        assert_eq!(
            [1, 2, 7, 9, 33].map(|n| Backend::Cpu.padded(n)),
            [1, 2, 7, 9, 33]
        );
        assert_eq!(Backend::Metal.padded(3), 3);
    }

    #[test]
    fn the_machine_has_memory() {
        assert!(machine_bytes().unwrap() > 1 << 28);
    }
}
