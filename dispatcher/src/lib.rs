//! Takes requests, keeps K workers alive, and matches the two.

pub mod clock;
pub mod gateway;
pub mod input;
pub mod link;
pub mod machine;
pub mod process;
pub mod relay;
pub mod view;
