//! How long the sampler takes for a step's rows over a large vocabulary.
//!
//! `cargo bench -p worker --bench sampler [LANES]`: µs a row, best and median of 30 steps.

#![expect(clippy::print_stdout, reason = "a program for people")]

use std::hint::black_box;
use std::time::Instant;

use proto::generate::Sampling;
use worker::sampler::{Job, Sampler, sample_rows};

const VOCABULARY: u32 = 152_064;
const STEPS: u32 = 30;

/// Logits as a model's: a normal distribution, near enough, by sums of a counter's hash.
fn logits(row: u64) -> Vec<f32> {
    let mut state = row.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        f32::from(u16::try_from(state >> 48).unwrap_or_default()) / 65_536.0
    };
    (0..VOCABULARY)
        .map(|_| (0..6).map(|_| uniform()).sum::<f32>() * 3.0 - 9.0)
        .collect()
}

fn main() {
    // Cargo gives every bench target `--bench`.
    let lanes = std::env::args()
        .skip(1)
        .find_map(|word| word.parse::<usize>().ok())
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    let greedy = Sampling {
        temperature: 0.0,
        ..Sampling::default()
    };
    let nucleus = Sampling {
        temperature: 0.8,
        top_p: 0.95,
        ..Sampling::default()
    };
    let usual = Sampling {
        top_k: 40,
        ..nucleus.clone()
    };
    let plain = Sampling {
        top_p: 1.0,
        ..nucleus.clone()
    };
    println!("lanes={lanes} vocabulary={VOCABULARY} steps={STEPS}");
    for rows in [1_u64, 16, 64] {
        let logits: Vec<Vec<f32>> = (0..rows).map(logits).collect();
        for (name, sampling) in [
            ("greedy", &greedy),
            ("temperature 0.8", &plain),
            ("temperature 0.8, top-p 0.95", &nucleus),
            ("temperature 0.8, top-k 40, top-p 0.95", &usual),
        ] {
            let mut samplers: Vec<Sampler> = logits
                .iter()
                .map(|_| Sampler::new(sampling, None, &[], &[]))
                .collect();
            let mut times: Vec<f64> = (0..STEPS)
                .map(|index| {
                    let jobs = samplers
                        .iter_mut()
                        .zip(&logits)
                        .enumerate()
                        .map(|(slot, (sampler, logits))| Job {
                            slot,
                            sampler,
                            logits,
                            index,
                        })
                        .collect();
                    let begun = Instant::now();
                    black_box(sample_rows(jobs, lanes));
                    begun.elapsed().as_secs_f64() * 1e6
                })
                .collect();
            times.sort_by(f64::total_cmp);
            let (best, median) = (times[0], times[times.len() / 2]);
            println!(
                "rows={rows} {name}: step_us best={best:.0} median={median:.0}, a row {:.1}",
                median / rows as f64
            );
        }
    }
}
