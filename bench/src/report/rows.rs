//! Cells become rows: repeats together, in the order of arm, size and load.

use crate::arrival::Arrival;
use crate::cell::{Cell, Figures, Measured};
use crate::mark::{Mark, marks};
use crate::process::Memory;
use crate::sample::Sample;
use crate::status::ServerWord;
use crate::steady::{Keeping, keeping, steady};

/// Repeats of one cell.
#[derive(Debug)]
pub struct Row {
    /// Of the first repeat.
    pub cell: Cell,
    /// Of all repeats.
    pub figures: Figures,
    pub repeats: Vec<Figures>,
    /// Of those repeats that are not marked: what ratios and verdicts are made of.
    pub sound: Vec<Figures>,
    /// Of all repeats, with the repeat's number.
    pub marks: Vec<(u32, Mark)>,
    pub memory: Option<Memory>,
    pub server: Option<ServerWord>,
    /// All repeats' samples.
    pub samples: Vec<Sample>,
    /// Of an open loop: its steady part alone.
    pub steady: Option<Figures>,
    /// Of an open loop's first repeat.
    pub keeping: Option<Keeping>,
}

impl Row {
    fn new(cell: Cell) -> Self {
        Self {
            cell,
            figures: Figures::default(),
            repeats: Vec::new(),
            sound: Vec::new(),
            marks: Vec::new(),
            memory: None,
            server: None,
            samples: Vec::new(),
            steady: None,
            keeping: None,
        }
    }

    fn add(&mut self, measured: &Measured) {
        let figures = Figures::of(&measured.samples);
        let found = marks(measured);
        if found.is_empty() {
            self.sound.push(figures.clone());
        }
        let repeat = measured.cell.repeat;
        self.marks
            .extend(found.into_iter().map(|mark| (repeat, mark)));
        self.repeats.push(figures);
        self.memory = self.memory.max_with(measured.memory);
        self.server = measured.server.clone().or(self.server.take());
        self.samples.extend(measured.samples.iter().cloned());
        if !matches!(self.cell.arrival, Arrival::Closed { .. }) {
            let part = Figures::of(&steady(&measured.samples).samples);
            let earlier = self.steady.take();
            let parts: Vec<Figures> = earlier.into_iter().chain([part]).collect();
            self.steady = Some(Figures::pooled(&parts));
            self.keeping = self.keeping.or_else(|| keeping(&measured.samples));
        }
    }

    /// Aggregate tokens per second of each repeat that is not marked.
    #[must_use]
    pub fn rates(&self) -> Vec<f64> {
        let rate = |figures: &Figures| figures.aggregate_tokens_per_s;
        self.sound.iter().map(rate).collect()
    }

    /// Aggregate tokens per second, where a repeat is not marked.
    #[must_use]
    pub fn rate(&self) -> Option<f64> {
        crate::statistics::median(&self.rates())
    }

    /// Instances and slots, 1 × 1 where they are not known.
    #[must_use]
    pub fn places(&self) -> (u32, u32) {
        self.cell
            .size
            .map_or((1, 1), |size| (size.instances, size.slots))
    }

    /// Requests in flight, of a closed loop.
    #[must_use]
    pub fn concurrency(&self) -> Option<u32> {
        match self.cell.arrival {
            Arrival::Closed { concurrency } => Some(concurrency),
            _ => None,
        }
    }

    /// Bytes that the server's workers hold, shared pages counted once: by the server's word, else by the system's.
    #[must_use]
    pub fn footprint_bytes(&self) -> Option<u64> {
        let told = self.server.as_ref().and_then(|word| word.footprint_bytes);
        let seen = self.memory.and_then(|memory| memory.proportional_sum_kib);
        told.or_else(|| seen.map(|kib| kib << 10))
    }

    /// Streams that one crash interrupts: those in flight over the instances, as many as have a slot.
    #[must_use]
    pub fn blast_radius(&self) -> Option<f64> {
        let size = self.cell.size.filter(|_| !self.cell.cold)?;
        let each = f64::from(self.concurrency()?) / f64::from(size.instances.max(1));
        Some(each.min(f64::from(size.slots)))
    }
}

