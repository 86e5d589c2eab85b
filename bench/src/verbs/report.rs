//! `report`: tables, plots, one page, and the verdict, from raw records.

use std::path::Path;

use super::say;
use crate::cli::{PagesArgs, ReportArgs, SloArgs};
use crate::error::BenchError;
use crate::record::{self, Recorded};
use crate::report::markdown::Slo;
use crate::report::{self, hlog, html, plots, png, svg};

impl From<SloArgs> for Slo {
    fn from(args: SloArgs) -> Self {
        Self {
            ttft_ms: args.slo_ttft_ms,
            tpot_ms: args.slo_tpot_ms,
        }
    }
}

pub(super) fn report_verb(args: &ReportArgs) -> Result<(), BenchError> {
    let slo = Slo::from(args.slo);
    let mut runs: Vec<Recorded> = Vec::new();
    for path in &args.files {
        runs.extend(record::read(path)?);
    }
    if let Some(verb) = &args.verb {
        runs.retain(|recorded| recorded.run.verb == *verb);
        if runs.is_empty() {
            return Err(BenchError::Usage(format!("no run of {verb} is in there")));
        }
    }
    for recorded in &runs {
        say(&report::markdown(recorded, slo));
    }
    let joint = report::joint_verdict(&runs, slo);
    if !joint.is_empty() {
        say(&joint);
    }
    write_pages(&runs, slo, &args.pages)
}

/// Writes the page and the plots that were asked for.
pub(super) fn write_pages(
    runs: &[Recorded],
    slo: Slo,
    pages: &PagesArgs,
) -> Result<(), BenchError> {
    if let Some(path) = &pages.html {
        write(path, html::page(runs, slo).as_bytes())?;
    }
    // One plot holds what one table would: of several runs, all cells that a line can be drawn through.
    let cells: Vec<_> = runs.iter().flat_map(|run| run.cells.clone()).collect();
    if let Some(path) = &pages.svg {
        write(path, svg::render(&plots::throughput(&cells)).as_bytes())?;
    }
    if let Some(path) = &pages.png {
        write(path, &png::render(&plots::throughput(&cells))?)?;
    }
    if let Some(path) = &pages.hlog {
        write(path, &hlog::log(runs)?)?;
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), BenchError> {
    std::fs::write(path, bytes).map_err(|source| BenchError::File {
        path: path.to_owned(),
        source,
    })
}
