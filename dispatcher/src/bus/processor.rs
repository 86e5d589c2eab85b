//! What computes, as far as assumptions about it go where nothing was timed.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Processor {
    /// The machine's cores.
    Cpu,
    /// A GPU that shares the machine's memory: a Mac's.
    Unified,
    /// A GPU with memory of its own.
    Gpu,
}

impl Processor {
    /// By an engine's words for where it runs.
    #[must_use]
    pub fn of(device: &str) -> Self {
        if device.contains("CPU") {
            Self::Cpu
        } else if device.contains("Metal") {
            Self::Unified
        } else {
            Self::Gpu
        }
    }

    /// The part of the bandwidth that a step of one row is assumed to reach.
    ///
    /// This and [`Self::further_row`] come from single measurements of each kind (docs/BUS.md); engines
    /// and formats differ from them by a factor of two, so what is made from them is called a guess.
    #[must_use]
    pub fn bus_share(self) -> f64 {
        match self {
            Self::Cpu => 0.6,
            Self::Unified => 0.9,
            Self::Gpu => 0.3,
        }
    }

    /// What each further row is assumed to add, as a part of the time of a step of one.
    #[must_use]
    pub fn further_row(self) -> f64 {
        match self {
            Self::Cpu => 0.5,
            Self::Unified => 0.3,
            Self::Gpu => 0.05,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engines_words_say_what_computes() {
        assert_eq!(Processor::of("CPU (2 threads)"), Processor::Cpu);
        assert_eq!(Processor::of("MLX CPU (float32)"), Processor::Cpu);
        assert_eq!(Processor::of("MLX Metal"), Processor::Unified);
        assert_eq!(Processor::of("CUDA0: NVIDIA H200"), Processor::Gpu);
    }
}
