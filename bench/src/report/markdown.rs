//! Results as Markdown tables, in the study's columns.

use std::fmt::Write;

use crate::arrival::Arrival;
use crate::cell::{Cell, Figures, Measured};
use crate::process::Memory;
use crate::record::Run;
use crate::statistics::{
    Quantile, figure, goodput_share, interpolated, median, quantile, samples_needed,
};

/// Repeats of one cell.
#[derive(Debug)]
pub struct Row {
    /// Of the first repeat.
    pub cell: Cell,
    pub figures: Figures,
    pub repeats: Vec<Figures>,
    pub memory: Option<Memory>,
    /// All repeats' samples.
    pub samples: Vec<crate::sample::Sample>,
}

/// One row for each cell, repeats together, in the order of their first appearance by arm, size and load.
#[must_use]
pub fn rows(cells: &[Measured]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for measured in cells {
        let figures = Figures::of(&measured.samples);
        let key = |cell: &Cell| (cell.arm.clone(), cell.size, cell.cold);
        let same = |row: &&mut Row| {
            key(&row.cell) == key(&measured.cell) && row.cell.arrival == measured.cell.arrival
        };
        if let Some(row) = rows.iter_mut().find(same) {
            row.repeats.push(figures);
            row.memory = row.memory.max_with(measured.memory);
            row.samples.extend(measured.samples.iter().cloned());
        } else {
            rows.push(Row {
                cell: measured.cell.clone(),
                figures: Figures::default(),
                repeats: vec![figures],
                memory: measured.memory,
                samples: measured.samples.clone(),
            });
        }
    }
    for row in &mut rows {
        row.figures = Figures::pooled(&row.repeats);
    }
    let size = |row: &Row| row.cell.size.map(|size| (size.instances, size.slots));
    rows.sort_by(|a, b| {
        let load = load_value(&a.cell.arrival).total_cmp(&load_value(&b.cell.arrival));
        a.cell
            .arm
            .cmp(&b.cell.arm)
            .then(size(a).cmp(&size(b)))
            .then(b.cell.cold.cmp(&a.cell.cold))
            .then(load)
    });
    rows
}

trait MaxWith {
    fn max_with(self, other: Self) -> Self;
}

impl MaxWith for Option<Memory> {
    fn max_with(self, other: Self) -> Self {
        let (Some(a), Some(b)) = (self, other) else {
            return self.or(other);
        };
        Some(Memory {
            peak_resident_sum_kib: a.peak_resident_sum_kib.max(b.peak_resident_sum_kib),
            proportional_sum_kib: a.proportional_sum_kib.max(b.proportional_sum_kib),
            processes: a.processes.max(b.processes),
        })
    }
}

fn load_value(arrival: &Arrival) -> f64 {
    match *arrival {
        Arrival::Closed { concurrency } => f64::from(concurrency),
        Arrival::Constant { per_s } | Arrival::Poisson { per_s } | Arrival::Gamma { per_s, .. } => {
            per_s
        }
    }
}

/// A load in few words.
#[must_use]
pub fn load_words(arrival: &Arrival) -> String {
    match arrival {
        Arrival::Closed { concurrency } => format!("concurrency {concurrency}"),
        Arrival::Constant { per_s } => format!("{per_s}/s even"),
        Arrival::Poisson { per_s } => format!("{per_s}/s Poisson"),
        Arrival::Gamma { per_s, burstiness } => format!("{per_s}/s gamma {burstiness}"),
    }
}

/// What a run was, above its table.
#[must_use]
pub fn heading(run: &Run) -> String {
    let contract = &run.contract;
    let system = &contract.system;
    let mut text = format!(
        "## {} ({}, contract {})\n\n",
        run.verb, contract.rules, run.contract_hash
    );
    let mut line = |line: std::fmt::Arguments<'_>| {
        // A String takes everything.
        let _ = writeln!(text, "{line}");
    };
    line(format_args!(
        "{}, {} cores, {} GiB, {} {}; kernel {}; load before {}; bench {}.",
        system.chip,
        system.cores,
        system.memory_gib,
        system.os,
        system.architecture,
        run.surroundings.kernel,
        run.surroundings.load,
        run.surroundings.bench_version,
    ));
    line(format_args!(
        "Workload {} ({}), {} requests a cell, warm-up {}; seed {}.",
        contract.workload,
        &contract.workload_hash[..12.min(contract.workload_hash.len())],
        contract.requests,
        contract.warm_up,
        run.seed
    ));
    for (name, what) in &run.arms {
        line(format_args!("`{name}`: `{what}`"));
    }
    text.push('\n');
    text
}

fn p(values: &[f64], q: f64) -> String {
    match quantile(values, q) {
        Quantile::Value(value) => figure(value),
        few @ Quantile::TooFew { .. } => few.to_string(),
    }
}

/// The study printed its p99 from 20 requests. Kept, and marked.
fn p_as_study(values: &[f64], q: f64) -> String {
    match interpolated(values, q) {
        None => "-".into(),
        Some(value) if values.len() < samples_needed(q) => format!("{}†", figure(value)),
        Some(value) => figure(value),
    }
}

