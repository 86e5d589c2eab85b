//! The verdict in words: what more instances and more slots cost and bring, what to run, how much load meets
//! the limits, and which engine for which work.

use super::markdown::Slo;
use super::rows::{Row, rows};
use crate::ceiling;
use crate::cell::Measured;
use crate::statistics::{
    Interval, figure, interpolated, median, paired_ratio_interval, ratio_interval, samples_needed,
};
use crate::verdict::RUNS_MIN;

/// All that the cells can answer, a sentence a line; empty where they answer nothing.
#[must_use]
pub fn verdict(cells: &[Measured], slo: Slo, seed: u64) -> Vec<String> {
    let rows = rows(cells);
    let warm: Vec<&Row> = rows.iter().filter(|row| !row.cell.cold).collect();
    let mut arms: Vec<&str> = warm.iter().map(|row| row.cell.arm.as_str()).collect();
    arms.dedup();
    let mut words = Vec::new();
    for arm in &arms {
        let mine: Vec<&Row> = warm
            .iter()
            .filter(|row| row.cell.arm == *arm)
            .copied()
            .collect();
        let several = arms.len() > 1;
        let mut say = |text: Option<String>| {
            words.extend(text.map(|text| {
                if several {
                    format!("{arm}: {text}")
                } else {
                    text
                }
            }));
        };
        say(sizes(&mine, seed));
        say(knee(&mine, seed));
        say(advice(&mine));
        for text in concurrency(&mine, slo) {
            say(Some(text));
        }
        say(saturation(&mine));
    }
    words.extend(engines(&warm, &arms, seed));
    words
}

/// b / a of the aggregates; by pairs where both have the same repeats.
fn ratio(base: &Row, row: &Row, seed: u64) -> Option<Interval> {
    let (a, b) = (base.rates(), row.rates());
    if a.len() == b.len() && base.marks.is_empty() && row.marks.is_empty() {
        paired_ratio_interval(&a, &b, median, seed)
    } else {
        ratio_interval(&a, &b, median, seed)
    }
}

fn times(interval: Interval, runs: usize) -> String {
    let Interval {
        estimate,
        low,
        high,
    } = interval;
    if runs < 3 {
        format!("{estimate:.2}×")
    } else {
        format!("{estimate:.2}× ({low:.2}–{high:.2})")
    }
}

/// A size, how it compares to one instance with one slot under the same load, and what it holds.
struct Compared<'a> {
    row: &'a Row,
    ratio: Interval,
    memory: Option<f64>,
}

fn sizes(rows: &[&Row], seed: u64) -> Option<String> {
    // The load under which most sizes ran, of these the highest.
    let mut loads: Vec<u32> = rows.iter().filter_map(|row| row.concurrency()).collect();
    loads.sort_unstable();
    let load = loads.iter().copied().max_by_key(|load| {
        let count = loads.iter().filter(|one| *one == load).count();
        (count, *load)
    })?;
    let mine: Vec<&Row> = rows
        .iter()
        .filter(|row| row.concurrency() == Some(load) && row.cell.size.is_some())
        .copied()
        .collect();
    let base = mine.iter().find(|row| row.places() == (1, 1))?;
    if base.sound.is_empty() && mine.len() > 1 {
        return Some(
            "No verdict on sizes: every run of one instance with one slot is marked.".into(),
        );
    }
    let held = base.footprint_bytes();
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^52 bytes")]
    let memory = |row: &Row| {
        let (row, base) = row.footprint_bytes().zip(held)?;
        (base > 0).then(|| row as f64 / base as f64)
    };
    let compared: Vec<Compared<'_>> = mine
        .iter()
        .filter(|row| row.places() != (1, 1))
        .filter_map(|row| {
            Some(Compared {
                row,
                ratio: ratio(base, row, seed)?,
                memory: memory(row),
            })
        })
        .collect();
    if compared.is_empty() {
        return None;
    }
    let runs = mine.iter().map(|row| row.rates().len()).min()?;
    let best = |of: fn(&Row) -> bool| {
        compared
            .iter()
            .filter(|one| of(one.row))
            .max_by(|a, b| a.ratio.estimate.total_cmp(&b.ratio.estimate))
    };
    let mut parts = Vec::new();
    if let Some(one) = best(|row| row.places().0 > 1 && row.places().1 == 1) {
        let costs = one.memory.map_or_else(
            || "brings".to_owned(),
            |memory| format!("costs {memory:.1}× the memory for"),
        );
        parts.push(format!(
            "K={} {costs} {} the tokens",
            one.row.places().0,
            times(one.ratio, runs)
        ));
    }
    if let Some(one) = best(|row| row.places().0 == 1) {
        let memory = one
            .memory
            .map_or_else(String::new, |memory| format!(" at {memory:.1}× the memory"));
        parts.push(format!(
            "slots={} on one instance gives {}{memory}",
            one.row.places().1,
            times(one.ratio, runs)
        ));
    }
    if let Some(one) = best(|row| row.places().0 > 1 && row.places().1 > 1) {
        let (instances, slots) = one.row.places();
        parts.push(format!(
            "K={instances} with slots={slots} gives {}",
            times(one.ratio, runs)
        ));
    }
    let (instances, slots) = recommended(&compared, runs);
    let few = if runs < RUNS_MIN {
        let s = if runs == 1 { "" } else { "s" };
        format!(" ({runs} run{s} of each: an indication, not a verdict, which takes {RUNS_MIN})")
    } else {
        String::new()
    };
    Some(format!(
        "At {load} requests in flight, against one instance with one slot: {}: run `--instances {instances} --slots {slots}`{few}.",
        parts.join("; ")
    ))
}

