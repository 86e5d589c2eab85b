//! A chart as SVG that needs nothing else.

use std::fmt::Write;

use super::picture::{Anchor, Chart, HEIGHT, Shape, TEXT_COLOUR, WIDTH};

/// One `svg` element.
#[must_use]
pub fn render(chart: &Chart) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"14\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n"
    );
    for shape in chart.shapes() {
        // A String takes everything.
        let _ = writeln!(svg, "{}", element(&shape));
    }
    svg + "</svg>\n"
}

fn element(shape: &Shape) -> String {
    match shape {
        Shape::Line {
            points,
            colour,
            width,
            dashed,
        } => {
            let points: Vec<String> = points
                .iter()
                .map(|(x, y)| format!("{x:.1},{y:.1}"))
                .collect();
            let dash = if *dashed {
                " stroke-dasharray=\"6 4\""
            } else {
                ""
            };
            format!(
                "<polyline points=\"{}\" fill=\"none\" stroke=\"#{colour:06x}\" stroke-width=\"{width}\"{dash}/>",
                points.join(" ")
            )
        }
        Shape::Dot { x, y, colour } => format!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"#{colour:06x}\" fill-opacity=\"0.6\"/>"
        ),
        Shape::Square { x, y, side, colour } => format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{side}\" height=\"{side}\" fill=\"#{colour:06x}\"/>"
        ),
        Shape::Text {
            x,
            y,
            text,
            anchor,
            bold,
        } => {
            let anchor = match anchor {
                Anchor::Start => "start",
                Anchor::Middle => "middle",
                Anchor::End => "end",
            };
            let weight = if *bold { " font-weight=\"bold\"" } else { "" };
            format!(
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#{TEXT_COLOUR:06x}\"{weight}>{}</text>",
                escape(text)
            )
        }
    }
}

/// For text in SVG and HTML.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
