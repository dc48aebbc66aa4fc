//! The CPU engine: what decode runs, and everything of prefill that is not a planned matmul.

pub mod attention;
pub mod kv;
pub mod linear;