/// Where batching stops being free, of one instance.
fn knee(rows: &[&Row], seed: u64) -> Option<String> {
    let loads = rows.iter().filter_map(|row| row.concurrency());
    let load = loads.max()?;
    let mine: Vec<&Row> = rows
        .iter()
        .filter(|row| row.concurrency() == Some(load))
        .copied()
        .collect();
    let Interval {
        estimate,
        low,
        high,
    } = ceiling::knee(&mine, seed)?;
    let most = mine.iter().map(|row| row.places().1.min(load)).max()?;
    Some(if estimate < 1.1 {
        "one instance is compute-bound from the first stream on: a batch takes about as long as its streams would one after another.".into()
    } else if estimate >= f64::from(most) * 0.95 {
        format!("batching costs nothing yet at {most} streams: more slots may bring more.")
    } else {
        format!(
            "batching is free up to about {estimate:.1} streams ({low:.1}–{high:.1}) of one instance; beyond, a step takes longer in proportion."
        )
    })
}

/// What the server of the largest size says would help.
fn advice(rows: &[&Row]) -> Option<String> {
    let row = rows
        .iter()
        .filter(|row| row.server.is_some())
        .max_by_key(|row| row.places())?;
    let advice = row.server.as_ref()?.advice()?;
    let (instances, slots) = row.places();
    Some(format!("at {instances}×{slots} the server said: {advice}"))
}

/// Of the sizes that are not shown to be slower than the fastest, that with the fewest instances, then slots.
fn recommended(compared: &[Compared<'_>], runs: usize) -> (u32, u32) {
    let fastest = compared
        .iter()
        .max_by(|a, b| a.ratio.estimate.total_cmp(&b.ratio.estimate));
    let Some(fastest) = fastest else {
        return (1, 1);
    };
    // With fewer than three runs an interval is a point or two, and 2 % stand for it.
    let floor = |one: &Compared<'_>| {
        if runs < 3 {
            one.ratio.estimate * 0.98
        } else {
            one.ratio.low
        }
    };
    let enough = floor(fastest);
    let near = compared
        .iter()
        .filter(|one| one.ratio.estimate >= enough)
        .map(|one| one.row.places());
    let mut all: Vec<(u32, u32)> = near.collect();
    if enough <= 1.0 {
        all.push((1, 1));
    }
    all.into_iter().min().unwrap_or((1, 1))
}

/// What the samples of one row say about the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meets {
    /// p95 lies within both limits.
    Shown,
    /// Too few for p95, but all lie within.
    AllOf(usize),
    /// p95 lies beyond, or too few for it and more than a twentieth lie beyond.
    No,
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn meets(row: &Row, slo: Slo) -> Meets {
    let figures = &row.figures;
    if figures.requests == 0 || figures.done < figures.requests {
        // A refused or failed request missed, whatever the others did.
        let missed = figures.requests - figures.done;
        if missed as f64 * 20.0 >= figures.requests as f64 {
            return Meets::No;
        }
    }
    let at = |q: f64| {
        interpolated(&figures.ttft_ms, q).is_some_and(|ttft| ttft <= slo.ttft_ms)
            && interpolated(&figures.tpot_ms, q).is_none_or(|tpot| tpot <= slo.tpot_ms)
    };
    let n = figures.ttft_ms.len();
    if n >= samples_needed(0.95) {
        if at(0.95) { Meets::Shown } else { Meets::No }
    } else if n > 0 && at(1.0) {
        Meets::AllOf(n)
    } else {
        Meets::No
    }
}

