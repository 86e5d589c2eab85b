//! The distributions of a run as an HdrHistogram interval log, which the usual tools read: one interval for each cell
//! and figure, with a tag that names both.

use std::time::{Duration, UNIX_EPOCH};

use hdrhistogram::Histogram;
use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{IntervalLogWriterBuilder, Tag};

use super::rows::load_words;
use crate::cell::Measured;
use crate::error::BenchError;
use crate::record::Recorded;
use crate::sample::Sample;

/// An hour in microseconds: longer than any figure that a client waits for.
const HIGHEST_US: u64 = 3_600_000_000;
/// Relative error of a thousandth.
const DIGITS: u8 = 3;

/// The log of all runs, values in microseconds.
///
/// # Errors
/// A histogram cannot be encoded.
pub fn log(runs: &[Recorded]) -> Result<Vec<u8>, BenchError> {
    let failed = |error: &dyn std::fmt::Debug| BenchError::System {
        what: "write a histogram log",
        source: std::io::Error::other(format!("{error:?}")),
    };
    let began_s = runs.first().map_or(0, |run| run.run.surroundings.unix_s);
    let began = UNIX_EPOCH + Duration::from_secs(began_s);
    let mut bytes = Vec::new();
    let mut serializer = V2DeflateSerializer::new();
    let mut log = IntervalLogWriterBuilder::new()
        .add_comment("microseconds; tags are figure:arm:instances x slots:load:run")
        .with_start_time(began)
        .with_base_time(began)
        // Maxima in milliseconds.
        .with_max_value_divisor(1_000.0)
        .begin_log_with(&mut bytes, &mut serializer)
        .map_err(|error| failed(&error))?;
    for recorded in runs {
        let since = recorded.run.surroundings.unix_s.saturating_sub(began_s);
        for measured in &recorded.cells {
            for (figure, histogram) in histograms(measured).map_err(|error| failed(&error))? {
                let name = tag(&recorded.run.verb, figure, measured);
                log.write_histogram(
                    &histogram,
                    Duration::from_secs(since),
                    length(&measured.samples),
                    Tag::new(&name),
                )
                .map_err(|error| failed(&error))?;
            }
        }
    }
    drop(log);
    Ok(bytes)
}

/// A tag must not hold commas or blanks.
fn tag(verb: &str, figure: &str, measured: &Measured) -> String {
    let cell = &measured.cell;
    let size = cell.size.map_or_else(
        || "-".into(),
        |size| format!("{}x{}", size.instances, size.slots),
    );
    let load = if cell.cold {
        "cold".into()
    } else {
        load_words(&cell.arrival)
    };
    let repeat = cell.repeat + 1;
    format!("{verb}:{figure}:{}:{size}:{load}:{repeat}", cell.arm).replace([' ', ','], "_")
}

fn length(samples: &[Sample]) -> Duration {
    let begin = samples.iter().map(|sample| sample.sent_us).min();
    let end = samples.iter().map(|sample| sample.done_us).max();
    let us = end.zip(begin).map_or(0, |(end, begin)| end - begin);
    Duration::from_micros(us)
}

type Named = (&'static str, Histogram<u64>);

fn histograms(measured: &Measured) -> Result<Vec<Named>, hdrhistogram::CreationError> {
    let done = || measured.samples.iter().filter(|s| s.outcome.is_done());
    let of = |values: &mut dyn Iterator<Item = u64>| {
        let mut histogram = Histogram::new_with_max(HIGHEST_US, DIGITS)?;
        // What lies beyond an hour counts as an hour.
        values.for_each(|value| histogram.saturating_record(value));
        Ok(histogram)
    };
    let since = |sample: &Sample, at: u64| at.saturating_sub(sample.intended_us);
    Ok(vec![
        (
            "ttft",
            of(&mut done().filter_map(|sample| Some(since(sample, sample.first_token_us?))))?,
        ),
        (
            "gap",
            of(&mut done().flat_map(|sample| sample.gaps_us.iter().map(|gap| u64::from(*gap))))?,
        ),
        (
            "total",
            of(&mut done().map(|sample| since(sample, sample.done_us)))?,
        ),
    ])
}

#[cfg(test)]
mod tests {
    use hdrhistogram::serialization::Deserializer;
    use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

    use super::super::rows::made;
    use super::*;

    #[test]
    fn the_log_is_read_back_with_every_request_in_it() {
        let cells = vec![
            made::cell("a b", Some((2, 8)), 16, 0, 100.0),
            made::cell("a b", None, 4, 1, 50.0),
        ];
        let bytes = log(&[crate::record::made(cells)]).unwrap();
        let mut intervals = Vec::new();
        for entry in IntervalLogIterator::new(&bytes) {
            if let LogEntry::Interval(interval) = entry.unwrap() {
                let encoded = interval.encoded_histogram().to_owned();
                intervals.push((interval.tag().unwrap().as_str().to_owned(), encoded));
            }
        }
        assert_eq!(intervals.len(), 6);
        assert_eq!(intervals[0].0, "compare:ttft:a_b:2x8:concurrency_16:1");
        assert_eq!(intervals[3].0, "compare:ttft:a_b:-:concurrency_4:2");
        // 16 answers of 10 tokens at 100 a second took 1.6 s, their first tokens a tenth of it.
        let engine = base64_of(&intervals[0].1);
        let ttft: Histogram<u64> = Deserializer::new()
            .deserialize(&mut engine.as_slice())
            .unwrap();
        assert_eq!(ttft.len(), 16);
        assert!((ttft.value_at_quantile(0.5) as f64 / 160_000.0 - 1.0).abs() < 0.002);
    }

    /// The few lines that a dependency would be too much for.
    fn base64_of(text: &str) -> Vec<u8> {
        let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let (mut bits, mut held, mut bytes) = (0_u32, 0, Vec::new());
        for letter in text.bytes().filter(|letter| *letter != b'=') {
            let digit = digits.iter().position(|digit| *digit == letter).unwrap();
            bits = (bits << 6) | u32::try_from(digit).unwrap();
            held += 6;
            if held >= 8 {
                held -= 8;
                bytes.push(u8::try_from((bits >> held) & 0xff).unwrap());
            }
        }
        bytes
    }
}
