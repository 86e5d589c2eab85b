//! What K instances of so many slots would give, before anything is loaded.
//!
//! The ceiling comes from two figures alone: the bytes that the file's header says a step must read,
//! and the bandwidth that this machine was measured to have. The estimate adds how long steps take:
//! assumed, or measured once by `plan --measure` or by a server that ran. docs/BUS.md has the formulas.

mod blocking;
pub mod calibration;
pub mod cli;
mod curve;
mod error;
mod measure;
mod mlx;
mod model;
mod predict;
mod prepare;
mod recommend;
mod table;

pub use curve::Curve;
pub use error::PlanError;
pub use model::{ModelError, ModelFacts};
pub use predict::{Buses, Cell, Memory, Question, Workload, predict};
pub use prepare::{Bandwidth, Prepared, prepare};
pub use recommend::{Recommendation, recommend};
