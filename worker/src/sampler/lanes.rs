//! Many rows sampled side by side, on threads that outlive the step.

use std::sync::{LazyLock, Mutex, PoisonError};

use rayon::ThreadPool;

use super::{Sampled, Sampler, Unusable};

/// One row to be sampled.
#[derive(Debug)]
pub struct Job<'e> {
    pub slot: usize,
    pub sampler: &'e mut Sampler,
    pub logits: &'e [f32],
    /// The index of the token in its stream.
    pub index: u32,
}

/// Waking a thread costs about as much as sampling so many values.
const VALUES_A_LANE: usize = 1 << 17;

/// The threads beside the caller's, made when they are first wanted: starting some for each step
/// would cost as much as they save. `None`: the system has no more of them, and the caller samples
/// alone.
static HELPERS: LazyLock<Option<ThreadPool>> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    rayon::ThreadPoolBuilder::new()
        .num_threads(cores.saturating_sub(1).max(1))
        .thread_name(|n| format!("sampler-{n}"))
        .build()
        .ok()
});

/// Samples all rows, on up to `lanes` threads where there is enough to do for more than one.
/// The answers come in the order of the jobs, and are the same whatever `lanes` is.
#[must_use]
pub fn sample_rows(
    mut jobs: Vec<Job<'_>>,
    lanes: usize,
) -> Vec<(usize, Result<Sampled, Unusable>)> {
    let values: usize = jobs.iter().map(|j| j.logits.len()).sum();
    let lanes = lanes.min(values / VALUES_A_LANE).min(jobs.len());
    let helpers = if lanes > 1 { HELPERS.as_ref() } else { None };
    let mut answers: Vec<_> = jobs.iter().map(|j| (j.slot, Err(Unusable))).collect();
    // Whoever is free takes the next row: a thread that wakes late delays nobody.
    let rows = Mutex::new(jobs.iter_mut().zip(&mut answers));
    let lane = || {
        loop {
            let row = rows.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((job, answer)) = row else { return };
            answer.1 = job.sampler.sample(job.logits, job.index);
        }
    };
    match helpers {
        None => lane(),
        Some(helpers) => helpers.in_place_scope(|scope| {
            for _ in 1..lanes {
                scope.spawn(|_| lane());
            }
            lane();
        }),
    }
    answers
}
