//! Results as Markdown tables, in the study's columns.

use std::fmt::Write;

use super::rows::{Row, load_words, rows};
use crate::arrival::Arrival;
use crate::ceiling;
use crate::cell::{Figures, Measured};
use crate::record::Run;
use crate::statistics::{
    Quantile, figure, goodput_share, interpolated, median, quantile, samples_needed, weighted,
};
use crate::status::ServerWord;

/// What a user calls good, milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slo {
    pub ttft_ms: f64,
    pub tpot_ms: f64,
}

impl Default for Slo {
    fn default() -> Self {
        Self {
            ttft_ms: 2_000.0,
            tpot_ms: 100.0,
        }
    }
}

/// What a run was, above its table.
#[must_use]
pub fn heading(run: &Run) -> String {
    let contract = &run.contract;
    let system = &contract.system;
    let part = run
        .suite
        .as_ref()
        .map_or_else(String::new, |suite| format!("{suite}: "));
    let mut text = format!(
        "## {part}{} ({}, methodology {}, contract {})\n\n",
        run.verb, contract.rules, contract.methodology, run.contract_hash
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

fn or_dash(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), figure)
}

fn p50(values: &[f64]) -> String {
    or_dash(median(values))
}

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^52 bytes")]
fn gb(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".into(), |bytes| format!("{:.2}", bytes as f64 / 1e9))
}

fn peak(row: &Row) -> String {
    let peak = row.memory.and_then(|memory| memory.peak_resident_sum_kib);
    gb(peak.map(|kib| kib << 10))
}

