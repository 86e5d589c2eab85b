use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
    ratios: Vec<Ratio>,
    steady: Vec<Steady>,
}

#[derive(Deserialize)]
struct Case {
    values: Vec<f64>,
    quantiles: Vec<(f64, f64)>,
    mean: f64,
    deviation: Option<f64>,
}

#[derive(Deserialize)]
struct Ratio {
    a: Vec<f64>,
    b: Vec<f64>,
    paired: bool,
    estimate: f64,
    low: f64,
    high: f64,
}

#[derive(Deserialize)]
struct Steady {
    values: Vec<f64>,
    from: usize,
}

fn reference() -> Reference {
    serde_json::from_str(include_str!("../../tests/data/statistics.json")).unwrap()
}

fn close(found: f64, wanted: f64, within: f64) -> bool {
    (found - wanted).abs() <= within * wanted.abs().max(1e-300)
}

#[test]
fn quantiles_means_and_deviations_are_those_of_numpy() {
    for case in reference().cases {
        for (q, wanted) in case.quantiles {
            let found = interpolated(&case.values, q).unwrap();
            assert!(
                close(found, wanted, 1e-12),
                "{q}: {found} instead of {wanted}"
            );
        }
        assert!(close(mean(&case.values).unwrap(), case.mean, 1e-12));
        match (deviation(&case.values), case.deviation) {
            (Some(found), Some(wanted)) => assert!(close(found, wanted, 1e-12)),
            (found, wanted) => assert_eq!(found, wanted),
        }
    }
}

#[test]
fn bootstrap_intervals_are_those_of_scipy_but_for_the_draw() {
    for case in reference().ratios {
        let seed = 5;
        let interval = if case.paired {
            paired_ratio_interval(&case.a, &case.b, mean, seed)
        } else {
            ratio_interval(&case.a, &case.b, mean, seed)
        }
        .unwrap();
        assert!(close(interval.estimate, case.estimate, 1e-12));
        // The ends are themselves estimates; both lie within 5 % of the width.
        let width = case.high - case.low;
        assert!(
            (interval.low - case.low).abs() < 0.05 * width
                && (interval.high - case.high).abs() < 0.05 * width,
            "seed {seed}, paired {}: {interval:?} instead of [{}, {}]",
            case.paired,
            case.low,
            case.high
        );
    }
}

#[test]
fn the_steady_part_is_where_the_plain_definition_finds_it() {
    for case in reference().steady {
        assert_eq!(
            steady_from(&case.values),
            case.from,
            "{} values",
            case.values.len()
        );
    }
    assert_eq!(steady_from(&[]), 0);
}

#[test]
fn no_quantile_is_told_from_too_few_samples() {
    for (q, needed) in [(0.5, 1), (0.9, 64), (0.1, 64), (0.99, 662), (0.999, 6_636)] {
        let values = vec![1.0; needed];
        assert_eq!(quantile(&values, q), Quantile::Value(1.0), "{q}");
        let fewer = quantile(&values[1..], q);
        assert_eq!(
            fewer,
            Quantile::TooFew {
                n: needed - 1,
                needed
            },
            "{q}"
        );
        assert!(fewer.to_string().starts_with("n too small"));
    }
    assert_eq!(samples_needed(0.95), 133);
}

#[test]
fn weights_count_as_so_many_equal_values() {
    assert_eq!(
        weighted(&[(1.0, 1.0), (9.0, 1.0), (5.0, 8.0)], 0.5),
        Some(5.0)
    );
    assert_eq!(weighted(&[(1.0, 9.0), (9.0, 1.0)], 0.9), Some(1.0));
    assert_eq!(weighted(&[(1.0, 9.0), (9.0, 1.0)], 0.95), Some(9.0));
    assert_eq!(weighted(&[], 0.5), None);
    let equal: Vec<(f64, f64)> = (0..101).map(|value| (f64::from(value), 2.0)).collect();
    assert_eq!(weighted(&equal, 0.5), Some(50.0));
}

#[test]
fn equal_seeds_give_equal_intervals() {
    let (a, b) = ([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 5.0, 8.0]);
    assert_eq!(
        ratio_interval(&a, &b, median, 3),
        ratio_interval(&a, &b, median, 3)
    );
    assert_eq!(ratio_interval(&[], &b, median, 3), None);
    assert_eq!(ratio_interval(&[0.0], &b, median, 3), None);
    assert_eq!(paired_ratio_interval(&a, &b[1..], median, 3), None);
}

#[test]
fn what_was_refused_counts_against_goodput() {
    use crate::sample::{Outcome, Sample};
    let request = |first_us: u64, done: bool| {
        let mut sample = Sample::begin(0, 0, 0, 0);
        sample.token(first_us);
        sample.output_tokens = 11;
        sample.done_us = first_us + 100_000;
        if done {
            sample.outcome = Outcome::Done;
        }
        sample
    };
    let samples = [
        request(50_000, true),
        request(50_000, false),
        request(500_000, true),
        request(90_000, true),
    ];
    assert_eq!(goodput_share(&samples, 100.0, 20.0), Some(0.5));
    assert_eq!(goodput_share(&samples, 100.0, 5.0), Some(0.0));
    assert_eq!(goodput_share(&[], 100.0, 5.0), None);
}