/// For each size that ran under several loads: the highest that meets the limits.
fn concurrency(rows: &[&Row], slo: Slo) -> Vec<String> {
    let mut sizes: Vec<_> = rows.iter().map(|row| row.cell.size).collect();
    sizes.dedup();
    let limits = format!(
        "TTFT p95 ≤ {} s, TPOT p95 ≤ {} ms",
        figure_short(slo.ttft_ms / 1e3),
        figure_short(slo.tpot_ms)
    );
    let sentence = |size: &Option<crate::target::Size>| {
        let mut mine: Vec<(u32, &Row)> = rows
            .iter()
            .filter(|row| row.cell.size == *size && row.marks.is_empty())
            .filter_map(|row| Some((row.concurrency()?, *row)))
            .collect();
        mine.sort_by_key(|(concurrency, _)| *concurrency);
        if mine.len() < 2 {
            return None;
        }
        let name = size.map_or_else(String::new, |size| {
            format!("{}×{} ", size.instances, size.slots)
        });
        // The last before the first miss: beyond it, luck.
        let mut best = None;
        for (concurrency, row) in &mine {
            match meets(row, slo) {
                Meets::No => break,
                met => best = Some((*concurrency, met)),
            }
        }
        let same = rows.iter().filter(|row| row.cell.size == *size);
        let measured = same.filter_map(|row| row.concurrency()).max()?;
        Some(match best {
            None => format!(
                "{name}meets the limits ({limits}) at none of the measured concurrencies, {} up.",
                mine[0].0
            ),
            Some((concurrency, met)) => {
                let how = match met {
                    Meets::AllOf(n) => format!("by all {n} requests; n too small for p95"),
                    _ => limits.clone(),
                };
                let top = if concurrency == measured {
                    ", the highest measured"
                } else {
                    ""
                };
                format!("{name}meets the limits up to {concurrency} in flight{top} ({how}).")
            }
        })
    };
    sizes.iter().filter_map(sentence).collect()
}

