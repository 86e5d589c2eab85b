//! Two arms' runs become: faster, slower, or no difference shown.

use serde::Serialize;

use crate::cell::{Figures, Measured};
use crate::statistics::{Interval, figure, median, paired_ratio_interval, ratio_interval};

/// Fewer runs of each arm than this show nothing.
pub const RUNS_MIN: usize = 5;

/// What a comparison shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The whole interval lies on the better side.
    Better,
    /// The whole interval lies on the worse side.
    Worse,
    /// The interval holds 1.
    NoDifferenceShown,
    TooFewRuns {
        runs: usize,
    },
}

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    Higher,
    Lower,
}

/// One figure of both arms.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    pub what: &'static str,
    pub a: f64,
    pub b: f64,
    /// b / a.
    pub ratio: Option<Interval>,
    pub verdict: Verdict,
}

/// One value of a run.
type Metric = fn(&Figures) -> Option<f64>;

/// Judges b against a, one value for each run. `paired`: run i of both was made side by side.
#[must_use]
pub fn judge(
    a: &[f64],
    b: &[f64],
    better: Better,
    paired: bool,
    seed: u64,
) -> (Option<Interval>, Verdict) {
    let ratio = if paired && a.len() == b.len() {
        paired_ratio_interval(a, b, median, seed)
    } else {
        ratio_interval(a, b, median, seed)
    };
    let runs = a.len().min(b.len());
    let verdict = match ratio {
        _ if runs < RUNS_MIN => Verdict::TooFewRuns { runs },
        Some(ratio) if ratio.low > 1.0 && better == Better::Higher => Verdict::Better,
        Some(ratio) if ratio.high < 1.0 && better == Better::Lower => Verdict::Better,
        Some(ratio) if ratio.high < 1.0 || ratio.low > 1.0 => Verdict::Worse,
        _ => Verdict::NoDifferenceShown,
    };
    (ratio, verdict)
}

/// Compares the runs of arm `b` with those of arm `a`.
#[must_use]
pub fn compare(
    cells_a: &[&Measured],
    cells_b: &[&Measured],
    paired: bool,
    seed: u64,
) -> Vec<Comparison> {
    let figures = |cells: &[&Measured]| -> Vec<Figures> {
        cells
            .iter()
            .map(|cell| Figures::of(&cell.samples))
            .collect()
    };
    let (a, b) = (figures(cells_a), figures(cells_b));
    let metrics: [(&'static str, Better, Metric); 5] = [
        ("aggregate tok/s", Better::Higher, |one| {
            Some(one.aggregate_tokens_per_s)
        }),
        ("TTFT p50 ms", Better::Lower, |one| median(&one.ttft_ms)),
        ("TPOT p50 ms", Better::Lower, |one| median(&one.tpot_ms)),
        ("total p50 ms", Better::Lower, |one| median(&one.total_ms)),
        ("largest gap ms", Better::Lower, |one| Some(one.gap_ms_max)),
    ];
    let compared = metrics.into_iter().map(|(what, better, of)| {
        let values = |runs: &[Figures]| -> Vec<f64> { runs.iter().filter_map(of).collect() };
        let (a, b) = (values(&a), values(&b));
        let (ratio, verdict) = judge(&a, &b, better, paired, seed);
        Comparison {
            what,
            a: median(&a).unwrap_or(f64::NAN),
            b: median(&b).unwrap_or(f64::NAN),
            ratio,
            verdict,
        }
    });
    compared.collect()
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Better => out.write_str("better"),
            Self::Worse => out.write_str("worse"),
            Self::NoDifferenceShown => out.write_str("no difference shown"),
            Self::TooFewRuns { runs } => write!(out, "too few runs ({runs} < {RUNS_MIN})"),
        }
    }
}

/// As a table.
#[must_use]
pub fn markdown(name_a: &str, name_b: &str, compared: &[Comparison]) -> String {
    let mut text = format!(
        "| median of runs | {name_a} | {name_b} | {name_b} / {name_a} [95 %] | {name_b} is |\n|---|---|---|---|---|\n"
    );
    for one in compared {
        let ratio = one
            .ratio
            .map_or_else(|| "-".into(), |ratio| ratio.to_string());
        text.push_str(&format!(
            "| {} | {} | {} | {ratio} | {} |\n",
            one.what,
            figure(one.a),
            figure(one.b),
            one.verdict
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clear_difference_is_shown_and_noise_is_not() {
        let a = [100.0, 101.0, 99.0, 100.5, 100.2, 99.7];
        let faster = a.map(|value| value * 1.05);
        let verdict = |b: &[f64], better| judge(&a, b, better, true, 1).1;
        assert_eq!(verdict(&faster, Better::Higher), Verdict::Better);
        assert_eq!(verdict(&faster, Better::Lower), Verdict::Worse);
        assert_eq!(
            verdict(&a.map(|value| value * 0.9), Better::Lower),
            Verdict::Better
        );
        let noise = [101.0, 99.5, 100.1, 99.9, 100.9, 99.2];
        assert_eq!(verdict(&noise, Better::Higher), Verdict::NoDifferenceShown);
        assert_eq!(
            judge(&a[..4], &faster[..4], Better::Higher, true, 1).1,
            Verdict::TooFewRuns { runs: 4 }
        );
    }

    #[test]
    fn pairs_show_what_a_common_drift_would_hide() {
        let a = [100.0, 80.0, 120.0, 90.0, 110.0, 70.0, 130.0];
        let b = a.map(|value| value * 1.02);
        assert_eq!(judge(&a, &b, Better::Higher, true, 1).1, Verdict::Better);
        assert_eq!(
            judge(&a, &b, Better::Higher, false, 1).1,
            Verdict::NoDifferenceShown
        );
    }
}
