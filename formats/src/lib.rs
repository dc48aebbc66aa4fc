//! What the orkpack compiler and loader must agree on, and nothing else.
#![doc = include_str!("../README.md")]

pub mod golden;
pub mod layout;
pub mod lint;
pub mod model;
pub mod pack;
pub mod quant;
pub mod regcmd;