fn figure_short(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Open loops: up to which rate the server kept up.
fn saturation(rows: &[&Row]) -> Option<String> {
    let mut rates: Vec<_> = rows.iter().filter_map(|row| row.keeping).collect();
    rates.sort_by(|a, b| a.offered_per_s.total_cmp(&b.offered_per_s));
    let first = rates.iter().position(|keeping| keeping.saturated);
    let Some(first) = first else {
        let last = rates.last()?;
        return Some(format!(
            "keeps up with all rates measured, up to {} requests/s.",
            figure(last.offered_per_s)
        ));
    };
    let at = rates[first];
    let held = first.checked_sub(1).map_or_else(
        || "keeps up with none of the rates measured".to_owned(),
        |held| {
            format!(
                "keeps up with {} requests/s",
                figure(rates[held].offered_per_s)
            )
        },
    );
    Some(format!(
        "{held}; saturated at {} requests/s: {} served, backlog from {} to {}, {} refused.",
        figure(at.offered_per_s),
        figure(at.served_per_s),
        at.backlog.0,
        at.backlog.1,
        at.refused
    ))
}

/// Where two arms ran one request at a time: which for work that waits for the first token, which for long answers.
fn engines(rows: &[&Row], arms: &[&str], seed: u64) -> Vec<String> {
    let alone = |arm: &str| {
        rows.iter().find(|row| {
            row.cell.arm == arm
                && row.concurrency() == Some(1)
                && row.places() == (1, 1)
                && row.marks.is_empty()
        })
    };
    let mut words = Vec::new();
    for (place, a) in arms.iter().enumerate() {
        for b in &arms[place + 1..] {
            let Some((one, other)) = alone(a).zip(alone(b)) else {
                continue;
            };
            let pick = |what: &str, of: fn(&crate::cell::Figures) -> &[f64]| {
                let (x, y) = (of(&one.figures), of(&other.figures));
                let ratio = ratio_interval(x, y, median, seed)?;
                let value = |values: &[f64]| median(values).map_or_else(String::new, figure);
                let (low, high) = (value(x), value(y));
                Some(if ratio.low > 1.0 {
                    format!("{what}: {a} ({low} against {high} ms)")
                } else if ratio.high < 1.0 {
                    format!("{what}: {b} ({high} against {low} ms)")
                } else {
                    format!("{what}: no difference shown ({low} and {high} ms)")
                })
            };
            let picks = [
                pick("work that waits for the first token", |figures| {
                    &figures.ttft_sent_ms
                }),
                pick("long answers", |figures| &figures.tpot_ms),
            ];
            let picks: Vec<String> = picks.into_iter().flatten().collect();
            if !picks.is_empty() {
                words.push(format!(
                    "One request at a time, {a} or {b}? For {}.",
                    picks.join("; for ")
                ));
            }
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::super::rows::made;
    use super::*;
    use crate::process::Memory;

    fn with_memory(mut cell: Measured, mib: u64) -> Measured {
        cell.memory = Some(Memory {
            peak_resident_sum_kib: Some(mib << 10),
            proportional_sum_kib: Some(mib << 10),
            processes: 1,
        });
        cell
    }

    /// Five runs that drift by some per cent, all sizes alike.
    fn surface(sizes: &[((u32, u32), f64, u64)]) -> Vec<Measured> {
        let mut cells = Vec::new();
        for repeat in 0..5 {
            let drift = 1.0 + f64::from(repeat) * 0.01;
            for ((instances, slots), rate, mib) in sizes {
                let size = Some((*instances, *slots));
                let cell = made::cell("server", size, 16, repeat, rate * drift);
                cells.push(with_memory(cell, *mib));
            }
        }
        cells
    }

    #[test]
    fn the_studys_case_is_told_as_what_to_run() {
        let cells = surface(&[
            ((1, 1), 50.0, 100),
            ((3, 1), 53.0, 300),
            ((1, 8), 120.0, 110),
        ]);
        let words = verdict(&cells, Slo::default(), 1);
        assert_eq!(
            words,
            [
                "At 16 requests in flight, against one instance with one slot: K=3 costs 3.0× the memory for 1.06× (1.06–1.06) the tokens; slots=8 on one instance gives 2.40× (2.40–2.40) at 1.1× the memory: run `--instances 1 --slots 8`."
            ]
        );
    }

    #[test]
    fn of_sizes_that_are_equally_fast_the_smallest_is_recommended() {
        let cells = surface(&[
            ((1, 1), 50.0, 100),
            ((1, 4), 120.0, 100),
            ((1, 8), 120.0, 110),
            ((2, 8), 120.0, 220),
        ]);
        let words = verdict(&cells, Slo::default(), 1);
        assert!(words[0].contains("--instances 1 --slots 4"), "{words:?}");
        let slower = surface(&[((1, 1), 50.0, 100), ((2, 1), 25.0, 200)]);
        let words = verdict(&slower, Slo::default(), 1);
        assert!(words[0].contains("--instances 1 --slots 1"), "{words:?}");
    }

    #[test]
    fn without_a_sound_run_to_compare_with_there_is_no_verdict_and_that_is_said() {
        let mut cells = surface(&[((1, 1), 50.0, 100), ((1, 8), 120.0, 110)]);
        let single = |one: &&mut Measured| one.cell.size.is_some_and(|size| size.slots == 1);
        for cell in cells.iter_mut().filter(single) {
            cell.strain = Some(crate::strain::Strain {
                heat_events: Some(1),
                ..Default::default()
            });
        }
        assert!(verdict(&cells, Slo::default(), 1)[0].starts_with("No verdict"));
    }

    #[test]
    fn too_few_runs_give_an_indication() {
        let cells = [
            made::cell("server", Some((1, 1)), 16, 0, 50.0),
            made::cell("server", Some((1, 8)), 16, 0, 120.0),
        ];
        let words = verdict(&cells, Slo::default(), 1);
        assert!(words[0].contains("gives 2.40×:"), "{words:?}");
        assert!(
            words[0].contains("1 run of each: an indication"),
            "{words:?}"
        );
    }

    #[test]
    fn the_highest_concurrency_within_the_limits_is_told_with_what_it_rests_on() {
        // 16 × 10 tokens: TTFT is a tenth of the wall.
        let cells = [
            made::cell("server", None, 1, 0, 100.0),
            made::cell("server", None, 4, 0, 80.0),
            made::cell("server", None, 8, 0, 5.0),
        ];
        let slo = Slo {
            ttft_ms: 500.0,
            tpot_ms: 1_000.0,
        };
        let words = verdict(&cells, slo, 1);
        assert_eq!(
            words,
            ["meets the limits up to 4 in flight (by all 16 requests; n too small for p95)."]
        );
        let strict = Slo {
            ttft_ms: 1.0,
            tpot_ms: 1.0,
        };
        assert!(verdict(&cells, strict, 1)[0].contains("at none"));
    }

    #[test]
    fn where_two_engines_ran_each_kind_of_work_has_its_own() {
        let mut cells = [
            made::cell("llama", Some((1, 1)), 1, 0, 100.0),
            made::cell("mlx", Some((1, 1)), 1, 0, 100.0),
        ];
        for sample in &mut cells[0].samples {
            sample.first_token_us = sample.first_token_us.map(|at| at / 2);
        }
        for sample in &mut cells[1].samples {
            sample.done_us /= 2;
        }
        let words = verdict(&cells, Slo::default(), 1);
        let last = words.last().unwrap();
        assert!(
            last.contains("first token: llama (80.00 against 160.0 ms)"),
            "{last}"
        );
        assert!(last.contains("long answers: mlx"), "{last}");
    }
}
