//! The CPU engine: host-form matmuls, KV cache, attention, recurrent layers, experts.

pub(crate) mod activation;
pub(crate) mod attention;
pub(crate) mod conv;
pub(crate) mod delta;
pub(crate) mod experts;
pub(crate) mod kv;
pub(crate) mod linear;
