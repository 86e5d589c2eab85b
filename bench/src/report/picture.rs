//! A chart as simple shapes, so that SVG and PNG show the same.

/// Told apart by people who see colours differently too (Okabe and Ito).
const COLOURS: [u32; 7] = [
    0x0072b2, 0xd55e00, 0x009e73, 0xcc79a7, 0xe69f00, 0x56b4e9, 0x000000,
];
const GRID: u32 = 0xdddddd;
const INK: u32 = 0x222222;

/// Of a page, in units.
pub const WIDTH: f64 = 760.0;
pub const HEIGHT: f64 = 430.0;
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 60.0;
const TOP: f64 = 56.0;
const RIGHT: f64 = 190.0;

/// Values over categories, one line for each series.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chart {
    pub title: String,
    /// What the categories are.
    pub below: String,
    /// What the values are, with their unit.
    pub beside: String,
    pub labels: Vec<String>,
    pub series: Vec<Series>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    pub name: String,
    pub points: Vec<Point>,
    /// Not measured: a ceiling.
    pub dashed: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Which category.
    pub at: usize,
    pub value: f64,
    /// Each repeat, so that the spread is seen and not told.
    pub repeats: Vec<f64>,
}

/// Where a text's place lies in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    Line {
        points: Vec<(f64, f64)>,
        colour: u32,
        width: f64,
        dashed: bool,
    },
    Dot {
        x: f64,
        y: f64,
        colour: u32,
    },
    Square {
        x: f64,
        y: f64,
        side: f64,
        colour: u32,
    },
    /// `y` is the base line.
    Text {
        x: f64,
        y: f64,
        text: String,
        anchor: Anchor,
        bold: bool,
    },
}

fn text(x: f64, y: f64, text: &str, anchor: Anchor) -> Shape {
    Shape::Text {
        x,
        y,
        text: text.to_owned(),
        anchor,
        bold: false,
    }
}

fn line(points: Vec<(f64, f64)>, colour: u32, width: f64, dashed: bool) -> Shape {
    Shape::Line {
        points,
        colour,
        width,
        dashed,
    }
}

/// The next of 1, 2, 2.5 and 5 times a power of ten from `value` on.
fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0];
    let found = steps.iter().find(|step| *step * power >= value * 0.999);
    found.unwrap_or(&10.0) * power
}

impl Chart {
    /// As shapes on a page of [`WIDTH`] × [`HEIGHT`].
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "places on a page")]
    pub fn shapes(&self) -> Vec<Shape> {
        let values = self.series.iter().flat_map(|series| &series.points);
        let most = values
            .flat_map(|point| point.repeats.iter().chain([&point.value]))
            .copied()
            .filter(|value| value.is_finite())
            .fold(1e-9, f64::max);
        let tick = round_up(most / 5.0);
        // From zero: a cut axis makes a flat line look steep.
        let ticks = (most / tick).ceil().max(1.0);
        let top = tick * ticks;
        let step = (WIDTH - LEFT - RIGHT) / self.labels.len().max(1) as f64;
        let x = |at: usize| LEFT + step * (at as f64 + 0.5);
        let y = |value: f64| HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP);

        let mut shapes = vec![Shape::Text {
            x: LEFT,
            y: 20.0,
            text: self.title.clone(),
            anchor: Anchor::Start,
            bold: true,
        }];
        shapes.push(text(LEFT, 42.0, &self.beside, Anchor::Start));
        let mut level = 0.0;
        while level <= ticks {
            let value = tick * level;
            let ends = vec![(LEFT, y(value)), (WIDTH - RIGHT, y(value))];
            shapes.push(line(ends, GRID, 1.0, false));
            let digits = if tick >= 1.0 { 0 } else { 3 };
            let label = format!("{value:.digits$}");
            shapes.push(text(LEFT - 8.0, y(value) + 5.0, &label, Anchor::End));
            level += 1.0;
        }
        for (at, label) in self.labels.iter().enumerate() {
            shapes.push(text(x(at), HEIGHT - BOTTOM + 22.0, label, Anchor::Middle));
        }
        let middle = LEFT + (WIDTH - LEFT - RIGHT) / 2.0;
        shapes.push(text(middle, HEIGHT - 14.0, &self.below, Anchor::Middle));
        for (number, series) in self.series.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            let points = series.points.iter().filter(|point| point.value.is_finite());
            let places = points.clone().map(|point| (x(point.at), y(point.value)));
            shapes.push(line(places.collect(), colour, 2.0, series.dashed));
            for point in points {
                for repeat in point.repeats.iter().filter(|value| value.is_finite()) {
                    shapes.push(Shape::Dot {
                        x: x(point.at),
                        y: y(*repeat),
                        colour,
                    });
                }
            }
            let at = TOP + 22.0 * number as f64;
            shapes.push(Shape::Square {
                x: WIDTH - RIGHT + 12.0,
                y: at,
                side: 12.0,
                colour,
            });
            let name: String = series.name.chars().take(20).collect();
            shapes.push(text(WIDTH - RIGHT + 30.0, at + 11.0, &name, Anchor::Start));
        }
        shapes
    }
}

pub(crate) const TEXT_COLOUR: u32 = INK;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_over_the_highest_value() {
        for (value, up) in [
            (1.0, 1.0),
            (1.1, 2.0),
            (23.0, 25.0),
            (0.3, 0.5),
            (7.0, 10.0),
        ] {
            assert!((round_up(value) - up).abs() < 1e-9, "{value}");
        }
        let chart = Chart {
            labels: vec!["a".into()],
            series: vec![Series {
                name: "s".into(),
                dashed: false,
                points: vec![Point {
                    at: 0,
                    value: 130.0,
                    repeats: vec![101.0, 149.0, f64::NAN],
                }],
            }],
            ..Chart::default()
        };
        let shapes = chart.shapes();
        let dots = shapes.iter().filter_map(|shape| match shape {
            Shape::Dot { y, .. } => Some(*y),
            _ => None,
        });
        let dots: Vec<f64> = dots.collect();
        assert_eq!(dots.len(), 2);
        assert!(dots.iter().all(|y| *y >= TOP && *y <= HEIGHT - BOTTOM));
        assert!(!Chart::default().shapes().is_empty());
    }
}
