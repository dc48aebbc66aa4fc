//! The closed set of operations that a model's op list is made of.

use crate::model::{CacheId, RopeId, Slot, StateId, TensorId};
use serde::{Deserialize, Serialize};

/// One operation. Slots are f32 `[rows, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Op {
    /// `out[r] = table[id[r]] * scale`
    Embed {
        /// `[vocab, width]`
        table: TensorId,
        /// Destination.
        out: Slot,
        /// Multiplier (1 in most families).
        scale: f32,
    },
    /// `out = x / sqrt(mean(x^2) + eps) * w` over groups of `w.len()` lanes.
    RmsNorm {
        /// Source.
        x: Slot,
        /// `[width]`, or `[head_dim]` for per-head norms.
        weight: TensorId,
        /// Destination; may equal `x`.
        out: Slot,
        /// Added to the mean square.
        eps: f32,
    },
    /// `out = x W^T (+ bias)`; runs on the NPU in prefill when the tensor has an NPU form.
    Linear {
        /// Source `[rows, k]`.
        x: Slot,
        /// `[n, k]`
        weight: TensorId,
        /// `[n]`
        bias: Option<TensorId>,
        /// Destination `[rows, n]`.
        out: Slot,
    },
    /// Rotates every head of `x` by its row's position.
    Rope {
        /// Rotated in place.
        x: Slot,
        /// Heads in `x`.
        heads: u32,
        /// Elements per head.
        head_dim: u32,
        /// Which table.
        rope: RopeId,
    },
    /// Causal grouped-query attention; appends k and v to the cache first.
    Attention {
        /// `[rows, heads * head_dim]`
        q: Slot,
        /// `[rows, kv_heads * head_dim]`
        k: Slot,
        /// `[rows, kv_heads * head_dim]`
        v: Slot,
        /// `[rows, heads * head_dim]`
        out: Slot,
        /// Query heads.
        heads: u32,
        /// Factor on the scores.
        scale: f32,
        /// Sliding window in positions; 0 is unlimited.
        window: u32,
        /// Which cache.
        cache: CacheId,
    },
    /// `out = act(gate) * up`
    Glu {
        /// Gate half.
        gate: Slot,
        /// Up half.
        up: Slot,
        /// Destination; may equal `gate`.
        out: Slot,
        /// Activation.
        act: Activation,
    },
    /// `out += x * scale`
    Add {
        /// Addend.
        x: Slot,
        /// Accumulator.
        out: Slot,
        /// Multiplier (1 in most families).
        scale: f32,
    },
    /// `x *= scale`
    Scale {
        /// Multiplied in place.
        x: Slot,
        /// Multiplier.
        scale: f32,
    },
    /// `out += sigmoid(gate) * x`, one gate a row.
    AddGated {
        /// Addend `[rows, width]`.
        x: Slot,
        /// `[rows, 1]`
        gate: Slot,
        /// Accumulator `[rows, width]`.
        out: Slot,
    },
    /// Causal convolution of every channel over time, then silu:
    /// `out[t][c] = silu(sum over j of weight[c][j] * x[t - taps + 1 + j][c])`. The state holds the last
    /// `taps - 1` rows of `x`, oldest first.
    Conv {
        /// `[rows, channels]`
        x: Slot,
        /// f32 `[channels, taps]`, the current row's tap last.
        weight: TensorId,
        /// Destination `[rows, channels]`.
        out: Slot,
        /// `[1, taps - 1, channels]`
        state: StateId,
    },
    /// The gated delta rule, row by row. Value head j reads key head `j / (heads / key_heads)`; its state
    /// S is `[value_dim, key_dim]`. With `k = k / |k|`, `q = scale * q / |q|` (`|x|^2 = sum x^2 + eps`):
    /// `S *= exp(-exp(a_log) * softplus(a + dt_bias))`, `d = sigmoid(b) * (v - S k)`, `S += d k^T`,
    /// `out = S q`.
    Delta {
        /// All query heads, then all key heads, then all value heads:
        /// `[rows, 2 * key_heads * key_dim + heads * value_dim]`.
        qkv: Slot,
        /// `[rows, heads]`: decides the decay.
        a: Slot,
        /// `[rows, heads]`: decides the step.
        b: Slot,
        /// f32 `[heads]`
        a_log: TensorId,
        /// f32 `[heads]`
        dt_bias: TensorId,
        /// Destination `[rows, heads * value_dim]`.
        out: Slot,
        /// Query and key heads.
        key_heads: u32,
        /// Factor on the queries.
        scale: f32,
        /// Added to the squared length of queries and keys.
        eps: f32,
        /// `[heads, value_dim, key_dim]`
        state: StateId,
    },
    /// Routed experts: p = softmax of the router's row; the `top` largest (the lower index where two are
    /// equal) weigh `down_e(act(gate_e x) * up_e x)`.
    Moe {
        /// `[rows, width]`
        x: Slot,
        /// `[rows, experts]`
        router: Slot,
        /// A stack of experts `[inner, width]`.
        gate: TensorId,
        /// A stack of experts `[inner, width]`.
        up: TensorId,
        /// A stack of experts `[width, inner]`.
        down: TensorId,
        /// Destination `[rows, width]`.
        out: Slot,
        /// Experts of one row.
        top: u32,
        /// Whether the chosen weights are divided by their sum.
        renormalise: bool,
        /// Activation.
        act: Activation,
    },
}

/// Gate activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activation {
    /// `x / (1 + exp(-x))`
    Silu,
    /// `x / 2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`
    GeluTanh,
    /// `1 / (1 + exp(-x))`
    Sigmoid,
}
