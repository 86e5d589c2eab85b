//! Which charts a run has.

use super::picture::{Chart, Point, Series};
use super::rows::{Row, load_words, rows};
use crate::ceiling;
use crate::cell::{Figures, Measured};
use crate::record::Recorded;
use crate::statistics::{interpolated, median};

/// Aggregate tokens per second of all cells: over the load, one line for each arm and size, or, where
/// all ran under one load, over the sizes.
#[must_use]
pub fn throughput(cells: &[Measured]) -> Chart {
    let all = warm(cells);
    let one_load = all
        .iter()
        .all(|row| row.cell.arrival == all[0].cell.arrival);
    let rate = |figures: &Figures| Some(figures.aggregate_tokens_per_s);
    let (below, label, line): (&str, Words, Words) = if one_load {
        ("instances × slots", size_words, |row| row.cell.arm.clone())
    } else {
        (
            "requests in flight, or arrivals per second",
            short_load,
            arm_and_size,
        )
    };
    chart(
        &all,
        ("Aggregate tokens per second", below, "tok/s"),
        (label, line),
        rate,
    )
}

type Words = fn(&Row) -> String;

fn warm(cells: &[Measured]) -> Vec<Row> {
    let rows = rows(cells);
    rows.into_iter().filter(|row| !row.cell.cold).collect()
}

fn size_words(row: &Row) -> String {
    row.cell.size.map_or_else(
        || "as it runs".into(),
        |size| format!("{}×{}", size.instances, size.slots),
    )
}

fn short_load(row: &Row) -> String {
    load_words(&row.cell.arrival).replace("concurrency ", "")
}

fn arm_and_size(row: &Row) -> String {
    row.cell.size.map_or_else(
        || row.cell.arm.clone(),
        |size| format!("{} {}×{}", row.cell.arm, size.instances, size.slots),
    )
}

/// A chart of one figure of each row.
fn chart(
    rows: &[Row],
    (title, below, beside): (&str, &str, &str),
    (label, line): (Words, Words),
    of: impl Fn(&Figures) -> Option<f64>,
) -> Chart {
    let mut chart = Chart {
        title: title.into(),
        below: below.into(),
        beside: beside.into(),
        ..Chart::default()
    };
    for row in rows {
        let (label, name) = (label(row), line(row));
        let at = chart.labels.iter().position(|one| *one == label);
        let at = at.unwrap_or_else(|| {
            chart.labels.push(label);
            chart.labels.len() - 1
        });
        let figures = row.steady.as_ref().unwrap_or(&row.figures);
        let Some(value) = of(figures) else {
            continue;
        };
        let repeats = match row.steady {
            Some(_) => vec![value],
            None => row.repeats.iter().filter_map(&of).collect(),
        };
        let point = Point { at, value, repeats };
        match chart.series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => chart.series.push(Series {
                name,
                points: vec![point],
                dashed: false,
            }),
        }
    }
    chart
}

/// The charts that belong to a run's verb.
#[must_use]
pub fn of_run(recorded: &Recorded) -> Vec<Chart> {
    let all = warm(&recorded.cells);
    if all.is_empty() {
        return Vec::new();
    }
    let rate = |figures: &Figures| Some(figures.aggregate_tokens_per_s);
    let ttft = |figures: &Figures| Some(median(&figures.ttft_ms)? / 1e3);
    let instances: Words = |row| format!("{} K={}", row.cell.arm, row.places().0);
    let slots: Words = |row| format!("{} slots={}", row.cell.arm, row.places().1);
    match recorded.run.verb.as_str() {
        "sweep" | "compare" => vec![
            chart(
                &all,
                (
                    "Tokens per second over concurrency",
                    "requests in flight",
                    "aggregate tok/s",
                ),
                (short_load, arm_and_size),
                rate,
            ),
            chart(
                &all,
                (
                    "Time to first token, the queue included",
                    "requests in flight",
                    "TTFT p50, s",
                ),
                (short_load, arm_and_size),
                ttft,
            ),
        ],
        "scale" => vec![chart(
            &all,
            (
                "What more instances bring",
                "instances K",
                "aggregate tok/s",
            ),
            (|row| row.places().0.to_string(), slots),
            rate,
        )],
        "surface" => surfaces(&all, instances),
        "load" => {
            let slow = |figures: &Figures| Some(interpolated(&figures.ttft_ms, 0.9)? / 1e3);
            vec![
                chart(
                    &all,
                    (
                        "Time to first token over load",
                        "arrivals",
                        "TTFT p50 of the steady part, s",
                    ),
                    (short_load, arm_and_size),
                    ttft,
                ),
                chart(
                    &all,
                    (
                        "… of the slowest tenth",
                        "arrivals",
                        "TTFT p90 of the steady part, s",
                    ),
                    (short_load, arm_and_size),
                    slow,
                ),
            ]
        }
        _ => Vec::new(),
    }
}

