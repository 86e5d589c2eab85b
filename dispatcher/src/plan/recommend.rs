//! Which cell of the table to run, and why.

use serde::Serialize;

use super::predict::Cell;
use crate::memory::Size;

/// A cell within this part of the best is as good: fewer instances and fewer slots win then.
const AS_GOOD: f64 = 0.03;

/// What to run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recommendation {
    pub instances: u32,
    pub slots: u32,
    /// In words.
    pub why: String,
}

impl Recommendation {
    /// The flags.
    #[must_use]
    pub fn flags(&self) -> String {
        format!("--instances {} --slots {}", self.instances, self.slots)
    }
}

/// The cell with the most tokens a second of those that fit; without estimates, of the ceilings.
#[must_use]
pub fn recommend(cells: &[Cell]) -> Option<Recommendation> {
    let rate = |cell: &Cell| cell.estimate_tokens_per_s.or(cell.ceiling_tokens_per_s);
    let fitting = || cells.iter().filter(|cell| cell.fits);
    let best = fitting().filter_map(rate).reduce(f64::max)?;
    let good = fitting().filter(|cell| rate(cell).is_some_and(|own| own >= best * (1.0 - AS_GOOD)));
    let chosen = good.min_by_key(|cell| (cell.instances, cell.slots))?;
    Some(Recommendation {
        instances: chosen.instances,
        slots: chosen.slots,
        why: why(cells, chosen, rate),
    })
}

fn why(cells: &[Cell], chosen: &Cell, rate: impl Fn(&Cell) -> Option<f64>) -> String {
    let find = |instances: u32, slots: u32| {
        cells
            .iter()
            .find(|cell| cell.instances == instances && cell.slots == slots)
    };
    let against = |other: &Cell| {
        let (own, theirs) = (rate(chosen)?, rate(other)?);
        (theirs > 0.0).then(|| own / theirs)
    };
    let mut reasons = Vec::new();
    if let Some(single) = find(1, 1)
        && (chosen.instances, chosen.slots) != (1, 1)
        && let Some(times) = against(single)
    {
        reasons.push(format!(
            "{times:.1} times the tokens of one stream alone for {:.1} times the memory",
            chosen.memory_bytes as f64 / single.memory_bytes.max(1) as f64
        ));
    }
    let more = cells
        .iter()
        .filter(|cell| cell.instances > chosen.instances && cell.slots == chosen.slots)
        .min_by_key(|cell| cell.instances);
    if let Some(more) = more
        && let Some(times) = against(more)
    {
        reasons.push(format!(
            "{} instances of as many slots would take {:.1} times the memory ({}{}) for {:.2} times the tokens",
            more.instances,
            more.memory_bytes as f64 / chosen.memory_bytes.max(1) as f64,
            Size(more.memory_bytes),
            if more.fits { "" } else { ", which does not fit" },
            1.0 / times
        ));
    }
    if chosen.instances == 1 && chosen.slots > 1 {
        reasons.push(format!(
            "a crash interrupts all {} streams, which then resume",
            chosen.blast_radius
        ));
    }
    reasons.join("; ")
}

#[cfg(test)]
mod tests {
    use super::super::predict::tests::study;
    use super::super::{Curve, predict};
    use super::*;
    use crate::bus::Processor;

    const INSTANCES: [u32; 3] = [1, 2, 3];
    const SLOTS: [u32; 5] = [1, 2, 4, 8, 16];

    #[test]
    fn one_instance_with_slots_beats_several_on_one_bus() {
        let mut question = study();
        question.curve = Some(Curve::assumed(&question.weights, 273.0, Processor::Unified));
        let cells = predict(&question, &INSTANCES, &SLOTS);
        let found = recommend(&cells).unwrap();
        assert_eq!((found.instances, found.slots), (1, 16), "{found:?}");
        insta::assert_snapshot!(found.why);
    }

    #[test]
    fn two_devices_want_two_instances() {
        let mut question = study();
        question.curve = Some(Curve::assumed(&question.weights, 273.0, Processor::Gpu));
        question.buses.count = 2;
        question.memory.per_device = true;
        let found = recommend(&predict(&question, &INSTANCES, &SLOTS)).unwrap();
        assert_eq!(found.instances, 2, "{found:?}");
    }

    #[test]
    fn what_does_not_fit_is_not_recommended() {
        let mut question = study();
        question.curve = Some(Curve::assumed(&question.weights, 273.0, Processor::Unified));
        question.memory.usable = 6 << 30;
        let cells = predict(&question, &INSTANCES, &SLOTS);
        let found = recommend(&cells).unwrap();
        let chosen = cells
            .iter()
            .find(|cell| (cell.instances, cell.slots) == (found.instances, found.slots));
        assert!(chosen.unwrap().fits, "{found:?}");
        question.memory.usable = 1;
        assert_eq!(recommend(&predict(&question, &INSTANCES, &SLOTS)), None);
    }
}
