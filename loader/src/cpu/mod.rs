//! The CPU engine: host-form matmuls, KV cache, attention.

pub(crate) mod attention;
pub(crate) mod kv;
pub(crate) mod linear;
