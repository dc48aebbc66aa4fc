//! Maps an `.orkpack` and generates text: prefill in the NPU simulator or on the CPU, decode on the CPU.

pub mod chat;
mod cpu;
pub mod device;
pub mod error;
mod exec;
pub mod generate;
pub mod map;
pub mod perplexity;
pub mod sampler;
pub mod selftest;
pub mod session;
mod state;
pub mod tokenizer;
