//! Gated activations.

use ork_formats::model::Activation;
use ork_kernels as kernels;

/// `out = act(gate) * up`.
pub(crate) fn glu(act: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match act {
        Activation::Silu => kernels::silu_mul(gate, up, out),
        Activation::GeluTanh => kernels::gelu_tanh_mul(gate, up, out),
        Activation::Sigmoid => kernels::sigmoid_mul(gate, up, out),
    }
}
