//! Which rows share the next step: a pure function of who waits for what.

/// What one live slot waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Want {
    pub(super) slot: usize,
    /// Where its next token goes.
    pub(super) position: usize,
    /// Tokens known and not computed: at least 1.
    pub(super) pending: usize,
    /// Its prompt is through: `pending` is 1, and that is its last sampled token.
    pub(super) decoding: bool,
    /// The order of admission.
    pub(super) order: u64,
    /// It steps alone, by as many tokens at most.
    pub(super) alone: Option<usize>,
}

/// What one slot computes in this step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) slot: usize,
    pub(super) position: usize,
    pub(super) count: usize,
    /// All that is known is then computed: the next token can be chosen.
    pub(super) completes: bool,
    pub(super) decoding: bool,
}

/// Remembers whose turn it was, so that rows that step alone and the others alternate.
#[derive(Debug, Default)]
pub(super) struct Turn {
    alone_last: bool,
    last_alone: Option<u64>,
}

impl Turn {
    /// The rows of the next step: every decoding slot and, first come first served, prompt tokens up
    /// to `chunk`, `room` rows in all; or one slot alone.
    pub(super) fn plan(&mut self, wants: &[Want], chunk: usize, room: usize) -> Vec<Row> {
        let shared = wants.iter().any(|w| w.alone.is_none());
        let alone = self.next_alone(wants);
        self.alone_last = match alone {
            Some(_) => !(shared && self.alone_last),
            None => false,
        };
        if let (Some(want), true) = (alone, self.alone_last) {
            self.last_alone = Some(want.order);
            return vec![row(
                want,
                want.pending.min(want.alone.unwrap_or(1)).min(room),
            )];
        }
        let mut rows: Vec<Row> = wants
            .iter()
            .filter(|w| w.alone.is_none() && w.decoding)
            .take(room)
            .map(|w| row(w, 1))
            .collect();
        let mut waiting: Vec<&Want> = wants
            .iter()
            .filter(|w| w.alone.is_none() && !w.decoding)
            .collect();
        waiting.sort_by_key(|w| w.order);
        let mut budget = chunk.max(1).min(room - rows.len().min(room));
        for want in waiting {
            let count = want.pending.min(budget);
            if count == 0 {
                break;
            }
            budget -= count;
            rows.push(row(want, count));
        }
        rows
    }

    /// Of those that step alone the one after the last that did, in order of admission.
    fn next_alone<'w>(&self, wants: &'w [Want]) -> Option<&'w Want> {
        let lone = || wants.iter().filter(|w| w.alone.is_some());
        lone()
            .filter(|w| self.last_alone.is_some_and(|last| w.order > last))
            .min_by_key(|w| w.order)
            .or_else(|| lone().min_by_key(|w| w.order))
    }
}

fn row(want: &Want, count: usize) -> Row {
    Row {
        slot: want.slot,
        position: want.position,
        count,
        completes: count == want.pending,
        decoding: want.decoding,
    }
}

