//! What a run leaves behind.

pub mod compared;
pub mod hlog;
pub mod html;
pub mod jsonl;
pub mod markdown;
pub mod picture;
pub mod plots;
pub mod png;
pub mod predicted;
pub mod published;
pub mod rows;
pub mod svg;
pub mod words;

use crate::record::Recorded;
use markdown::Slo;

/// A run as Markdown: what it was, its table, the study's own beside it where it was a part of the study, and
/// the verdict.
#[must_use]
pub fn markdown(recorded: &Recorded, slo: Slo) -> String {
    let run = &recorded.run;
    let mut failures = recorded.failures.clone();
    if !recorded.unfinished.is_empty() {
        failures.push(format!(
            "{} cells were cut off; what they have is shown",
            recorded.unfinished.len()
        ));
    }
    let cells = &recorded.cells;
    let table = match run.verb.as_str() {
        "single" => markdown::single(cells, &failures),
        "scale" => markdown::scale(cells, &failures) + &predicted::beside(recorded),
        "surface" => {
            markdown::surface(cells)
                + &markdown::scale(cells, &failures)
                + &predicted::beside(recorded)
        }
        "load" => markdown::load(cells, &failures, slo),
        _ => markdown::sweep(cells, &failures),
    };
    let mut text = markdown::heading(run) + &table;
    if run.verb == "compare" {
        text += &compared::of_run(recorded);
        return text;
    }
    if run.suite.as_deref() == Some("study") {
        text += &published::beside(&run.verb).unwrap_or_default();
    }
    for sentence in words::verdict(cells, slo, run.seed) {
        text += &format!("\n**Verdict.** {sentence}\n");
    }
    text
}

/// What the parts of a study say together, such as which engine for which work; nothing where there are no two.
#[must_use]
pub fn joint_verdict(runs: &[Recorded], slo: Slo) -> String {
    let parts: Vec<&Recorded> = runs
        .iter()
        .filter(|run| run.run.suite.as_deref() == Some("study"))
        .collect();
    let [first, _, ..] = parts[..] else {
        return String::new();
    };
    let cells: Vec<_> = parts.iter().flat_map(|run| run.cells.clone()).collect();
    let mut text = String::from("## study: the verdict\n");
    for sentence in words::verdict(&cells, slo, first.run.seed) {
        text += &format!("\n**Verdict.** {sentence}\n");
    }
    text
}
