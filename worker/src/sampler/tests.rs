//! The sampler against the plain one, and its promises one by one.

use std::cell::Cell;

use proptest::prelude::*;
use proto::TokenId;
use proto::generate::Sampling;

use super::reference::choose;
use super::{Job, Sampler, TOP_LOGPROBS_MAX, Unusable, check, sample_rows};

/// Below this distance from a boundary 32-bit weights may decide otherwise than 64-bit ones.
const MARGIN: f64 = 1e-4;

fn greedy() -> Sampling {
    Sampling {
        temperature: 0.0,
        ..Sampling::default()
    }
}

prop_compose! {
    fn samplings()(
        temperature in prop_oneof![Just(0.0_f32), Just(1.0), 0.05_f32..3.0],
        top_p in prop_oneof![Just(1.0_f32), 0.0_f32..1.0],
        top_k in prop_oneof![Just(0_u32), 1_u32..80],
        min_p in prop_oneof![Just(0.0_f32), 0.0_f32..0.5],
        repetition_penalty in prop_oneof![Just(1.0_f32), 0.5_f32..2.0],
        presence_penalty in prop_oneof![Just(0.0_f32), -2.0_f32..2.0],
        frequency_penalty in prop_oneof![Just(0.0_f32), -2.0_f32..2.0],
        logit_bias in proptest::collection::vec((0_u32..20, -9.0_f32..9.0), 0..3),
        seed in any::<u64>(),
    ) -> Sampling {
        Sampling {
            temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty,
            frequency_penalty, logit_bias, seed,
        }
    }
}

#[test]
fn it_chooses_what_the_plain_sampler_chooses() {
    let close = Cell::new(0_u32);
    let cases = 3000;
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(cases));
    let ids = || proptest::collection::vec(0_u32..20, 0..12);
    let logits = prop_oneof![
        proptest::collection::vec(-12.0_f32..12.0, 20..1500),
        // Ties and tokens that are ruled out.
        proptest::collection::vec(
            prop_oneof![9 => (-5_i8..5).prop_map(f32::from), 1 => Just(f32::NEG_INFINITY)],
            20..1500
        )
        .prop_filter("something must be left", |l| l
            .iter()
            .any(|x| x.is_finite())),
    ];
    runner
        .run(
            &(logits, samplings(), ids(), ids(), 0_u32..50),
            |(logits, sampling, prompt, emitted, index)| {
                let (expected, margin) = choose(&logits, &sampling, &prompt, &emitted, index);
                let mut sampler = Sampler::new(&sampling, None, &prompt, &emitted);
                let got = sampler.sample(&logits, index).map(|s| s.token);
                if got != Ok(expected) && margin < MARGIN {
                    close.set(close.get() + 1);
                    return Ok(());
                }
                prop_assert_eq!(got, Ok(expected), "margin {}", margin);
                Ok(())
            },
        )
        .expect("equal but for draws on a boundary");
    assert!(
        close.get() <= cases / 100,
        "{} of {cases} draws on a boundary",
        close.get()
    );
}

#[test]
fn a_stream_resumed_from_its_ids_goes_on_as_the_same_stream() {
    let sampling = Sampling {
        temperature: 1.3,
        repetition_penalty: 1.2,
        frequency_penalty: 0.4,
        presence_penalty: 0.2,
        seed: 99,
        ..Sampling::default()
    };
    let logits_at = |index: u32| -> Vec<f32> {
        (0..500_u32)
            .map(|t| ((t * 37 + index * 101) % 97) as f32 / 10.0)
            .collect()
    };
    let prompt = [1, 2, 3, 3];
    let mut whole = Sampler::new(&sampling, None, &prompt, &[]);
    let tokens: Vec<TokenId> = (0..60)
        .map(|i| whole.sample(&logits_at(i), i).expect("finite").token)
        .collect();
    for at in [1, 17, 59] {
        let mut resumed = Sampler::new(&sampling, None, &prompt, &tokens[..at]);
        let rest: Vec<TokenId> = (u32::try_from(at).expect("small")..60)
            .map(|i| resumed.sample(&logits_at(i), i).expect("finite").token)
            .collect();
        assert_eq!(rest, tokens[at..], "resumed at {at}");
    }
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [0.0_f32, 1.0, 2.0, f32::NEG_INFINITY, 0.5];
    let mass: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
    let mut counts = [0_u32; 5];
    let draws = 20_000;
    let mut sampler = Sampler::new(
        &Sampling {
            seed: 4,
            ..Sampling::default()
        },
        None,
        &[],
        &[],
    );
    for index in 0..draws {
        counts[sampler.sample(&logits, index).expect("finite").token as usize] += 1;
    }
    for (count, logit) in counts.iter().zip(logits) {
        let p = f64::from(logit).exp() / mass;
        let expected = p * f64::from(draws);
        // Five standard deviations; the seed is fixed.
        let allowed = 5.0 * (expected * (1.0 - p)).sqrt();
        assert!(
            (f64::from(*count) - expected).abs() <= allowed,
            "{counts:?}"
        );
    }
}

