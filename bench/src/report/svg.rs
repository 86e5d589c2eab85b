//! A plot of aggregate tokens per second, as SVG that needs nothing else.

use std::fmt::Write;

use super::markdown::{Row, load_words, rows};
use crate::cell::{Figures, Measured};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 60.0;
const TOP: f64 = 30.0;
const RIGHT: f64 = 170.0;

/// Told apart by people who see colours differently too (Okabe and Ito).
const COLOURS: [&str; 7] = [
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
];

/// One line for each arm and size (or, where each size has one load, for each arm); every repeat is a dot,
/// so that the spread is seen and not told.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "places on a page")]
pub fn throughput(cells: &[Measured]) -> String {
    let rows: Vec<Row> = rows(cells)
        .into_iter()
        .filter(|row| !row.cell.cold)
        .collect();
    let by_size = rows
        .iter()
        .all(|row| row.cell.arrival == rows[0].cell.arrival);
    let label = |row: &Row| match (by_size, row.cell.size) {
        (true, Some(size)) => format!("{}×{}", size.instances, size.slots),
        _ => load_words(&row.cell.arrival).replace("concurrency ", ""),
    };
    let line = |row: &Row| match (by_size, row.cell.size) {
        (false, Some(size)) => format!("{} {}×{}", row.cell.arm, size.instances, size.slots),
        _ => row.cell.arm.clone(),
    };
    let mut labels: Vec<String> = Vec::new();
    let mut lines: Vec<String> = Vec::new();
    for row in &rows {
        for (all, one) in [(&mut labels, label(row)), (&mut lines, line(row))] {
            if !all.contains(&one) {
                all.push(one);
            }
        }
    }
    let rate = |figures: &Figures| figures.aggregate_tokens_per_s;
    let most = rows
        .iter()
        .flat_map(|row| row.repeats.iter().map(rate))
        .fold(1e-9, f64::max)
        * 1.1;
    let step = (WIDTH - LEFT - RIGHT) / labels.len().max(1) as f64;
    let x = |row: &Row| {
        let at = labels
            .iter()
            .position(|one| *one == label(row))
            .unwrap_or(0);
        LEFT + step * (at as f64 + 0.5)
    };
    let y = |rate: f64| HEIGHT - BOTTOM - rate / most * (HEIGHT - BOTTOM - TOP);

    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n"
    );
    let mut put = |text: String| {
        let _ = writeln!(svg, "{text}");
    };
    // From zero: a cut axis makes a flat line look steep.
    for tick in 0..=5 {
        let value = most / 1.1 * f64::from(tick) / 5.0;
        put(format!(
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{value:.0}</text>",
            WIDTH - RIGHT,
            y(value),
            y(value),
            LEFT - 8.0,
            y(value) + 4.0
        ));
    }
    for (at, text) in labels.iter().enumerate() {
        put(format!(
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            LEFT + step * (at as f64 + 0.5),
            HEIGHT - BOTTOM + 20.0,
            escape(text)
        ));
    }
    let below = if by_size {
        "instances × slots"
    } else {
        "load"
    };
    put(format!(
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{below}</text><text transform=\"translate(18 {}) rotate(-90)\" text-anchor=\"middle\">aggregate tokens per second</text>",
        LEFT + (WIDTH - LEFT - RIGHT) / 2.0,
        HEIGHT - 15.0,
        HEIGHT / 2.0
    ));
    for (number, name) in lines.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let mine: Vec<&Row> = rows.iter().filter(|row| line(row) == *name).collect();
        let points: Vec<String> = mine
            .iter()
            .map(|row| format!("{:.1},{:.1}", x(row), y(rate(&row.figures))))
            .collect();
        put(format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            points.join(" ")
        ));
        for row in mine {
            for repeat in &row.repeats {
                put(format!(
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"{colour}\" fill-opacity=\"0.6\"/>",
                    x(row),
                    y(rate(repeat))
                ));
            }
        }
        let at = TOP + 20.0 * number as f64;
        put(format!(
            "<rect x=\"{}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{colour}\"/><text x=\"{}\" y=\"{}\">{}</text>",
            WIDTH - RIGHT + 12.0,
            at,
            WIDTH - RIGHT + 30.0,
            at + 11.0,
            escape(name)
        ));
    }
    svg + "</svg>\n"
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrival::Arrival;
    use crate::cell::Cell;
    use crate::sample::{Outcome, Sample};

    fn cell(arm: &str, concurrency: u32, repeat: u32) -> Measured {
        let mut sample = Sample::begin(0, 0, 0, 0);
        sample.done_us = 1_000_000;
        sample.output_tokens = u64::from(concurrency * 10 + repeat);
        sample.outcome = Outcome::Done;
        Measured {
            cell: Cell {
                arm: arm.into(),
                size: None,
                arrival: Arrival::Closed { concurrency },
                repeat,
                cold: false,
            },
            order: 0,
            memory: None,
            samples: vec![sample],
        }
    }

    #[test]
    fn every_arm_has_a_line_and_every_run_a_dot() {
        let cells = [
            cell("a<b", 1, 0),
            cell("a<b", 1, 1),
            cell("a<b", 4, 0),
            cell("c", 1, 0),
        ];
        let svg = throughput(&cells);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert_eq!(svg.matches("<circle").count(), 4);
        assert!(svg.contains("a&lt;b") && !svg.contains("NaN"));
        assert!(throughput(&[]).ends_with("</svg>\n"));
    }
}