/// Whether llama.cpp can be given these rows. It ends the process on what it does not accept, so
/// whatever a fault of ours could make of a batch is looked for here.
pub(super) fn check(
    rows: &[Row],
    slots: usize,
    room: usize,
    context: usize,
) -> Result<(), &'static str> {
    let mut taken = vec![false; slots];
    let mut total = 0_usize;
    for row in rows {
        match taken.get_mut(row.slot) {
            None => return Err("a row's slot does not exist"),
            Some(true) => return Err("a slot has two rows"),
            Some(free) => *free = true,
        }
        if row.count == 0 {
            return Err("a row is empty");
        }
        total = total.saturating_add(row.count);
        if row.position.saturating_add(row.count) > context {
            return Err("a row leaves its context");
        }
    }
    if total == 0 || total > room {
        return Err("the batch is empty or too large");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Row, Turn, Want, check};
    use proptest::prelude::*;

    fn decoding(slot: usize) -> Want {
        Want {
            slot,
            position: 9,
            pending: 1,
            decoding: true,
            order: slot as u64,
            alone: None,
        }
    }

    fn prefilling(slot: usize, pending: usize) -> Want {
        Want {
            decoding: false,
            pending,
            position: 0,
            ..decoding(slot)
        }
    }

    #[test]
    fn decoding_rows_and_prompt_tokens_share_a_step_first_come_first_served() {
        let wants = [
            prefilling(2, 10),
            decoding(0),
            prefilling(1, 12),
            decoding(3),
        ];
        let rows = Turn::default().plan(&wants, 16, 512);
        let shares: Vec<(usize, usize, bool)> = rows
            .iter()
            .map(|r| (r.slot, r.count, r.completes))
            .collect();
        assert_eq!(
            shares,
            [(0, 1, true), (3, 1, true), (1, 12, true), (2, 4, false)]
        );
    }

    #[test]
    fn rows_that_step_alone_alternate_with_the_others_and_take_turns() {
        let mut turn = Turn::default();
        let alone = |slot| Want {
            alone: Some(32),
            ..decoding(slot)
        };
        let wants = [decoding(0), alone(1), alone(2), decoding(3)];
        let seen: Vec<Vec<usize>> = (0..6)
            .map(|_| turn.plan(&wants, 16, 512).iter().map(|r| r.slot).collect())
            .collect();
        assert_eq!(
            seen,
            [
                vec![1],
                vec![0, 3],
                vec![2],
                vec![0, 3],
                vec![1],
                vec![0, 3]
            ]
        );
        // Without others they only take turns, in fixed chunks.
        let wants = [Want {
            alone: Some(32),
            ..prefilling(5, 70)
        }];
        assert_eq!(turn.plan(&wants, 500, 512)[0].count, 32);
        assert_eq!(turn.plan(&wants, 500, 512)[0].count, 32);
    }

    #[test]
    fn a_bad_batch_is_refused() {
        let good = Row {
            slot: 0,
            position: 0,
            count: 4,
            completes: true,
            decoding: false,
        };
        assert_eq!(check(&[good], 1, 4, 4), Ok(()));
        for bad in [
            vec![],
            vec![good, good],
            vec![Row { slot: 1, ..good }],
            vec![Row { count: 0, ..good }],
            vec![Row {
                position: 1,
                ..good
            }],
            vec![Row {
                position: usize::MAX,
                ..good
            }],
            vec![Row { count: 5, ..good }],
        ] {
            assert!(check(&bad, 1, 4, 4).is_err(), "{bad:?}");
        }
    }

    prop_compose! {
        fn a_want(slot: usize)(
            pending in 1_usize..600,
            decodes in any::<bool>(),
            order in any::<u64>(),
            alone in proptest::option::of(1_usize..64),
        ) -> Want {
            let pending = if decodes { 1 } else { pending };
            Want { slot, position: 3, pending, decoding: decodes, order, alone }
        }
    }

    proptest! {
        #[test]
        fn every_plan_is_a_batch_that_can_go_down_and_something_always_moves(
            wants in (0_usize..9).prop_flat_map(|n| (0..n).map(a_want).collect::<Vec<_>>()),
            chunk in 0_usize..900,
            more in 0_usize..500,
        ) {
            let room = 9 + more;
            let mut turn = Turn::default();
            for _ in 0..4 {
                let rows = turn.plan(&wants, chunk, room);
                prop_assert_eq!(rows.is_empty(), wants.is_empty());
                if !rows.is_empty() {
                    prop_assert_eq!(check(&rows, 9, room, 1000), Ok(()));
                }
                let prefilled: usize = rows.iter().filter(|r| !r.decoding).map(|r| r.count).sum();
                prop_assert!(prefilled <= chunk.max(1) || rows.len() == 1);
            }
        }
    }
}
