//! Which engine holds each tensor, and in which form.

use crate::graph::{Graph, Role};

/// Form of a tensor's host slice, before its bytes have a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// The checkpoint's own float type.
    Source,
    /// f32.
    F32,
    /// fp16.
    F16,
    /// int8 codes, one f32 scale a row.
    Int8,
    /// 4-bit codes, one f16 scale per 32 along K.
    Int4,
}

/// What the matrices of a pack become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// Floats as the checkpoint has them, nothing on the NPU.
    Lossless,
    /// W8A8 for prefill, this form for decode.
    Quantised(Decode),
}

/// Form of a matrix for decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decode {
    /// 4-bit groups of 32: 4.5 bits a weight.
    Int4,
    /// int8 with one scale a row: twice the bytes read per token.
    Int8,
}

impl Decode {
    /// As `--decode` and the pack's options spell it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Int4 => "int4",
            Self::Int8 => "int8",
        }
    }
}

/// What prefill multiplies routed experts with, in quantised packs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experts {
    /// An int8 copy beside decode's form: 8 more bits a weight.
    Int8,
    /// Decode's form alone.
    Decode,
}

impl Experts {
    /// As `--expert-prefill` and the pack's options spell it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Decode => "int4",
        }
    }
}

/// Where one tensor lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The slice that the CPU reads.
    pub host: Host,
    /// Whether it also gets native int8 tiles for prefill on the NPU.
    pub npu: bool,
    /// Whether it also gets native int8 tiles for prefill on the CPU.
    pub batch: bool,
}

/// Places every tensor of `graph`, in its order. A lossless pack keeps matrices as the checkpoint
/// has them and nothing on the NPU.
#[must_use]
pub fn place(graph: &Graph, scheme: Scheme, experts: Experts) -> Vec<Placed> {
    graph
        .tensors
        .iter()
        .map(|decl| place_role(decl.role, scheme, experts))
        .collect()
}

fn place_role(role: Role, scheme: Scheme, experts: Experts) -> Placed {
    let host = match (role, scheme) {
        (Role::Vector | Role::OnePlus, _) => Host::F32,
        (_, Scheme::Lossless) => Host::Source,
        // A wrong choice of expert or step costs more than any rounding: these stay floats.
        (Role::Gate, Scheme::Quantised(_)) => Host::F16,
        // Only the last row of a prompt needs the head, so embeddings and heads stay off the NPU.
        (Role::Embedding, Scheme::Quantised(_)) => Host::Int8,
        (Role::Matrix | Role::Experts, Scheme::Quantised(Decode::Int4)) => Host::Int4,
        (Role::Matrix | Role::Experts, Scheme::Quantised(Decode::Int8)) => Host::Int8,
    };
    let lossy = scheme != Scheme::Lossless;
    Placed {
        host,
        npu: lossy && role == Role::Matrix,
        batch: lossy && role == Role::Experts && experts == Experts::Int8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(role: Role, scheme: Scheme) -> Placed {
        place_role(role, scheme, Experts::Int8)
    }

    #[test]
    fn only_matrices_of_lossy_packs_reach_the_npu() {
        let lossy = Scheme::Quantised(Decode::Int4);
        assert!(place(Role::Matrix, lossy).npu);
        assert!(!place(Role::Matrix, Scheme::Lossless).npu);
        assert!(!place(Role::Embedding, lossy).npu);
        assert_eq!(place(Role::Vector, Scheme::Lossless).host, Host::F32);
        assert_eq!(place(Role::Matrix, Scheme::Lossless).host, Host::Source);
        assert!(!place(Role::Experts, lossy).npu);
        assert!(place(Role::Experts, lossy).batch);
        assert!(!place_role(Role::Experts, lossy, Experts::Decode).batch);
        assert_eq!(place(Role::Gate, lossy).host, Host::F16);
        let int8 = Scheme::Quantised(Decode::Int8);
        assert_eq!(place(Role::Matrix, int8).host, Host::Int8);
    }
}