const DAGGER: &str = "\n† n too small for this percentile; printed because study-v1 does.\n";

fn p50(values: &[f64]) -> String {
    median(values).map_or_else(|| "-".into(), figure)
}

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^52 KiB")]
fn gb(kib: Option<u64>) -> String {
    kib.map_or_else(
        || "-".into(),
        |kib| format!("{:.2}", kib as f64 * 1_024.0 / 1e9),
    )
}

fn peak(row: &Row) -> String {
    gb(row.memory.and_then(|memory| memory.peak_resident_sum_kib))
}

fn proportional(row: &Row) -> String {
    gb(row.memory.and_then(|memory| memory.proportional_sum_kib))
}

fn queue_share(figures: &Figures) -> String {
    figures.queue_share.map_or_else(
        || "-".into(),
        |share| {
            let mark = if share > 0.5 { " !" } else { "" };
            format!("{:.0} %{mark}", share * 100.0)
        },
    )
}

fn aggregate(row: &Row) -> String {
    let rate = figure(row.figures.aggregate_tokens_per_s);
    let mark = if row.figures.counted_by_events {
        "‡"
    } else {
        ""
    };
    match Figures::spread(&row.repeats) {
        Some(spread) => format!("{rate}{mark} ±{:.0} %", spread * 100.0),
        None => format!("{rate}{mark}"),
    }
}

fn times(row: &Row, base: Option<f64>) -> String {
    base.filter(|base| *base > 0.0).map_or_else(
        || "-".into(),
        |base| format!("{:.2}", row.figures.aggregate_tokens_per_s / base),
    )
}

fn done(figures: &Figures) -> String {
    format!("{}/{}", figures.done, figures.requests)
}

fn size(row: &Row) -> String {
    row.cell.size.map_or_else(
        || "-".into(),
        |size| format!("{}×{}", size.instances, size.slots),
    )
}

fn table(columns: &[&str], lines: &[Vec<String>]) -> String {
    let mut text = format!(
        "| {} |\n|{}\n",
        columns.join(" | "),
        "---|".repeat(columns.len())
    );
    for line in lines {
        text.push_str(&format!("| {} |\n", line.join(" | ")));
    }
    text
}

/// Marks that a table may hold, explained, and what went wrong.
fn footer(rows: &[Row], failures: &[String]) -> String {
    let mut text = String::new();
    if rows.iter().any(|row| row.figures.counted_by_events) {
        text.push_str("\n‡ tokens counted by events, as the server sent no usage.\n");
    }
    if rows.iter().any(|row| row.figures.queue_share > Some(0.5)) {
        text.push_str("\n! more than half of the time to first token was spent in the queue: this point shows admission, not the engine.\n");
    }
    for row in rows {
        for (what, count) in &row.figures.faults {
            let _ = writeln!(
                text,
                "\n{} {}, {}: {count} × {what}",
                row.cell.arm,
                size(row),
                load_words(&row.cell.arrival)
            );
        }
    }
    for failure in failures {
        let _ = writeln!(text, "\nnot measured: {failure}");
    }
    text
}

/// One request at a time.
#[must_use]
pub fn single(cells: &[Measured], failures: &[String]) -> String {
    let rows = rows(cells);
    let lines: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let figures = &row.figures;
            vec![
                row.cell.arm.clone(),
                if row.cell.cold { "cold" } else { "warm" }.into(),
                done(figures),
                p50(&figures.ttft_sent_ms),
                p_as_study(&figures.ttft_sent_ms, 0.99),
                p50(&figures.tpot_ms),
                aggregate(row),
                peak(row),
                proportional(row),
            ]
        })
        .collect();
    let columns = [
        "arm",
        "state",
        "done",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "TPOT p50 ms",
        "tok/s",
        "RSS GB",
        "PSS GB",
    ];
    let dagger = if rows
        .iter()
        .any(|row| row.figures.ttft_sent_ms.len() < samples_needed(0.99))
    {
        DAGGER
    } else {
        ""
    };
    table(&columns, &lines) + dagger + &footer(&rows, failures)
}

/// One server at several concurrencies.
#[must_use]
pub fn sweep(cells: &[Measured], failures: &[String]) -> String {
    let rows = rows(cells);
    let lines: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let first = rows.iter().find(|one| {
                one.cell.arm == row.cell.arm && one.cell.size == row.cell.size && !one.cell.cold
            });
            let figures = &row.figures;
            vec![
                row.cell.arm.clone(),
                size(row),
                if row.cell.cold {
                    "cold".into()
                } else {
                    load_words(&row.cell.arrival)
                },
                done(figures),
                aggregate(row),
                times(row, first.map(|first| first.figures.aggregate_tokens_per_s)),
                p50(&figures.tpot_ms),
                p50(&figures.request_tokens_per_s),
                p50(&figures.ttft_engine_ms),
                p50(&figures.ttft_sent_ms),
                p(&figures.ttft_sent_ms, 0.9),
                queue_share(figures),
            ]
        })
        .collect();
    let columns = [
        "arm",
        "K×slots",
        "load",
        "done",
        "aggregate tok/s",
        "×first",
        "TPOT p50 ms",
        "tok/s per request",
        "engine TTFT p50 ms",
        "queue-incl. TTFT p50 ms",
        "p90",
        "queue share",
    ];
    table(&columns, &lines) + &footer(&rows, failures)
}

