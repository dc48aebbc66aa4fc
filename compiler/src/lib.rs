//! The orkpack compiler: an MLX checkpoint becomes a self-contained `.orkpack`.
#![forbid(unsafe_op_in_unsafe_fn)]

pub mod against;
pub mod checkpoint;
pub mod compile;
pub mod emit;
pub mod error;
pub mod golden;
pub mod graph;
pub mod memory;
pub mod pack;
pub mod place;
pub mod programs;
pub mod quantize;
pub mod reference;
pub mod report;
pub mod room;
pub mod schedule;
pub mod text;
pub mod tile;
pub mod verify;
