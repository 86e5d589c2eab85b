//! Greedy tokens chosen where the logits are, so that only ids and one number a row leave the device.

use mlx_rs::error::Exception;
use mlx_rs::ops::indexing::{self, take_along_axis};
use mlx_rs::{Array, ops};
use proto::TokenId;

/// The rows of one pass that end in a token: some chosen on the device, the others' logits.
#[derive(Debug)]
pub(super) struct Rows {
    /// Whether each row's token is chosen on the device.
    greedy: Vec<bool>,
    best: Option<Best>,
    /// The rows that are not greedy, [rows, vocabulary].
    logits: Option<Array>,
}

#[derive(Debug)]
struct Best {
    ids: Array,
    /// The largest logit of each row, or NaN where one is not a number or infinite.
    tops: Array,
}

/// What is known of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Row<'a> {
    /// `None`: the model's output is no distribution.
    Chosen(Option<TokenId>),
    Logits(&'a [f32]),
}

impl Rows {
    /// Nothing is evaluated yet. `logits` in float32, one row for each of `greedy`.
    pub(super) fn new(logits: &Array, greedy: Vec<bool>) -> Result<Self, Exception> {
        let rows_where = |wanted: bool| -> Vec<i32> {
            let rows = (0..).zip(&greedy).filter(|(_, is)| **is == wanted);
            rows.map(|(row, _)| row).collect()
        };
        let part = |rows: &[i32]| -> Result<Option<Array>, Exception> {
            match i32::try_from(rows.len()).unwrap_or(i32::MAX) {
                0 => Ok(None),
                all if all == logits.dim(0) => Ok(Some(logits.clone())),
                some => logits
                    .take_axis(Array::from_slice(rows, &[some]), 0)
                    .map(Some),
            }
        };
        let best = part(&rows_where(true))?;
        Ok(Self {
            best: best.as_ref().map(Best::of).transpose()?,
            logits: part(&rows_where(false))?,
            greedy,
        })
    }

    /// What must be evaluated before [`Rows::read`].
    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        let best = self.best.iter().flat_map(|best| [&best.ids, &best.tops]);
        best.chain(&self.logits)
    }

    /// Hands each row to `take`, in order, with its number.
    pub(super) fn read(
        &self,
        vocabulary: usize,
        mut take: impl FnMut(usize, Row<'_>),
    ) -> Result<(), String> {
        let told = |e: &dyn std::fmt::Display| e.to_string();
        let (ids, tops) = match &self.best {
            Some(best) => (
                best.ids.try_as_slice::<u32>().map_err(|e| told(&e))?,
                best.tops.try_as_slice::<f32>().map_err(|e| told(&e))?,
            ),
            None => (&[][..], &[][..]),
        };
        let mut chosen = ids.iter().zip(tops);
        let flat = match &self.logits {
            Some(logits) => logits.try_as_slice::<f32>().map_err(|e| told(&e))?,
            None => &[],
        };
        let mut rows = flat.chunks_exact(vocabulary.max(1));
        for (number, is_greedy) in self.greedy.iter().enumerate() {
            let row = if *is_greedy {
                let (&id, &top) = chosen.next().ok_or("fewer ids than rows")?;
                Row::Chosen(top.is_finite().then_some(id))
            } else {
                Row::Logits(rows.next().ok_or("fewer logits than rows")?)
            };
            take(number, row);
        }
        Ok(())
    }
}

impl Best {
    fn of(logits: &Array) -> Result<Self, Exception> {
        // Of equal ones the first, as the shared sampler has it.
        let ids = indexing::argmax_axis(logits, -1, true)?;
        let tops = take_along_axis(logits, &ids, -1)?.squeeze_axes(&[-1])?;
        let ids = ids.squeeze_axes(&[-1])?;
        // False for a number that is none, too.
        let sound = logits
            .lt(Array::from_f32(f32::INFINITY))?
            .all_axis(-1, false)?;
        let tops = ops::select(&sound, &tops, Array::from_f32(f32::NAN))?;
        Ok(Self { ids, tops })
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::transforms;

    use super::*;
    use crate::sampler::Sampler;

    fn read(values: &[f32], width: i32, greedy: &[bool]) -> Vec<Result<Option<TokenId>, Vec<f32>>> {
        let rows = i32::try_from(values.len()).unwrap() / width;
        let logits = Array::from_slice(values, &[rows, width]);
        let rows = Rows::new(&logits, greedy.to_vec()).unwrap();
        transforms::eval(rows.arrays()).unwrap();
        let mut found = Vec::new();
        rows.read(usize::try_from(width).unwrap(), |number, row| {
            assert_eq!(number, found.len());
            found.push(match row {
                Row::Chosen(id) => Ok(id),
                Row::Logits(logits) => Err(logits.to_vec()),
            });
        })
        .unwrap();
        found
    }

    #[test]
    fn greedy_rows_leave_as_ids_and_the_others_as_logits_each_in_its_place() {
        let values = [0.0, 2.0, 1.0, 5.0, 4.0, 3.0, 7.0, 8.0, 9.0];
        let found = read(&values, 3, &[true, false, true]);
        assert_eq!(found, [Ok(Some(1)), Err(vec![5.0, 4.0, 3.0]), Ok(Some(2))]);
        assert_eq!(read(&values, 3, &[true; 3])[1], Ok(Some(0)));
        assert_eq!(read(&values, 3, &[false; 3])[2], Err(vec![7.0, 8.0, 9.0]));
    }

    #[test]
    fn the_devices_choice_is_the_shared_samplers_in_ties_and_in_rows_that_are_none() {
        let greedy = proto::generate::Sampling {
            temperature: 0.0,
            ..proto::generate::Sampling::default()
        };
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for row in [
            [1.0, 3.0, 3.0, 2.0],
            [-inf, -5.0, -inf, -5.0],
            [0.0, -0.0, 0.0, -1.0],
            [1.0, nan, 3.0, 2.0],
            [nan, nan, nan, nan],
            [1.0, inf, 3.0, 2.0],
            [-inf, -inf, -inf, -inf],
        ] {
            let mut sampler = Sampler::new(&greedy, None, &[], &[]);
            assert!(sampler.is_argmax());
            let wanted = sampler.sample(&row, 0).ok().map(|sampled| sampled.token);
            assert_eq!(read(&row, 4, &[true]), [Ok(wanted)], "{row:?}");
        }
    }
}
