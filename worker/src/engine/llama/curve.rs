//! How long a step takes with so many rows, as warm-up found it on a GPU.
//!
//! Kernels change with the number of rows, so that more can be faster: on an H200 eight rows of a 4-bit
//! model take 8.5 ms and nine take 7.5.

use std::time::Duration;

/// A larger step must be so much shorter to be taken, so that noise decides nothing.
const WORTH: f64 = 0.97;

/// Measured sizes and the seconds of a step of each, smallest first.
#[derive(Clone, Debug, Default)]
pub(super) struct Curve(Vec<(usize, f64)>);

impl Curve {
    /// The sizes to be measured for `slots` slots: each of the first sixteen, where the kernels
    /// change, then half as many again each time.
    pub(super) fn sizes(slots: usize) -> Vec<usize> {
        let mut sizes: Vec<usize> = (1..=slots.min(16)).collect();
        sizes.extend(
            std::iter::successors(Some(24), |n| Some(n + n / 2)).take_while(|&n| n < slots),
        );
        if slots > 16 {
            sizes.push(slots);
        }
        sizes
    }

    pub(super) fn new(measured: Vec<(usize, Duration)>) -> Self {
        let mut points: Vec<(usize, f64)> = measured
            .into_iter()
            .map(|(rows, took)| (rows, took.as_secs_f64()))
            .collect();
        points.sort_unstable_by_key(|p| p.0);
        Self(points)
    }

    /// Seconds of a pass over `rows` rows, by a line between the sizes measured; `None` beyond them.
    fn cost(&self, rows: usize) -> Option<f64> {
        let above = self.0.iter().position(|p| p.0 >= rows)?;
        let (high, high_s) = self.0[above];
        let Some(&(low, low_s)) = above.checked_sub(1).and_then(|n| self.0.get(n)) else {
            return Some(high_s);
        };
        let part = (rows - low) as f64 / (high - low) as f64;
        Some(low_s + part * (high_s - low_s))
    }

    /// One pass over two runs of rows and the gap between them is shorter than two passes.
    pub(super) fn joins(&self, before: usize, gap: usize, after: usize) -> bool {
        let joined = self.cost(before + gap + after);
        let apart = self.cost(before).zip(self.cost(after));
        joined.zip(apart).is_some_and(|(one, (a, b))| one < a + b)
    }

    /// Rows to be added to `rows` so that the step becomes shorter; 0 where it is best as it is.
    pub(super) fn missing(&self, rows: usize) -> usize {
        let Some(cost) = self.cost(rows) else {
            return 0;
        };
        let better = self.0.iter().filter(|p| p.0 > rows);
        better
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .filter(|p| p.1 < cost * WORTH)
            .map_or(0, |p| p.0 - rows)
    }
}

#[cfg(test)]
mod tests {
    use super::Curve;
    use std::time::Duration;

    /// Milliseconds as they were measured on an H200.
    fn h200() -> Curve {
        let points = [
            (1, 4238),
            (2, 4292),
            (3, 4890),
            (4, 5719),
            (6, 7092),
            (8, 8498),
            (9, 7508),
            (12, 7775),
            (16, 8177),
            (64, 15_514),
        ];
        let points = points.map(|(rows, us)| (rows, Duration::from_micros(us)));
        Curve::new(points.to_vec())
    }

    #[test]
    fn eight_rows_become_nine_and_others_stay() {
        let curve = h200();
        for (rows, missing) in [
            (1, 0),
            (4, 0),
            (6, 0),
            (7, 2),
            (8, 1),
            (9, 0),
            (16, 0),
            (64, 0),
        ] {
            assert_eq!(curve.missing(rows), missing, "{rows} rows");
        }
        assert_eq!(curve.missing(65), 0, "beyond what was measured");
        assert_eq!(Curve::default().missing(8), 0);
    }

    #[test]
    fn a_gap_is_closed_where_one_pass_is_shorter_than_two() {
        let curve = h200();
        assert!(curve.joins(1, 5, 1), "7.8 ms against twice 4.2");
        assert!(!curve.joins(1, 40, 1), "12 ms against twice 4.2");
        assert!(curve.joins(16, 8, 16));
        assert!(!curve.joins(32, 32, 32), "beyond what was measured");
        assert!(!Curve::default().joins(1, 1, 1));
    }

    #[test]
    fn sizes_begin_with_each_and_end_with_all_slots() {
        assert_eq!(Curve::sizes(3), [1, 2, 3]);
        let sizes = Curve::sizes(64);
        assert_eq!(sizes[15..], [16, 24, 36, 54, 64]);
    }
}