/// Over tokens, of all answers.
fn gap_p99(figures: &Figures) -> String {
    let (n, needed) = (figures.gaps.len(), samples_needed(0.99));
    if n < needed {
        return Quantile::TooFew { n, needed }.to_string();
    }
    or_dash(weighted(&figures.gaps, 0.99))
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

/// By the server's word. Above 100 % it is shown as it is: then a figure is wrong, and hiding it would not mend it.
fn bus_use(row: &Row) -> String {
    let share = row.server.as_ref().and_then(ServerWord::bus_use);
    share.map_or_else(
        || "-".into(),
        |share| {
            let fault = if share > 1.0 {
                " (accounting fault)"
            } else {
                ""
            };
            format!("{:.0} %{fault}", share * 100.0)
        },
    )
}

fn cached(figures: &Figures) -> String {
    figures
        .cached_tokens
        .map_or_else(|| "-".into(), |cached| cached.to_string())
}

fn aggregate(row: &Row) -> String {
    let rate = figure(row.figures.aggregate_tokens_per_s);
    let mut marks = String::new();
    if row.figures.counted_by_events {
        marks.push('‡');
    }
    if !row.marks.is_empty() {
        marks.push('⚠');
    }
    match Figures::spread(&row.repeats) {
        Some(spread) => format!("{rate}{marks} ±{:.0} %", spread * 100.0),
        None => format!("{rate}{marks}"),
    }
}

/// Of what is not marked.
fn times(row: &Row, base: Option<&Row>) -> String {
    let ratio = row.rate().zip(base.and_then(Row::rate));
    ratio
        .filter(|(_, base)| *base > 0.0)
        .map_or_else(|| "-".into(), |(rate, base)| format!("{:.2}", rate / base))
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

/// A Markdown table.
#[must_use]
pub fn table(columns: &[&str], lines: &[Vec<String>]) -> String {
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
    if rows.iter().any(|row| !row.marks.is_empty()) {
        text.push_str("\n⚠ marked: shown, and left out of ratios and verdicts.\n");
    }
    for row in rows {
        let name = format!(
            "{} {}, {}",
            row.cell.arm,
            size(row),
            load_words(&row.cell.arrival)
        );
        for (repeat, mark) in &row.marks {
            let _ = writeln!(text, "\n⚠ {name}, run {}: {mark}", repeat + 1);
        }
        for (what, count) in &row.figures.faults {
            let _ = writeln!(text, "\n{name}: {count} × {what}");
        }
        if row.figures.early > 0 {
            let _ = writeln!(
                text,
                "\n{name}: {} of {} answers ended before their bound",
                row.figures.early, row.figures.done
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
    let line = |row: &Row| {
        let figures = &row.figures;
        vec![
            row.cell.arm.clone(),
            if row.cell.cold { "cold" } else { "warm" }.into(),
            done(figures),
            p50(&figures.ttft_sent_ms),
            p_as_study(&figures.ttft_sent_ms, 0.99),
            p50(&figures.tpot_ms),
            aggregate(row),
            cached(figures),
            peak(row),
            gb(row.footprint_bytes()),
        ]
    };
    let lines: Vec<Vec<String>> = rows.iter().map(line).collect();
    let columns = [
        "arm",
        "state",
        "done",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "TPOT p50 ms",
        "tok/s",
        "cached tokens",
        "RSS GB",
        "footprint GB",
    ];
    let few = |row: &Row| row.figures.ttft_sent_ms.len() < samples_needed(0.99);
    let dagger = if rows.iter().any(few) { DAGGER } else { "" };
    table(&columns, &lines) + dagger + &footer(&rows, failures)
}

/// One server at several concurrencies.
#[must_use]
pub fn sweep(cells: &[Measured], failures: &[String]) -> String {
    let rows = rows(cells);
    let line = |row: &Row| {
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
            times(row, first),
            p50(&figures.tpot_ms),
            p50(&figures.request_tokens_per_s),
            p50(&figures.ttft_engine_ms),
            p50(&figures.ttft_sent_ms),
            p(&figures.ttft_sent_ms, 0.9),
            queue_share(figures),
            or_dash(figures.batch_mean),
            cached(figures),
        ]
    };
    let lines: Vec<Vec<String>> = rows.iter().map(line).collect();
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
        "batch mean",
        "cached tokens",
    ];
    table(&columns, &lines) + &footer(&rows, failures)
}

/// K instances under one load: the study's second table.
#[must_use]
pub fn scale(cells: &[Measured], failures: &[String]) -> String {
    let rows = rows(cells);
    let line = |row: &Row| {
        let first = rows.iter().find(|one| {
            one.cell.arm == row.cell.arm && one.cell.arrival == row.cell.arrival && !one.cell.cold
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
            times(row, first),
            p50(&figures.tpot_ms),
            p50(&figures.request_tokens_per_s),
            p50(&figures.ttft_engine_ms),
            p50(&figures.ttft_sent_ms),
            queue_share(figures),
            or_dash(figures.batch_mean),
            bus_use(row),
            or_dash(ceiling::of_row(row)),
            or_dash(row.blast_radius()),
            peak(row),
            gb(row.footprint_bytes()),
        ]
    };
    let lines: Vec<Vec<String>> = rows.iter().map(line).collect();
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
        "queue share",
        "batch mean",
        "bus use",
        "bus ceiling tok/s",
        "streams hit per crash",
        "RSS sum GB",
        "footprint GB",
    ];
    table(&columns, &lines) + &footer(&rows, failures)
}

/// Open loops: latency from the intended start, and what of it was good.
#[must_use]
pub fn load(cells: &[Measured], failures: &[String], slo: Slo) -> String {
    let rows = rows(cells);
    let line = |row: &Row| {
        let figures = row.steady.as_ref().unwrap_or(&row.figures);
        let good = goodput_share(&row.samples, slo.ttft_ms, slo.tpot_ms);
        vec![
            row.cell.arm.clone(),
            size(row),
            load_words(&row.cell.arrival),
            done(&row.figures),
            figures.requests.to_string(),
            row.keeping.map_or_else(
                || "-".into(),
                |keeping| {
                    let mark = if keeping.saturated { " ▲" } else { "" };
                    format!("{}{mark}", figure(keeping.served_per_s))
                },
            ),
            aggregate(row),
            good.map_or_else(|| "-".into(), |good| format!("{:.1} %", good * 100.0)),
            p50(&figures.ttft_ms),
            p(&figures.ttft_ms, 0.9),
            p(&figures.ttft_ms, 0.99),
            p50(&figures.tpot_ms),
            p50(&figures.ms_per_token),
            p50(&figures.total_ms),
            p(&figures.total_ms, 0.99),
            gap_p99(figures),
            figure(figures.gap_ms_max),
            or_dash(interpolated(&row.figures.late_ms, 1.0)),
            queue_share(figures),
            cached(&row.figures),
        ]
    };
    let warm = rows.iter().filter(|row| !row.cell.cold);
    let lines: Vec<Vec<String>> = warm.map(line).collect();
    let columns = [
        "arm",
        "K×slots",
        "load",
        "done",
        "steady n",
        "served/s",
        "tok/s",
        "good",
        "TTFT p50 ms",
        "p90",
        "p99",
        "TPOT p50 ms",
        "ms per token p50",
        "total p50 ms",
        "p99",
        "gap p99 ms",
        "max gap ms",
        "max late ms",
        "queue share",
        "cached tokens",
    ];
    let saturated = |row: &Row| row.keeping.is_some_and(|keeping| keeping.saturated);
    let triangle = if rows.iter().any(saturated) {
        "\n▲ saturated: fewer were served than arrived and the backlog grew, or requests were refused. Latencies there depend on how long the run was.\n"
    } else {
        ""
    };
    table(&columns, &lines)
        + &format!(
            "\nGood: TTFT ≤ {} ms and TPOT ≤ {} ms, of all that were sent; refused, failed and timed-out ones are not good. Latencies are those of the steady part: start (MSER-5) and tail are cut off.\n",
            figure(slo.ttft_ms),
            figure(slo.tpot_ms)
        )
        + triangle
        + &footer(&rows, failures)
}

/// K × slots as a grid of aggregate tokens per second, one for each arm and load; what its marks mean stands under
/// the table of all columns, [`scale`].
#[must_use]
pub fn surface(cells: &[Measured]) -> String {
    let rows = rows(cells);
    let warm: Vec<&Row> = rows.iter().filter(|row| !row.cell.cold).collect();
    let mut grids: Vec<(&str, Arrival)> = Vec::new();
    for row in &warm {
        let grid = (row.cell.arm.as_str(), row.cell.arrival);
        if !grids.contains(&grid) {
            grids.push(grid);
        }
    }
    let mut text = String::new();
    for (arm, arrival) in grids {
        let mine: Vec<&Row> = warm
            .iter()
            .filter(|row| row.cell.arm == arm && row.cell.arrival == arrival)
            .copied()
            .collect();
        text += &grid(&format!("{arm}, {}: K", load_words(&arrival)), &mine);
        text.push('\n');
    }
    text
}

fn grid(corner: &str, rows: &[&Row]) -> String {
    let sorted = |of: fn(&Row) -> u32| -> Vec<u32> {
        let all: std::collections::BTreeSet<u32> = rows.iter().map(|row| of(row)).collect();
        all.into_iter().collect()
    };
    let instances = sorted(|row| row.places().0);
    let slots = sorted(|row| row.places().1);
    let mut columns = vec![corner.to_owned()];
    columns.extend(slots.iter().map(|slots| format!("{slots} slots")));
    let line = |k: &u32| {
        let mut line = vec![k.to_string()];
        for slots in &slots {
            let found = rows.iter().find(|row| row.places() == (*k, *slots));
            line.push(found.map_or_else(|| "-".into(), |row| aggregate(row)));
        }
        line
    };
    let lines: Vec<Vec<String>> = instances.iter().map(line).collect();
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    table(&columns, &lines)
}