#[test]
fn logprobs_are_the_models_own_whatever_is_done_to_the_choice() {
    let logits = [1.0_f32, 3.0, 2.0, -1.0];
    let sampling = Sampling {
        logit_bias: vec![(3, 100.0)],
        ..greedy()
    };
    let mut sampler = Sampler::new(&sampling, Some(2), &[], &[]);
    let sampled = sampler.sample(&logits, 0).expect("finite");
    assert_eq!(sampled.token, 3, "the bias decides");
    let logprobs = sampled.logprobs.expect("asked for");
    let normaliser = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
    let expected = |logit: f64| logit - normaliser;
    assert!((f64::from(logprobs.chosen) - expected(-1.0)).abs() < 1e-5);
    let ids: Vec<TokenId> = logprobs.top.iter().map(|t| t.0).collect();
    assert_eq!(ids, [1, 2]);
    assert!((f64::from(logprobs.top[0].1) - expected(3.0)).abs() < 1e-5);
}

#[test]
fn a_row_that_is_no_distribution_is_refused_whatever_the_sampling() {
    let ways = [
        greedy(),
        Sampling::default(),
        Sampling {
            top_k: 5,
            ..Sampling::default()
        },
    ];
    for sampling in ways {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut logits = vec![0.5_f32; 100];
            logits[63] = bad;
            let mut sampler = Sampler::new(&sampling, Some(3), &[], &[]);
            assert_eq!(
                sampler.sample(&logits, 0),
                Err(Unusable),
                "{bad}, {sampling:?}"
            );
        }
        let nothing = [f32::NEG_INFINITY; 40];
        let mut sampler = Sampler::new(&sampling, None, &[], &[]);
        assert_eq!(sampler.sample(&nothing, 0), Err(Unusable));
    }
}

#[test]
fn of_equal_logits_the_lowest_id_is_greedy() {
    let mut logits = vec![0.0_f32; 70];
    logits[41] = 2.0;
    logits[66] = 2.0;
    let sampled = Sampler::new(&greedy(), None, &[], &[])
        .sample(&logits, 0)
        .expect("finite");
    assert_eq!(sampled.token, 41);
}

#[test]
fn sampling_that_cannot_be_carried_out_is_refused_in_words() {
    assert_eq!(check(&Sampling::default(), Some(20), 100), Ok(()));
    let refused = [
        Sampling {
            temperature: f32::NAN,
            ..Sampling::default()
        },
        Sampling {
            temperature: -1.0,
            ..Sampling::default()
        },
        Sampling {
            top_p: 1.5,
            ..Sampling::default()
        },
        Sampling {
            min_p: f32::NAN,
            ..Sampling::default()
        },
        Sampling {
            repetition_penalty: 0.0,
            ..Sampling::default()
        },
        Sampling {
            frequency_penalty: f32::INFINITY,
            ..Sampling::default()
        },
        Sampling {
            logit_bias: vec![(100, 1.0)],
            ..Sampling::default()
        },
        Sampling {
            logit_bias: vec![(1, f32::NAN)],
            ..Sampling::default()
        },
    ];
    for sampling in refused {
        assert!(check(&sampling, None, 100).is_err(), "{sampling:?}");
    }
    assert!(check(&Sampling::default(), Some(TOP_LOGPROBS_MAX + 1), 100).is_err());
}

#[test]
fn many_rows_give_the_same_tokens_on_one_thread_and_on_several() {
    let vocabulary = 150_000_u32;
    let logits: Vec<Vec<f32>> = (0..40_u32)
        .map(|row| {
            (0..vocabulary)
                .map(|t| ((t * 7919 + row * 31) % 4099) as f32 / 300.0)
                .collect()
        })
        .collect();
    let all = |lanes| {
        let mut samplers: Vec<Sampler> = (0..40)
            .map(|seed| {
                Sampler::new(
                    &Sampling {
                        seed,
                        ..Sampling::default()
                    },
                    None,
                    &[],
                    &[],
                )
            })
            .collect();
        let rows = samplers.iter_mut().zip(&logits).enumerate();
        let jobs = rows.map(|(slot, (sampler, logits))| Job {
            slot,
            sampler,
            logits,
            index: 3,
        });
        sample_rows(jobs.collect(), lanes)
    };
    let one = all(1);
    assert_eq!(one, all(3));
    assert_eq!(one.len(), 40);
    assert!(one.iter().enumerate().all(|(n, (slot, _))| n == *slot));
}
