//! Maps an `.orkpack` and runs it: prefill in the NPU simulator or on the CPU, decode on the CPU.

mod cpu;
pub mod device;
pub mod error;
mod exec;
pub mod map;
pub mod session;