/// K instances under one load: the study's second table.
#[must_use]
pub fn scale(cells: &[Measured], failures: &[String]) -> String {
    let rows = rows(cells);
    let lines: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let first = rows.iter().find(|one| one.cell.arm == row.cell.arm);
            let figures = &row.figures;
            vec![
                row.cell.arm.clone(),
                size(row),
                done(figures),
                aggregate(row),
                times(row, first.map(|first| first.figures.aggregate_tokens_per_s)),
                p50(&figures.tpot_ms),
                p50(&figures.request_tokens_per_s),
                p50(&figures.ttft_engine_ms),
                p50(&figures.ttft_sent_ms),
                queue_share(figures),
                figures.batch_mean.map_or_else(|| "-".into(), figure),
                peak(row),
                proportional(row),
            ]
        })
        .collect();
    let columns = [
        "arm",
        "K×slots",
        "done",
        "aggregate tok/s",
        "×first",
        "TPOT p50 ms",
        "tok/s per request",
        "engine TTFT p50 ms",
        "queue-incl. TTFT p50 ms",
        "queue share",
        "batch mean",
        "RSS sum GB",
        "PSS sum GB",
    ];
    table(&columns, &lines) + &footer(&rows, failures)
}

/// Open loops: latency from the intended start, and what of it was good.
#[must_use]
pub fn load(cells: &[Measured], failures: &[String], ttft_ms_max: f64, tpot_ms_max: f64) -> String {
    let rows = rows(cells);
    let lines: Vec<Vec<String>> = rows
        .iter()
        .filter(|row| !row.cell.cold)
        .map(|row| {
            let figures = &row.figures;
            let good = goodput_share(&row.samples, ttft_ms_max, tpot_ms_max);
            vec![
                row.cell.arm.clone(),
                size(row),
                load_words(&row.cell.arrival),
                done(figures),
                aggregate(row),
                good.map_or_else(|| "-".into(), |good| format!("{:.1} %", good * 100.0)),
                p50(&figures.ttft_ms),
                p(&figures.ttft_ms, 0.9),
                p(&figures.ttft_ms, 0.99),
                p50(&figures.tpot_ms),
                p50(&figures.total_ms),
                p(&figures.total_ms, 0.99),
                figure(figures.gap_ms_max),
                interpolated(&figures.late_ms, 1.0).map_or_else(|| "-".into(), figure),
                queue_share(figures),
                figures
                    .cached_tokens
                    .map_or_else(|| "-".into(), |cached| cached.to_string()),
            ]
        })
        .collect();
    let columns = [
        "arm",
        "K×slots",
        "load",
        "done",
        "tok/s",
        "good",
        "TTFT p50 ms",
        "p90",
        "p99",
        "TPOT p50 ms",
        "total p50 ms",
        "p99",
        "max gap ms",
        "max late ms",
        "queue share",
        "cached tokens",
    ];
    table(&columns, &lines)
        + &format!(
            "\nGood: TTFT ≤ {} ms and TPOT ≤ {} ms, of all that were sent; refused and failed ones are not good.\n",
            figure(ttft_ms_max),
            figure(tpot_ms_max)
        )
        + &footer(&rows, failures)
}

/// K × slots as a grid of aggregate tokens per second.
#[must_use]
pub fn surface(cells: &[Measured], failures: &[String]) -> String {
    let rows = rows(cells);
    let mut arms: Vec<&str> = rows.iter().map(|row| row.cell.arm.as_str()).collect();
    arms.dedup();
    let mut text = String::new();
    for arm in arms {
        let mine: Vec<&Row> = rows
            .iter()
            .filter(|row| row.cell.arm == arm && !row.cell.cold)
            .collect();
        let sorted = |of: fn(&Row) -> Option<u32>| -> Vec<u32> {
            let all: std::collections::BTreeSet<u32> =
                mine.iter().filter_map(|row| of(row)).collect();
            all.into_iter().collect()
        };
        let instances = sorted(|row| row.cell.size.map(|size| size.instances));
        let slots = sorted(|row| row.cell.size.map(|size| size.slots));
        let mut columns = vec![format!("{arm}: K")];
        columns.extend(slots.iter().map(|slots| format!("{slots} slots")));
        let lines: Vec<Vec<String>> = instances
            .iter()
            .map(|k| {
                let mut line = vec![k.to_string()];
                for slots in &slots {
                    let found = mine.iter().find(|row| {
                        row.cell
                            .size
                            .is_some_and(|size| size.instances == *k && size.slots == *slots)
                    });
                    line.push(found.map_or_else(|| "-".into(), |row| aggregate(row)));
                }
                line
            })
            .collect();
        let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
        text += &table(&columns, &lines);
        text.push('\n');
    }
    text + &footer(&rows, failures)
}
