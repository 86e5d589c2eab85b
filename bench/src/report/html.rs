//! One page that needs nothing else: tables, plots, verdict. Reads the Markdown that this program writes, and no other.

use super::markdown::Slo;
use super::plots;
use super::svg::{self, escape};
use crate::record::Recorded;

const STYLE: &str = "body{font:15px/1.5 sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}\
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}\
th,td{border:1px solid #ddd;padding:.3rem .5rem;text-align:right;white-space:nowrap}\
th:first-child,td:first-child{text-align:left}th{background:#f5f5f5}\
code{background:#f5f5f5;word-break:break-all}svg{max-width:48rem;display:block;margin:1rem 0}\
.verdict{border-left:4px solid #0072b2;padding:.3rem .8rem;background:#f0f7fb}";

/// The page of all runs.
#[must_use]
pub fn page(runs: &[Recorded], slo: Slo) -> String {
    let mut body = String::from("<h1>dispatcher-bench</h1>\n");
    for recorded in runs {
        body += &body_of(&super::markdown(recorded, slo));
        for chart in plots::of_run(recorded) {
            body += &svg::render(&chart);
        }
    }
    body += &body_of(&super::joint_verdict(runs, slo));
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>dispatcher-bench</title><style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n"
    )
}

/// Headings, tables and paragraphs.
fn body_of(markdown: &str) -> String {
    let mut html = String::new();
    let mut rows = 0;
    for line in markdown.lines() {
        let is_row = line.starts_with('|');
        if rows > 0 && !is_row {
            html += "</table>\n";
            rows = 0;
        }
        if is_row {
            if rows == 0 {
                html += "<table>\n";
            }
            // The second row of a table only rules a line.
            if rows != 1 {
                html += &table_row(line, if rows == 0 { "th" } else { "td" });
            }
            rows += 1;
        } else if let Some(heading) = line.strip_prefix("## ") {
            html += &format!("<h2>{}</h2>\n", inline(heading));
        } else if let Some(sentence) = line.strip_prefix("**Verdict.** ") {
            html += &format!(
                "<p class=\"verdict\"><strong>Verdict.</strong> {}</p>\n",
                inline(sentence)
            );
        } else if !line.is_empty() {
            html += &format!("<p>{}</p>\n", inline(line));
        }
    }
    if rows > 0 {
        html += "</table>\n";
    }
    html
}

fn table_row(line: &str, tag: &str) -> String {
    let inner = line.trim_matches('|');
    let cells = inner
        .split(" | ")
        .map(|cell| format!("<{tag}>{}</{tag}>", inline(cell.trim())));
    format!("<tr>{}</tr>\n", cells.collect::<String>())
}

/// Every second piece between back ticks is code.
fn inline(text: &str) -> String {
    let pieces = text.split('`').enumerate().map(|(number, piece)| {
        let piece = escape(piece);
        if number % 2 == 1 {
            format!("<code>{piece}</code>")
        } else {
            piece
        }
    });
    pieces.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_headings_and_code_become_html_and_nothing_foreign_gets_in() {
        let html = body_of(
            "## a <b>\n\nrun `x --y`\n\n| arm | tok/s |\n|---|---|\n| <script> | 5 |\n\n**Verdict.** run it\n| last |\n|---|\n",
        );
        assert_eq!(
            html,
            "<h2>a &lt;b&gt;</h2>\n<p>run <code>x --y</code></p>\n<table>\n<tr><th>arm</th><th>tok/s</th></tr>\n<tr><td>&lt;script&gt;</td><td>5</td></tr>\n</table>\n<p class=\"verdict\"><strong>Verdict.</strong> run it</p>\n<table>\n<tr><th>last</th></tr>\n</table>\n"
        );
    }
}
