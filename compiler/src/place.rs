//! Which engine holds each tensor, and in which form.

use crate::graph::{Graph, Role};

/// Form of a tensor's host slice, before its bytes have a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// The checkpoint's own float type.
    Source,
    /// f32.
    F32,
    /// int8 codes, one f32 scale a row.
    Int8,
    /// 4-bit codes, one f16 scale per 32 along K.
    Int4,
}

/// Where one tensor lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The slice that the CPU reads.
    pub host: Host,
    /// Whether it also gets native int8 tiles for prefill on the NPU.
    pub npu: bool,
}

/// Places every tensor of `graph`, in its order. A lossless pack keeps matrices as the checkpoint
/// has them and nothing on the NPU.
#[must_use]
pub fn place(graph: &Graph, lossless: bool) -> Vec<Placed> {
    graph
        .tensors
        .iter()
        .map(|decl| place_role(decl.role, lossless))
        .collect()
}

fn place_role(role: Role, lossless: bool) -> Placed {
    let host = match (role, lossless) {
        (Role::Vector | Role::OnePlus, _) => Host::F32,
        (Role::Matrix | Role::Embedding, true) => Host::Source,
        // Only the last row of a prompt needs the head, so embeddings and heads stay off the NPU.
        (Role::Embedding, false) => Host::Int8,
        (Role::Matrix, false) => Host::Int4,
    };
    Placed {
        host,
        npu: !lossless && matches!(role, Role::Matrix),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_matrices_of_lossy_packs_reach_the_npu() {
        assert!(place_role(Role::Matrix, false).npu);
        assert!(!place_role(Role::Matrix, true).npu);
        assert!(!place_role(Role::Embedding, false).npu);
        assert_eq!(place_role(Role::Vector, true).host, Host::F32);
        assert_eq!(place_role(Role::Matrix, true).host, Host::Source);
    }
}
