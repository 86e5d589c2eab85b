//! Reserve first, allocate after: whether a worker of a known footprint may start now, and how good the prediction was.

use std::time::Duration;

use super::Size;
use super::pressure::Reading;

/// From the reading that shows no room to the one that decides: what just died may still be going.
pub(crate) const SETTLE: Duration = Duration::from_secs(2);
/// A prediction that is off by more is said, in percent.
const TOLERANCE_PERCENT: u64 = 20;

/// Whether a worker that took `needed` bytes before fits beside all else.
///
/// `promised`: bytes that starting workers have not taken yet.
///
/// # Errors
/// Where it does not, the arithmetic as a fragment.
pub(crate) fn room(needed: u64, promised: u64, readings: &[Reading]) -> Result<(), String> {
    let tightest = readings.iter().min_by_key(|reading| reading.free());
    let Some(reading) = tightest else {
        return Ok(());
    };
    let free = reading.free().saturating_sub(promised);
    if needed <= free {
        return Ok(());
    }
    Err(format!(
        "its measured footprint of {} does not fit: {} of {} are used and {} promised to others",
        Size(needed),
        Size(reading.used),
        Size(reading.limit.bytes),
        Size(promised),
    ))
}

/// What to say of a prediction of `predicted` bytes, where it was wrong by more than is tolerated.
pub(crate) fn compare(predicted: u64, measured: u64) -> Option<String> {
    let off = predicted.abs_diff(measured);
    if u128::from(off) * 100 <= u128::from(predicted) * u128::from(TOLERANCE_PERCENT) {
        return None;
    }
    Some(format!(
        "the workers' footprint was predicted as {} and is {}: from now on the measured one counts",
        Size(predicted),
        Size(measured)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Limit, LimitOrigin};

    fn reading(used: u64, bytes: u64) -> Reading {
        Reading {
            used,
            limit: Limit {
                bytes,
                origin: LimitOrigin::Machine,
            },
        }
    }

    #[test]
    fn the_tightest_bound_less_what_is_promised_decides() {
        let readings = [reading(100, 1000), reading(100, 500)];
        assert_eq!(room(400, 0, &readings), Ok(()));
        let words = room(401, 0, &readings).unwrap_err();
        assert!(words.contains("401 B does not fit"), "{words}");
        assert!(room(400, 1, &readings).is_err());
        assert!(room(1, 0, &[reading(2000, 1000)]).is_err());
        assert_eq!(room(u64::MAX, u64::MAX, &[]), Ok(()));
    }

    #[test]
    fn a_prediction_is_mentioned_where_it_is_off_by_more_than_a_fifth() {
        assert_eq!(compare(100, 120), None);
        assert_eq!(compare(100, 80), None);
        assert!(compare(100, 121).is_some());
        assert!(compare(100, 79).is_some());
        assert!(compare(0, 1).is_some());
        assert_eq!(compare(u64::MAX, u64::MAX), None);
    }
}
