//! What the memory bus allows at most, and where batching stops being free.

use crate::random::Random;
use crate::report::rows::Row;
use crate::statistics::{Interval, interpolated, mean};

/// Draws of the knee's interval: each is a search, and the ends are read to two digits.
const DRAWS: usize = 1_000;
/// Knees that are tried: each 2 % above the last.
const KNEE_STEP: f64 = 1.02;

/// Tokens per second that the bus allows for `streams` on `instances`: `BW·N / (K·W + N·KV)`.
#[must_use]
pub fn tokens_per_s(
    bytes_per_s: f64,
    instances: u32,
    streams: u32,
    weight_bytes: f64,
    kv_bytes: f64,
) -> f64 {
    let (instances, streams) = (f64::from(instances), f64::from(streams));
    bytes_per_s * streams / (instances * weight_bytes + streams * kv_bytes)
}

/// Of a row whose server told bandwidth and bytes. Streams are those that have a slot; KV is read for half of the
/// answer's tokens and all of the prompt's.
#[must_use]
#[expect(
    clippy::cast_precision_loss,
    reason = "sizes and counts are far below 2^52"
)]
pub fn of_row(row: &Row) -> Option<f64> {
    let word = row.server.as_ref()?;
    let weights = word.weight_bytes_per_step.filter(|bytes| *bytes > 0)? as f64;
    let context: Vec<f64> = row
        .samples
        .iter()
        .filter_map(|sample| {
            let usage = sample.usage?;
            Some(usage.prompt_tokens as f64 + usage.completion_tokens as f64 / 2.0)
        })
        .collect();
    let kv = word.kv_bytes_per_token.unwrap_or_default() as f64 * mean(&context).unwrap_or(0.0);
    let (instances, streams) = (row.places().0, streams(row)?);
    let bandwidth = word.read_gb_per_s()? * 1e9;
    Some(tokens_per_s(bandwidth, instances, streams, weights, kv))
}

/// Requests that decode at once.
fn streams(row: &Row) -> Option<u32> {
    let (instances, slots) = row.places();
    Some(row.concurrency()?.min(instances.saturating_mul(slots)))
}

/// The batch from which a step takes longer in proportion, with its interval: below it more streams cost
/// nothing, above it they share what there is. Of the rows with one instance; `None` where fewer than three
/// batch sizes were measured.
#[must_use]
pub fn knee(rows: &[&Row], seed: u64) -> Option<Interval> {
    let mut steps: Vec<(f64, Vec<f64>)> = Vec::new();
    for row in rows.iter().filter(|row| row.places().0 == 1) {
        let batch = f64::from(streams(row)?);
        let rates = row.rates();
        if rates.is_empty() || rates.iter().any(|rate| *rate <= 0.0) {
            continue;
        }
        let times = rates.into_iter().map(|rate| batch / rate);
        match steps.iter_mut().find(|(one, _)| *one == batch) {
            Some((_, all)) => all.extend(times),
            None => steps.push((batch, times.collect())),
        }
    }
    if steps.len() < 3 {
        return None;
    }
    let middle = |times: &[f64]| interpolated(times, 0.5);
    let points: Option<Vec<(f64, f64)>> = steps
        .iter()
        .map(|(batch, times)| Some((*batch, middle(times)?)))
        .collect();
    let estimate = fit(&points?)?;
    let mut random = Random::new(seed, "knee");
    let drawn = (0..DRAWS).filter_map(|_| {
        let points: Option<Vec<(f64, f64)>> = steps
            .iter()
            .map(|(batch, times)| {
                let draw = (0..times.len()).map(|_| times[random.index(times.len())]);
                Some((*batch, middle(&draw.collect::<Vec<f64>>())?))
            })
            .collect();
        fit(&points?)
    });
    let drawn: Vec<f64> = drawn.collect();
    Some(Interval {
        estimate,
        low: interpolated(&drawn, 0.025)?,
        high: interpolated(&drawn, 0.975)?,
    })
}

