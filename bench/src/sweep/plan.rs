//! What is measured, and in which order.

use std::path::PathBuf;
use std::time::Duration;

use crate::arrival::Arrival;
use crate::cell::Cell;
use crate::client::Patience;
use crate::endpoint::Endpoint;
use crate::random::Random;
use crate::target::{Launch, Size};

/// A server under test.
#[derive(Clone, Debug, PartialEq)]
pub struct Arm {
    pub name: String,
    pub place: Place,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Place {
    /// It runs already, in whatever size.
    Url(Endpoint),
    /// It is started for each size and repeat.
    Exec(Launch),
}

/// Generations that are not measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WarmUp {
    /// So many before each cell, one after another.
    EachCell(u64),
    /// So many for each instance once after the start, as many at a time as there are instances.
    EachInstance(u64),
}

impl WarmUp {
    /// For the contract.
    #[must_use]
    pub fn words(self) -> String {
        match self {
            Self::EachCell(count) => format!("{count} before each cell"),
            Self::EachInstance(count) => format!("{count} per instance after its start"),
        }
    }
}

/// In which order sessions (an arm in one size, one repeat) run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    AsGiven,
    /// Each repeat in an order of its own, drawn from the seed.
    Shuffled,
    /// A B, B A, A B, …: what drifts over time troubles both alike.
    Alternating,
}

/// All that is to be measured.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub arms: Vec<Arm>,
    /// Of the arms that are started.
    pub sizes: Vec<Size>,
    pub loads: Vec<Arrival>,
    pub repeats: u32,
    pub requests: u64,
    pub warm_up: WarmUp,
    /// The very first request after a start is a cell of its own.
    pub cold: bool,
    /// Of the loads of a session, those behind the first that saturates the server are left out.
    pub until_saturated: bool,
    pub order: Order,
    pub cool_down: Duration,
    pub patience: Patience,
    pub seed: u64,
    pub out: Option<PathBuf>,
    /// What was predicted, to be kept with the results.
    pub plan: Option<serde_json::Value>,
    /// An interrupted run in `out` goes on, if there is one.
    pub resume: bool,
}

/// One server from its start to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Session {
    pub(super) arm: usize,
    pub(super) size: Option<Size>,
    pub(super) repeat: u32,
}

impl Session {
    pub(super) fn words(&self, matrix: &Matrix) -> String {
        let name = &matrix.arms[self.arm].name;
        let size = self.size.map_or_else(String::new, |size| {
            format!(", {} instances × {} slots", size.instances, size.slots)
        });
        format!("{name}{size}, run {}", self.repeat + 1)
    }

    pub(super) fn cell(&self, matrix: &Matrix, arrival: Arrival, cold: bool) -> Cell {
        Cell {
            arm: matrix.arms[self.arm].name.clone(),
            size: self.size,
            arrival,
            repeat: self.repeat,
            cold,
        }
    }

    pub(super) fn cold_cell(&self, matrix: &Matrix) -> Option<Cell> {
        let one = Arrival::Closed { concurrency: 1 };
        (matrix.cold && self.size.is_some()).then(|| self.cell(matrix, one, true))
    }
}

/// All sessions, in their order.
pub(super) fn sessions(matrix: &Matrix) -> Vec<Session> {
    let mut random = Random::new(matrix.seed, "order");
    let mut all = Vec::new();
    for repeat in 0..matrix.repeats {
        let mut some = Vec::new();
        for (arm, what) in matrix.arms.iter().enumerate() {
            let session = |size| Session { arm, size, repeat };
            match what.place {
                Place::Url(_) => some.push(session(None)),
                Place::Exec(_) => some.extend(matrix.sizes.iter().map(|size| session(Some(*size)))),
            }
        }
        match matrix.order {
            Order::AsGiven => {}
            Order::Shuffled => random.shuffle(&mut some),
            Order::Alternating if repeat % 2 == 1 => some.reverse(),
            Order::Alternating => {}
        }
        all.extend(some);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(order: Order) -> Matrix {
        let arm = |name: &str| Arm {
            name: name.into(),
            place: Place::Exec(Launch {
                command: "x {port}".into(),
                ready_within: Duration::ZERO,
                log: None,
                api_key: None,
            }),
        };
        Matrix {
            arms: vec![arm("a"), arm("b")],
            sizes: vec![Size {
                instances: 1,
                slots: 1,
            }],
            loads: Vec::new(),
            repeats: 4,
            requests: 0,
            warm_up: WarmUp::EachCell(0),
            cold: false,
            until_saturated: false,
            order,
            cool_down: Duration::ZERO,
            patience: Patience::default(),
            seed: 1,
            out: None,
            plan: None,
            resume: false,
        }
    }

    #[test]
    fn two_arms_alternate_as_abba() {
        let arms =
            |order| -> Vec<usize> { sessions(&matrix(order)).iter().map(|s| s.arm).collect() };
        assert_eq!(arms(Order::Alternating), [0, 1, 1, 0, 0, 1, 1, 0]);
        assert_eq!(arms(Order::AsGiven), [0, 1, 0, 1, 0, 1, 0, 1]);
        let shuffled = arms(Order::Shuffled);
        assert!(
            shuffled
                .chunks(2)
                .all(|pair| pair.contains(&0) && pair.contains(&1))
        );
        assert_eq!(shuffled, arms(Order::Shuffled));
    }

    #[test]
    fn a_server_that_is_only_known_by_url_has_no_sizes() {
        let mut matrix = matrix(Order::AsGiven);
        matrix.arms[0].place = Place::Url(Endpoint::parse("http://x", None).unwrap());
        matrix.sizes.push(Size {
            instances: 2,
            slots: 1,
        });
        let sizes: Vec<Option<u32>> = sessions(&matrix)
            .iter()
            .take(3)
            .map(|session| session.size.map(|size| size.instances))
            .collect();
        assert_eq!(sizes, [None, Some(1), Some(2)]);
    }
}
