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
    /// Stands in for a slot that has nothing to do; what it computes is thrown away.
    pub(super) filler: bool,
    /// Tokens behind the row's own that are computed and thrown away.
    pub(super) padding: usize,
}

impl Row {
    /// Tokens that it takes in the batch.
    pub(super) fn length(&self) -> usize {
        self.count + self.padding
    }
}

/// Remembers whose turn it was, so that rows that step alone and the others alternate.
#[derive(Debug, Default)]
pub(super) struct Turn {
    alone_last: bool,
    last_alone: Option<u64>,
}

impl Turn {
    /// The rows of the next step: every decoding slot and, first come first served, prompt tokens up
    /// to `chunk`, `room` rows in all; or one slot alone. `whole`: a prompt that fits in one chunk
    /// waits for the next one rather than to be cut.
    pub(super) fn plan(
        &mut self,
        wants: &[Want],
        chunk: usize,
        room: usize,
        whole: bool,
    ) -> Vec<Row> {
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
        let full = budget;
        for want in waiting {
            let count = want.pending.min(budget);
            let cut = count < want.pending && want.pending <= full;
            if count == 0 || (whole && cut) {
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
        filler: false,
        padding: 0,
    }
}

/// Puts the rows in the order of their slots, and filler rows in the slots of a gap between two runs of
/// them where that pays: llama.cpp makes a pass of its own after each gap. `joins` is asked with the
/// length of a run, of the gap, and of the run after it. `position` is where a slot's next token would
/// go; `None`: it has no room for one.
pub(super) fn fill(
    rows: &mut Vec<Row>,
    room: usize,
    joins: impl Fn(usize, usize, usize) -> bool,
    position: impl Fn(usize) -> Option<usize>,
) {
    rows.sort_unstable_by_key(|r| r.slot);
    let mut total: usize = rows.iter().map(|r| r.count).sum();
    let mut fillers = Vec::new();
    let mut before = 0;
    let mut runs = rows
        .chunk_by(|a, b| a.slot + 1 == b.slot)
        .filter_map(|run| Some((run.first()?.slot, run.last()?.slot)))
        .peekable();
    while let Some((first, last)) = runs.next() {
        before += last + 1 - first;
        let Some(&(next, end)) = runs.peek() else {
            break;
        };
        let gap = last + 1..next;
        let positions: Option<Vec<usize>> = gap.clone().map(&position).collect();
        let (Some(positions), true, true) = (
            positions,
            total + gap.len() <= room,
            joins(before, gap.len(), end + 1 - next),
        ) else {
            before = 0;
            continue;
        };
        total += gap.len();
        before += gap.len();
        fillers.extend(gap.zip(positions).map(|(slot, at)| filler(slot, at)));
    }
    rows.extend(fillers);
    rows.sort_unstable_by_key(|r| r.slot);
}

/// Adds `missing` filler rows behind (or before) rows that are one run of a single token each, so that
/// the step has a size at which it is faster. The rows are in the order of their slots.
pub(super) fn round_up(
    rows: &mut Vec<Row>,
    missing: impl Fn(usize) -> usize,
    position: impl Fn(usize) -> Option<usize>,
) {
    let (Some(first), Some(last)) = (rows.first(), rows.last()) else {
        return;
    };
    let one_run = last.slot + 1 - first.slot == rows.len();
    if !one_run || rows.iter().any(|r| r.count != 1) {
        return;
    }
    let wanted = missing(rows.len());
    let behind = last.slot + 1..;
    let before = (0..first.slot).rev();
    let mut fillers: Vec<Row> = behind
        .map_while(|slot| Some(filler(slot, position(slot)?)))
        .take(wanted)
        .collect();
    let left = wanted - fillers.len();
    fillers.extend(
        before
            .map_while(|slot| Some(filler(slot, position(slot)?)))
            .take(left),
    );
    if fillers.len() == wanted {
        rows.extend(fillers);
        rows.sort_unstable_by_key(|r| r.slot);
    }
}

fn filler(slot: usize, position: usize) -> Row {
    Row {
        slot,
        position,
        count: 1,
        completes: false,
        decoding: false,
        filler: true,
        padding: 0,
    }
}

/// Makes prompts in neighbouring slots equally long, where the padding costs less than the passes that
/// it spares: llama.cpp takes as many tokens of each slot in one pass as the shortest has left, and
/// makes further passes of the rest. `price`: prompt tokens that a pass of its own costs. The rows are
/// in the order of their slots.
pub(super) fn pad(rows: &mut [Row], price: usize, room: usize, context: usize) {
    let mut total: usize = rows.iter().map(Row::length).sum();
    let prompt = |row: &Row| !row.decoding && !row.filler && row.count > 1;
    for run in rows.chunk_by_mut(|a, b| prompt(a) && prompt(b) && a.slot + 1 == b.slot) {
        let longest = run.iter().map(|r| r.count).max().unwrap_or(0);
        let shorter = run.iter().filter(|r| r.count < longest).count();
        let padding: usize = run.iter().map(|r| longest - r.count).sum();
        let fits = run.iter().all(|r| r.position + longest <= context);
        if padding > shorter * price || total + padding > room || !fits {
            continue;
        }
        total += padding;
        for row in run {
            row.padding = longest - row.count;
        }
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
        let length = row.count.saturating_add(row.padding);
        total = total.saturating_add(length);
        if row.position.saturating_add(length) > context {
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
    use super::{Row, Turn, Want, check, fill, pad, round_up};
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
        let rows = Turn::default().plan(&wants, 16, 512, false);
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
            .map(|_| {
                turn.plan(&wants, 16, 512, false)
                    .iter()
                    .map(|r| r.slot)
                    .collect()
            })
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
        assert_eq!(turn.plan(&wants, 500, 512, false)[0].count, 32);
        assert_eq!(turn.plan(&wants, 500, 512, false)[0].count, 32);
    }

    #[test]
    fn gaps_that_pay_are_filled_and_others_are_not() {
        let filled = |longest, room, full: Option<usize>| {
            let wants = [decoding(7), decoding(0), decoding(2), decoding(3)];
            let mut rows = Turn::default().plan(&wants, 16, 64, false);
            fill(
                &mut rows,
                room,
                |_, gap, _| gap <= longest,
                |slot| (Some(slot) != full).then_some(slot * 10),
            );
            assert_eq!(check(&rows, 8, 64, 512), Ok(()));
            let fillers = rows.iter().filter(|r| r.filler);
            fillers.map(|r| (r.slot, r.position)).collect::<Vec<_>>()
        };
        assert_eq!(filled(0, 64, None), []);
        assert_eq!(filled(1, 64, None), [(1, 10)]);
        assert_eq!(filled(3, 64, None), [(1, 10), (4, 40), (5, 50), (6, 60)]);
        assert_eq!(filled(3, 6, None), [(1, 10)], "no room in the batch");
        assert_eq!(filled(3, 64, Some(5)), [(1, 10)], "no room in a slot");
    }

    #[test]
    fn runs_are_joined_with_what_was_joined_before() {
        let wants = [decoding(0), decoding(2), decoding(3), decoding(6)];
        let mut rows = Turn::default().plan(&wants, 16, 64, false);
        let asked = std::cell::RefCell::new(Vec::new());
        fill(
            &mut rows,
            64,
            |before, gap, after| {
                asked.borrow_mut().push((before, gap, after));
                gap < 2
            },
            Some,
        );
        assert_eq!(asked.into_inner(), [(1, 1, 2), (4, 2, 1)]);
    }

    #[test]
    fn rows_of_a_slow_number_get_company_where_there_are_neighbouring_slots() {
        let rounded = |slots: std::ops::Range<usize>, missing: usize| {
            let wants: Vec<Want> = slots.map(decoding).collect();
            let mut rows = Turn::default().plan(&wants, 16, 64, false);
            round_up(&mut rows, |_| missing, |slot| (slot < 8).then_some(5));
            assert_eq!(check(&rows, 8, 64, 512), Ok(()));
            rows.iter().map(|r| (r.slot, r.filler)).collect::<Vec<_>>()
        };
        assert_eq!(rounded(0..2, 1), [(0, false), (1, false), (2, true)]);
        assert_eq!(rounded(6..8, 1), [(5, true), (6, false), (7, false)]);
        assert_eq!(rounded(1..7, 2).len(), 8);
        assert_eq!(rounded(1..7, 3).len(), 6, "there are only two");
        assert_eq!(rounded(0..2, 0).len(), 2);
        let mut apart = Turn::default().plan(&[decoding(0), decoding(2)], 16, 64, false);
        round_up(&mut apart, |_| 1, Some);
        assert_eq!(apart.len(), 2, "they are no run");
        let mut prompt = Turn::default().plan(&[prefilling(0, 9)], 16, 64, false);
        round_up(&mut prompt, |_| 1, Some);
        assert_eq!(prompt.len(), 1, "a prompt is no single token");
    }

    #[test]
    fn neighbouring_prompts_become_equally_long_where_that_is_cheaper_than_a_pass() {
        let padded = |counts: &[usize], price, room, start| {
            let want = |(n, &count)| Want {
                position: if n == 0 { start } else { 0 },
                ..prefilling(n, count)
            };
            let wants: Vec<Want> = (0..).zip(counts).map(want).collect();
            let mut rows = Turn::default().plan(&wants, 500, room, true);
            pad(&mut rows, price, room, 120);
            assert_eq!(check(&rows, 8, room, 120), Ok(()));
            rows.iter().map(|r| r.padding).collect::<Vec<_>>()
        };
        assert_eq!(padded(&[90, 100, 96], 10, 512, 20), [10, 0, 4]);
        assert_eq!(padded(&[90, 100, 96], 6, 512, 0), [0, 0, 0], "too dear");
        assert_eq!(padded(&[90, 100, 96], 10, 290, 0), [0, 0, 0], "no room");
        assert_eq!(padded(&[90, 100, 96], 10, 512, 21), [0, 0, 0], "no context");
        assert_eq!(padded(&[90, 1, 96], 500, 512, 0), [0, 0, 0], "a gap");
        assert_eq!(padded(&[90, 100], 0, 512, 0), [0, 0], "on a CPU");
    }

    #[test]
    fn a_prompt_that_fits_in_one_chunk_is_not_cut_where_cutting_costs_a_pass() {
        let counts = |wants: &[Want], whole| {
            let rows = Turn::default().plan(wants, 100, 512, whole);
            rows.iter().map(|r| r.count).collect::<Vec<_>>()
        };
        let short = [prefilling(0, 60), prefilling(1, 60)];
        assert_eq!(counts(&short, true), [60]);
        assert_eq!(counts(&short, false), [60, 40]);
        // One that fits in none is cut, wherever it stands.
        let long = [prefilling(0, 60), prefilling(1, 300)];
        assert_eq!(counts(&long, true), [60, 40]);
        assert_eq!(counts(&long[1..], true), [100]);
    }

    #[test]
    fn a_bad_batch_is_refused() {
        let good = Row {
            slot: 0,
            position: 0,
            count: 4,
            completes: true,
            decoding: false,
            filler: false,
            padding: 0,
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
            vec![Row { padding: 1, ..good }],
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
            price in 0_usize..100,
        ) {
            let room = 9 + more;
            let mut turn = Turn::default();
            for _ in 0..4 {
                let mut rows = turn.plan(&wants, chunk, room, price > 0);
                rows.sort_unstable_by_key(|r| r.slot);
                pad(&mut rows, price, room, 1000);
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
