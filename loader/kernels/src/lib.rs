//! Numeric kernels of the loader: pure functions over slices, no threads, no devices.
//!
//! Integer results are exact. Float reductions use one fixed order of 16 lanes and no fused
//! multiply-add, so that every ISA and thread count gives the same bits.
#![deny(unsafe_code)]

mod float;
mod int4;
mod int8;
mod norm;
#[cfg_attr(
    not(test),
    allow(dead_code, reason = "an ISA file may replace either loop")
)]
mod portable;
mod recurrent;

// The integer inner loops of this ISA: the same results as `portable`.
#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
use aarch64 as isa;
#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
use portable as isa;
#[cfg(target_arch = "x86_64")]
use x86_64 as isa;
#[cfg(target_arch = "x86_64")]
mod x86_64;

/// Bytes of 8 elements along K of the 16 rows of a 4-bit panel.
const STEP: usize = 64;
/// The codes of one group of 32 elements along K of a 4-bit panel.
type Group = [u8; 4 * STEP];

pub use float::{dot_bf16, dot_f16, dot_f32, dot_f32_bytes, f16_to_f32};
pub use int4::int4_panel;
pub use int8::{
    GROUP, dequantize_row, dot_i8, gemm_i8_tiles, int8_row, quantize_groups, quantize_row,
};
pub use norm::{exp, gelu_tanh_mul, rms_norm, rope, silu_mul, softmax};
pub use recurrent::{add_gated, conv_silu, delta_step, sigmoid, sigmoid_mul, unit};