/// One row for each cell, repeats together.
#[must_use]
pub fn rows(cells: &[Measured]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for measured in cells {
        let same = |row: &&mut Row| {
            let mine = Cell {
                repeat: row.cell.repeat,
                ..measured.cell.clone()
            };
            row.cell == mine
        };
        if let Some(row) = rows.iter_mut().find(same) {
            row.add(measured);
        } else {
            let mut row = Row::new(measured.cell.clone());
            row.add(measured);
            rows.push(row);
        }
    }
    for row in &mut rows {
        row.figures = Figures::pooled(&row.repeats);
    }
    let size = |row: &Row| row.cell.size.map(|size| (size.instances, size.slots));
    rows.sort_by(|a, b| {
        let load = load_value(&a.cell.arrival).total_cmp(&load_value(&b.cell.arrival));
        a.cell
            .arm
            .cmp(&b.cell.arm)
            .then(size(a).cmp(&size(b)))
            .then(b.cell.cold.cmp(&a.cell.cold))
            .then(load)
    });
    rows
}

trait MaxWith {
    fn max_with(self, other: Self) -> Self;
}

impl MaxWith for Option<Memory> {
    fn max_with(self, other: Self) -> Self {
        let (Some(a), Some(b)) = (self, other) else {
            return self.or(other);
        };
        Some(Memory {
            peak_resident_sum_kib: a.peak_resident_sum_kib.max(b.peak_resident_sum_kib),
            proportional_sum_kib: a.proportional_sum_kib.max(b.proportional_sum_kib),
            processes: a.processes.max(b.processes),
        })
    }
}

fn load_value(arrival: &Arrival) -> f64 {
    match *arrival {
        Arrival::Closed { concurrency } => f64::from(concurrency),
        Arrival::Constant { per_s } | Arrival::Poisson { per_s } | Arrival::Gamma { per_s, .. } => {
            per_s
        }
        Arrival::Trace { speed } => speed,
    }
}

/// A load in few words.
#[must_use]
pub fn load_words(arrival: &Arrival) -> String {
    match arrival {
        Arrival::Closed { concurrency } => format!("concurrency {concurrency}"),
        Arrival::Constant { per_s } => format!("{per_s}/s even"),
        Arrival::Poisson { per_s } => format!("{per_s}/s Poisson"),
        Arrival::Gamma { per_s, burstiness } => format!("{per_s}/s gamma {burstiness}"),
        Arrival::Trace { speed } => format!("trace × {speed}"),
    }
}

/// Test data: cells with a given speed.
#[cfg(test)]
pub(crate) mod made {
    use super::*;
    use crate::sample::Outcome;
    use crate::target::Size;

    /// One repeat of `size` under `concurrency`, whose `requests` answers of 10 tokens make `rate` tokens a second together.
    pub(crate) fn cell(
        arm: &str,
        size: Option<(u32, u32)>,
        concurrency: u32,
        repeat: u32,
        rate: f64,
    ) -> Measured {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "test data"
        )]
        let wall_us = (16.0 * 10.0 / rate * 1e6) as u64;
        let sample = |id| {
            let mut sample = Sample::begin(id, 0, 0, 0);
            sample.token(wall_us / 10);
            sample.done_us = wall_us;
            sample.output_tokens = 10;
            sample.usage = Some(crate::chunk::Usage {
                completion_tokens: 10,
                ..crate::chunk::Usage::default()
            });
            sample.counted_by = crate::sample::CountedBy::Usage;
            sample.outcome = Outcome::Done;
            sample
        };
        let what = Cell {
            arm: arm.into(),
            size: size.map(|(instances, slots)| Size { instances, slots }),
            arrival: Arrival::Closed { concurrency },
            repeat,
            cold: false,
        };
        Measured::new(what, repeat, (0..16).map(sample).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strain::Strain;

    #[test]
    fn a_marked_repeat_is_shown_and_counts_for_no_ratio() {
        let mut marked = made::cell("a", None, 4, 1, 50.0);
        marked.strain = Some(Strain {
            heat_events: Some(1),
            ..Strain::default()
        });
        let cells = [
            made::cell("a", None, 4, 0, 100.0),
            marked,
            made::cell("a", None, 4, 2, 110.0),
        ];
        let rows = rows(&cells);
        assert_eq!(
            (rows.len(), rows[0].repeats.len(), rows[0].sound.len()),
            (1, 3, 2)
        );
        assert!((rows[0].rate().unwrap() - 105.0).abs() < 0.1);
        assert_eq!(rows[0].marks[0].0, 1);
    }

    #[test]
    fn the_blast_radius_is_what_one_instance_has_in_its_slots() {
        let radius = |size, concurrency| {
            rows(&[made::cell("a", size, concurrency, 0, 1.0)])[0].blast_radius()
        };
        assert_eq!(radius(Some((2, 8)), 16), Some(8.0));
        assert_eq!(radius(Some((2, 8)), 4), Some(2.0));
        assert_eq!(radius(Some((1, 1)), 16), Some(1.0));
        assert_eq!(radius(None, 16), None);
    }
}
