//! Bytes of weights that one step reads, from the model's tensor inventory.

use serde::{Deserialize, Serialize};

/// A model's weights as a decode step meets them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weights {
    /// Read in every step: all but embedding rows and experts; the output head is among them.
    pub always_bytes: u64,
    /// All experts of all layers together; 0 in a dense model.
    pub expert_bytes: u64,
    /// Experts of a layer, and how many of them one token uses.
    pub experts: u32,
    pub experts_used: u32,
}

impl Weights {
    /// Bytes that a step of `rows` tokens reads.
    ///
    /// Of the experts, those that at least one row is sent to, where each row chooses evenly:
    /// 1 − (1 − used/experts)^rows of them. Rows that agree on experts touch fewer.
    #[must_use]
    pub fn bytes_per_step(&self, rows: f64) -> f64 {
        self.always_bytes as f64 + self.expert_bytes as f64 * self.touched(rows)
    }

    /// The least that a step of any number of rows reads: all rows agree on their experts.
    #[must_use]
    pub fn bytes_per_step_min(&self) -> f64 {
        self.bytes_per_step(1.0)
    }

    fn touched(&self, rows: f64) -> f64 {
        if self.experts == 0 || self.experts_used == 0 {
            return 1.0;
        }
        let share = f64::from(self.experts_used.min(self.experts)) / f64::from(self.experts);
        1.0 - (1.0 - share).powf(rows.max(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dense_model_reads_the_same_whatever_the_batch() {
        let dense = Weights {
            always_bytes: 100,
            ..Weights::default()
        };
        assert_eq!(dense.bytes_per_step(1.0), 100.0);
        assert_eq!(dense.bytes_per_step(64.0), 100.0);
    }

    #[test]
    fn more_rows_touch_more_experts_and_never_more_than_there_are() {
        let mixture = Weights {
            always_bytes: 100,
            expert_bytes: 800,
            experts: 8,
            experts_used: 2,
        };
        assert_eq!(mixture.bytes_per_step(1.0), 100.0 + 200.0);
        // Two rows: 1 − (3/4)² = 7/16 of the experts.
        assert_eq!(mixture.bytes_per_step(2.0), 100.0 + 350.0);
        assert!(mixture.bytes_per_step(1000.0) <= 900.0);
        assert_eq!(mixture.bytes_per_step_min(), 300.0);
    }
}
