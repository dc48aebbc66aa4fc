//! Maps an `.orkpack` and generates text: prefill on the NPU or its simulator, decode on the CPU.

pub mod cpu;
pub mod device;
pub mod error;
pub mod exec;
pub mod generate;
pub mod map;
pub mod sampler;
pub mod session;
pub mod tokenizer;
