//! A chart as PNG, for places that show no SVG. Letters come from a small font of the program's own, so that no
//! machine lacks them.

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};
use tiny_skia::{
    Color, FillRule, LineCap, LineJoin, Paint, PathBuilder, Pixmap, PremultipliedColorU8, Rect,
    Stroke, StrokeDash, Transform,
};

use super::picture::{Anchor, Chart, HEIGHT, Shape, TEXT_COLOUR, WIDTH};
use crate::error::BenchError;

/// Pixels for each unit of the page, so that the plot is sharp on dense screens too.
const SCALE: f32 = 2.0;
const LETTERS: RasterHeight = RasterHeight::Size24;

/// The file's bytes.
///
/// # Errors
/// The picture cannot be encoded.
pub fn render(chart: &Chart) -> Result<Vec<u8>, BenchError> {
    let failed = |reason: &str| BenchError::System {
        what: "draw a PNG",
        source: std::io::Error::other(reason.to_owned()),
    };
    let mut page = Pixmap::new(pixels(WIDTH), pixels(HEIGHT)).ok_or_else(|| failed("its size"))?;
    page.fill(Color::WHITE);
    for shape in chart.shapes() {
        draw(&mut page, &shape);
    }
    page.encode_png()
        .map_err(|error| failed(&error.to_string()))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "float to integer saturates, and a page is small"
)]
fn pixels(length: f64) -> u32 {
    (length * f64::from(SCALE)) as u32
}

#[expect(clippy::cast_possible_truncation, reason = "places on a page")]
fn scaled(place: f64) -> f32 {
    place as f32 * SCALE
}

fn paint(colour: u32, alpha: u8) -> Paint<'static> {
    let [_, red, green, blue] = colour.to_be_bytes();
    let mut paint = Paint::default();
    paint.set_color_rgba8(red, green, blue, alpha);
    paint
}

fn draw(page: &mut Pixmap, shape: &Shape) {
    let at = Transform::identity();
    match shape {
        Shape::Line {
            points,
            colour,
            width,
            dashed,
        } => {
            let mut path = PathBuilder::new();
            for (number, (x, y)) in points.iter().enumerate() {
                if number == 0 {
                    path.move_to(scaled(*x), scaled(*y));
                } else {
                    path.line_to(scaled(*x), scaled(*y));
                }
            }
            let stroke = Stroke {
                width: scaled(*width),
                line_cap: LineCap::Round,
                line_join: LineJoin::Round,
                dash: dashed
                    .then(|| StrokeDash::new(vec![6.0 * SCALE, 4.0 * SCALE], 0.0))
                    .flatten(),
                ..Stroke::default()
            };
            if let Some(path) = path.finish() {
                page.stroke_path(&path, &paint(*colour, 255), &stroke, at, None);
            }
        }
        Shape::Dot { x, y, colour } => {
            if let Some(circle) = PathBuilder::from_circle(scaled(*x), scaled(*y), 3.5 * SCALE) {
                page.fill_path(&circle, &paint(*colour, 153), FillRule::Winding, at, None);
            }
        }
        Shape::Square { x, y, side, colour } => {
            let side = scaled(*side);
            if let Some(square) = Rect::from_xywh(scaled(*x), scaled(*y), side, side) {
                page.fill_rect(square, &paint(*colour, 255), at, None);
            }
        }
        Shape::Text {
            x,
            y,
            text,
            anchor,
            bold,
        } => write(page, (scaled(*x), scaled(*y)), text, *anchor, *bold),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "places on a page"
)]
fn write(page: &mut Pixmap, (x, y): (f32, f32), text: &str, anchor: Anchor, bold: bool) {
    let weight = if bold {
        FontWeight::Bold
    } else {
        FontWeight::Regular
    };
    let advance = get_raster_width(weight, LETTERS) as i32;
    let length = advance * text.chars().count() as i32;
    let mut left = match anchor {
        Anchor::Start => x as i32,
        Anchor::Middle => x as i32 - length / 2,
        Anchor::End => x as i32 - length,
    };
    // The base line of these letters lies four fifths down.
    let top = y as i32 - LETTERS.val() as i32 * 4 / 5;
    for letter in text.chars() {
        let raster =
            get_raster(letter, weight, LETTERS).or_else(|| get_raster('?', weight, LETTERS));
        if let Some(raster) = raster {
            for (down, row) in raster.rows().enumerate() {
                for (right, ink) in row.iter().enumerate() {
                    blend(page, left + right as i32, top + down as i32, *ink);
                }
            }
        }
        left += advance;
    }
}

/// Darkens one pixel by the share `ink` / 255.
fn blend(page: &mut Pixmap, x: i32, y: i32, ink: u8) {
    let (width, height) = (page.width(), page.height());
    let (Ok(x), Ok(y)) = (u32::try_from(x), u32::try_from(y)) else {
        return;
    };
    if ink == 0 || x >= width || y >= height {
        return;
    }
    let Ok(place) = usize::try_from(y * width + x) else {
        return;
    };
    let [_, red, green, blue] = TEXT_COLOUR.to_be_bytes();
    let Some(pixel) = page.pixels_mut().get_mut(place) else {
        return;
    };
    let mix = |below: u8, above: u8| {
        let sum = u32::from(below) * u32::from(255 - ink) + u32::from(above) * u32::from(ink);
        u8::try_from(sum / 255).unwrap_or(u8::MAX)
    };
    // The page is opaque, so that what is mixed is too.
    let mixed = PremultipliedColorU8::from_rgba(
        mix(pixel.red(), red),
        mix(pixel.green(), green),
        mix(pixel.blue(), blue),
        255,
    );
    *pixel = mixed.unwrap_or(*pixel);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::picture::{Point, Series};

    #[test]
    fn a_plot_has_its_size_its_lines_and_its_letters() {
        let chart = Chart {
            title: "Tokens × slots".into(),
            labels: vec!["1".into(), "2".into()],
            series: vec![Series {
                name: "é漢".into(),
                dashed: true,
                points: vec![
                    Point {
                        at: 0,
                        value: 1.0,
                        repeats: vec![1.0],
                    },
                    Point {
                        at: 1,
                        value: 2.0,
                        repeats: vec![2.0],
                    },
                ],
            }],
            ..Chart::default()
        };
        let page = Pixmap::decode_png(&render(&chart).unwrap()).unwrap();
        assert_eq!((page.width(), page.height()), (1_520, 860));
        let count = |wanted: (u8, u8, u8)| {
            page.pixels()
                .iter()
                .filter(|pixel| (pixel.red(), pixel.green(), pixel.blue()) == wanted)
                .count()
        };
        assert!(count((0, 0x72, 0xb2)) > 500, "the line");
        assert!(count((0x22, 0x22, 0x22)) > 100, "letters");
        assert!(count((255, 255, 255)) > 1_000_000, "the page");
    }
}
