//! Which tokens stay in the draw: the k likeliest, and of those the nucleus, without a full sort.

use std::cmp::Ordering;

use proto::TokenId;

/// Values looked at together when most of them are too small to matter.
const CHUNK: u16 = 16;
/// Weights whose bits are equal without so many of the lowest are counted together: 32 classes an
/// octave.
const CLASS_SHIFT: u32 = 18;
/// The first guess at how many tokens hold the nucleus.
const NUCLEUS_GUESS: usize = 64;

/// A token and its logit, or its weight.
pub(super) type Scored = (TokenId, f32);

/// Best first; of equals the lower id. A total order, so that every selection has one answer.
fn better(a: &Scored, b: &Scored) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Best first.
pub(super) fn sort(scored: &mut [Scored]) {
    scored.sort_unstable_by(better);
}

/// The `k` largest of `values` into `out`, best first, without those at −∞.
pub(super) fn top_k(values: &[f32], k: usize, out: &mut Vec<Scored>) {
    out.clear();
    if k == 0 {
        return;
    }
    // Twice as many as wanted are gathered, then cut in half: each value is moved O(1) times.
    let room = k.saturating_mul(2).max(256);
    let mut bar = f32::NEG_INFINITY;
    let mut id: TokenId = 0;
    for chunk in values.chunks(usize::from(CHUNK)) {
        // Ids only rise, so a later equal of the k-th best can't displace it: `>` is enough.
        if chunk.iter().fold(false, |hit, &x| hit | (x > bar)) {
            for (offset, &x) in (0..).zip(chunk) {
                if x > bar {
                    out.push((id.saturating_add(offset), x));
                    if out.len() == room {
                        bar = keep(out, k);
                    }
                }
            }
        }
        id = id.saturating_add(TokenId::from(CHUNK));
    }
    if out.len() > k {
        keep(out, k);
    }
    out.sort_unstable_by(better);
}

/// Keeps the `k` best of more than `k`; gives the worst of them.
fn keep(out: &mut Vec<Scored>, k: usize) -> f32 {
    let (_, kth, _) = out.select_nth_unstable_by(k - 1, better);
    let bar = kth.1;
    out.truncate(k);
    bar
}

/// Cuts `best_first` to the smallest head whose weights sum to at least `needed`. False where even
/// all of them do not, which leaves them as they are.
pub(super) fn cut_to_nucleus(best_first: &mut Vec<Scored>, needed: f64) -> bool {
    let mut sum = 0.0;
    for n in 0..best_first.len() {
        sum += f64::from(best_first[n].1);
        if sum >= needed {
            best_first.truncate(n + 1);
            return true;
        }
    }
    false
}

/// The nucleus of a whole vocabulary's `weights`, in no particular order. Mostly it is small, and the
/// likeliest few are it; else it is counted out.
pub(super) fn nucleus(weights: &[f32], needed: f64, out: &mut Vec<Scored>) {
    top_k(weights, NUCLEUS_GUESS, out);
    if cut_to_nucleus(out, needed) {
        return;
    }
    let Some(last) = last_of_nucleus(weights, needed, out) else {
        // Rounding keeps the sum of all below what is needed: all are in.
        out.clear();
        out.extend((0..).zip(weights.iter().copied()));
        return;
    };
    out.clear();
    let all = (0..).zip(weights.iter().copied());
    out.extend(all.filter(|scored| better(scored, &last).is_le()));
}

/// The least likely token of a nucleus: weights are counted by their leading bits, which order them as
/// their values do, and only the class in which the sum is reached is sorted.
fn last_of_nucleus(weights: &[f32], needed: f64, scratch: &mut Vec<Scored>) -> Option<Scored> {
    let class = |weight: f32| (weight.max(0.0).to_bits() >> CLASS_SHIFT) as usize;
    let mut mass = vec![0.0_f64; class(f32::INFINITY) + 1];
    for &weight in weights {
        if let Some(mass) = mass.get_mut(class(weight)) {
            *mass += f64::from(weight);
        }
    }
    let mut above = 0.0;
    let reached = mass.iter().rposition(|mass| {
        let reached = above + mass >= needed;
        if !reached {
            above += mass;
        }
        reached
    })?;
    scratch.clear();
    let all = (0..).zip(weights.iter().copied());
    scratch.extend(all.filter(|&(_, weight)| class(weight) == reached));
    sort(scratch);
    scratch
        .iter()
        .find(|&&(_, weight)| {
            above += f64::from(weight);
            above >= needed
        })
        .or(scratch.last())
        .copied()
}

/// The place at which the running sum of `weights` passes `target`; the last positive weight where
/// rounding keeps the sum below it.
pub(super) fn walk(weights: impl Iterator<Item = f32>, target: f64) -> Option<usize> {
    let mut sum = 0.0;
    let mut last = None;
    for (at, weight) in weights.enumerate() {
        if weight > 0.0 {
            last = Some(at);
            sum += f64::from(weight);
            if sum > target {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::{Scored, better, cut_to_nucleus, nucleus, sort, top_k, walk};
    use proptest::prelude::*;

    fn sorted(values: &[f32]) -> Vec<Scored> {
        let mut all: Vec<Scored> = (0..)
            .zip(values.iter().copied())
            .filter(|s| s.1 > f32::NEG_INFINITY)
            .collect();
        all.sort_by(better);
        all
    }

    proptest! {
        #[test]
        fn the_k_best_are_those_of_a_full_sort(
            // Few distinct values, so that ties are the rule.
            values in proptest::collection::vec(
                prop_oneof![Just(f32::NEG_INFINITY), (-9_i8..9).prop_map(f32::from)], 0..2000),
            k in 0_usize..400,
        ) {
            let mut out = Vec::new();
            top_k(&values, k, &mut out);
            let mut expected = sorted(&values);
            expected.truncate(k);
            prop_assert_eq!(out, expected);
        }

        #[test]
        fn the_nucleus_is_that_of_a_full_sort(
            values in proptest::collection::vec(0.0_f32..1.0, 1..3000),
            share in 0.0_f64..1.0,
        ) {
            let total: f64 = values.iter().map(|&x| f64::from(x)).sum();
            let mut out = Vec::new();
            nucleus(&values, share * total, &mut out);
            sort(&mut out);
            let mut expected = sorted(&values);
            cut_to_nucleus(&mut expected, share * total);
            prop_assert_eq!(out, expected);
        }
    }

    #[test]
    fn of_equal_weights_the_lower_ids_are_in_the_nucleus_and_where_rounding_lacks_all_are() {
        let flat = vec![0.5; 1000];
        let mut out = Vec::new();
        nucleus(&flat, 100.0, &mut out);
        let ids: Vec<u32> = out.iter().map(|s| s.0).collect();
        assert_eq!(ids, (0..200).collect::<Vec<_>>());
        nucleus(&flat, 500.1, &mut out);
        assert_eq!(out.len(), 1000);
    }

    #[test]
    fn a_walk_ends_on_a_weight_that_is_not_zero() {
        assert_eq!(walk([0.0, 1.0, 0.0].into_iter(), 0.0), Some(1));
        assert_eq!(walk([0.0, 1.0, 0.0].into_iter(), 5.0), Some(1));
        assert_eq!(walk([0.0, 0.0].into_iter(), 0.0), None);
        assert_eq!(walk([1.0, 1.0].into_iter(), 1.0), Some(1));
    }
}
