//! Numeric kernels of the loader: pure functions over slices, no threads, no devices.
//!
//! Integer results are exact. Float reductions use one fixed order of 16 lanes and no fused
//! multiply-add, so that every ISA and thread count gives the same bits.
#![forbid(unsafe_code)]

mod float;
mod int4;
mod int8;
mod norm;

pub use float::{dot_bf16, dot_f16, dot_f32, dot_f32_bytes, f16_to_f32};
pub use int4::int4_panel;
pub use int8::{
    GROUP, dequantize_row, dot_i8, gemm_i8_tiles, int8_row, quantize_groups, quantize_row,
};
pub use norm::{exp, rms_norm, rope, silu_mul, softmax};