/// The knee of step time over batch, by least squares of the logarithms: flat before it, in proportion after it.
fn fit(points: &[(f64, f64)]) -> Option<f64> {
    let most = points.iter().map(|(batch, _)| *batch).fold(1.0, f64::max);
    let error = |knee: f64| {
        let rests: Vec<f64> = points
            .iter()
            .map(|(batch, time)| time.ln() - (batch / knee).max(1.0).ln())
            .collect();
        let level = mean(&rests).unwrap_or(0.0);
        rests.iter().map(|rest| (rest - level).powi(2)).sum::<f64>()
    };
    let knees = std::iter::successors(Some(1.0), |knee| Some(knee * KNEE_STEP))
        .take_while(|knee| *knee <= most * KNEE_STEP);
    knees.min_by(|a, b| error(*a).total_cmp(&error(*b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::Measured;
    use crate::report::rows::{made, rows};

    #[test]
    fn the_studys_ceiling_is_that_of_its_arithmetic() {
        // 273 GB/s, 4.4 GB of weights: 62 tokens a second, whatever K, and N times that in one batch.
        let one = tokens_per_s(273e9, 1, 1, 4.4e9, 0.0);
        assert!((one - 62.05).abs() < 0.01);
        assert!((tokens_per_s(273e9, 3, 3, 4.4e9, 0.0) - one).abs() < 1e-9);
        assert!((tokens_per_s(273e9, 1, 8, 4.4e9, 0.0) - 8.0 * one).abs() < 1e-9);
        // KV is read once for each stream, and bends the line.
        let bent = tokens_per_s(273e9, 1, 8, 4.4e9, 0.05e9);
        assert!(bent < 8.0 * one && bent > 7.0 * one);
    }

    fn surface(rate: impl Fn(u32) -> f64) -> Vec<Measured> {
        let mut cells = Vec::new();
        for repeat in 0..5 {
            for slots in [1, 2, 4, 8, 16] {
                let noise = 1.0 + 0.01 * f64::from((repeat * 7 + slots * 3) % 5);
                let size = Some((1, slots));
                cells.push(made::cell("a", size, 16, repeat, rate(slots) * noise));
            }
        }
        cells
    }

    fn knee_of(rate: impl Fn(u32) -> f64) -> Interval {
        let rows = rows(&surface(rate));
        knee(&rows.iter().collect::<Vec<_>>(), 3).unwrap()
    }

    #[test]
    fn the_knee_is_found_where_more_streams_stop_being_free() {
        let found = knee_of(|slots| 50.0 * f64::from(slots.min(4)));
        assert!((found.estimate - 4.0).abs() < 0.3, "{found:?}");
        assert!(found.low <= 4.2 && found.high >= 3.8, "{found:?}");
        assert!(found.high - found.low < 1.0, "{found:?}");
        // Compute-bound from the first stream, and never.
        assert!(knee_of(|_| 50.0).estimate < 1.1);
        assert!(knee_of(|slots| 50.0 * f64::from(slots)).estimate > 15.0);
    }

    #[test]
    fn two_batch_sizes_have_no_knee() {
        let cells = surface(|_| 50.0);
        let few: Vec<Measured> = cells
            .into_iter()
            .filter(|one| one.cell.size.is_some_and(|size| size.slots < 4))
            .collect();
        let rows = rows(&few);
        assert_eq!(knee(&rows.iter().collect::<Vec<_>>(), 3), None);
    }

    #[test]
    fn a_row_has_a_ceiling_where_its_server_told_of_its_bus() {
        let mut cell = made::cell("a", Some((1, 4)), 16, 0, 50.0);
        assert_eq!(of_row(&rows(&[cell.clone()])[0]), None);
        cell.server = Some(crate::status::ServerWord {
            weight_bytes_per_step: Some(100_000_000),
            bus: Some(serde_json::json!([{"best_gb_per_s": 25.0}])),
            ..Default::default()
        });
        let ceiling = of_row(&rows(&[cell])[0]).unwrap();
        assert!((ceiling - 1_000.0).abs() < 1e-6, "{ceiling}");
    }
}