/// One chart for each load: tokens per second over slots, a line for each K.
fn surfaces(all: &[Row], line: Words) -> Vec<Chart> {
    let mut loads: Vec<String> = Vec::new();
    for row in all {
        let load = load_words(&row.cell.arrival);
        if !loads.contains(&load) {
            loads.push(load);
        }
    }
    let mut charts = Vec::new();
    for load in loads {
        // The first label that a chart meets stands left: in the order of slots, whatever K has them.
        let mut slots: Vec<u32> = all.iter().map(|row| row.places().1).collect();
        slots.sort_unstable();
        slots.dedup();
        let mut one = Chart {
            title: format!("Tokens per second over slots, {load}"),
            below: "slots of each instance".into(),
            beside: "aggregate tok/s".into(),
            labels: slots.iter().map(u32::to_string).collect(),
            series: Vec::new(),
        };
        for row in all
            .iter()
            .filter(|row| load_words(&row.cell.arrival) == load)
        {
            let name = line(row);
            let point = Point {
                at: slots
                    .iter()
                    .position(|one| *one == row.places().1)
                    .unwrap_or(0),
                value: row.figures.aggregate_tokens_per_s,
                repeats: row
                    .repeats
                    .iter()
                    .map(|figures| figures.aggregate_tokens_per_s)
                    .collect(),
            };
            match one.series.iter_mut().find(|series| series.name == name) {
                Some(series) => series.points.push(point),
                None => one.series.push(Series {
                    name,
                    points: vec![point],
                    dashed: false,
                }),
            }
        }
        let limits = ceilings(all, &load, &slots, &one, line);
        one.series.extend(limits);
        charts.push(one);
    }
    charts
}

/// What the bus allows, for each line whose server told; not above the page of what was measured by more than
/// half, or the measured lines would lie on the ground.
fn ceilings(all: &[Row], load: &str, slots: &[u32], chart: &Chart, line: Words) -> Vec<Series> {
    let measured = chart.series.iter().flat_map(|series| &series.points);
    let most = measured.map(|point| point.value).fold(0.0, f64::max) * 1.5;
    let mut limits: Vec<Series> = Vec::new();
    for row in all {
        let at = slots.iter().position(|one| *one == row.places().1);
        let limit = ceiling::of_row(row).filter(|limit| *limit <= most);
        let (Some(at), Some(value)) = (at, limit) else {
            continue;
        };
        if load_words(&row.cell.arrival) != load {
            continue;
        }
        let name = format!("bus: {}", line(row));
        let point = Point {
            at,
            value,
            repeats: Vec::new(),
        };
        match limits.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => limits.push(Series {
                name,
                points: vec![point],
                dashed: true,
            }),
        }
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::super::rows::made;
    use super::super::svg;
    use super::*;

    #[test]
    fn every_arm_has_a_line_and_every_run_a_dot() {
        let cells = [
            made::cell("a<b", None, 1, 0, 10.0),
            made::cell("a<b", None, 1, 1, 11.0),
            made::cell("a<b", None, 4, 0, 40.0),
            made::cell("c", None, 1, 0, 10.0),
        ];
        let chart = throughput(&cells);
        assert_eq!((chart.labels.len(), chart.series.len()), (2, 2));
        let drawn = svg::render(&chart);
        assert_eq!(drawn.matches("<circle").count(), 4);
        assert!(drawn.contains("a&lt;b") && !drawn.contains("NaN"));
        assert!(svg::render(&throughput(&[])).ends_with("</svg>\n"));
    }

    #[test]
    fn the_flat_line_and_the_climbing_one_are_in_one_plot() {
        let mut cells = Vec::new();
        for (concurrency, climbing) in [(1, 50.0), (4, 90.0), (16, 160.0)] {
            cells.push(made::cell("llama", Some((1, 1)), concurrency, 0, 50.0));
            cells.push(made::cell("llama", Some((1, 8)), concurrency, 0, climbing));
        }
        let chart = throughput(&cells);
        assert_eq!(chart.labels, ["1", "4", "16"]);
        let last = |name: &str| {
            let series = chart.series.iter().find(|one| one.name == name).unwrap();
            series.points.last().unwrap().value
        };
        assert!((last("llama 1×1") - 50.0).abs() < 0.1);
        assert!((last("llama 1×8") - 160.0).abs() < 0.1);
    }
}
