//! NEON, which every aarch64 has: widening multiply-add of 8-bit lanes.
#![expect(unsafe_code, reason = "target features of the baseline")]

use crate::{Group, STEP};
use std::arch::aarch64::{
    int16x8_t, vaddlv_s16, vand_u8, vcreate_s8, vcreate_u8, vdup_n_u8, vdupq_n_s16, vget_high_s16,
    vget_low_s16, vmlal_s8, vreinterpret_s8_u8, vshr_n_u8,
};

pub(crate) use crate::portable::dot_4;

/// As `portable::nibbles`. A 16-bit lane sums 8 products of at most 15 * 128: it cannot overflow.
#[inline]
pub(crate) fn nibbles(bytes: &Group, q: &[i8; 32]) -> [i32; 16] {
    // SAFETY: NEON is part of aarch64, and the function has no other precondition.
    unsafe { nibbles_neon(bytes, q) }
}

#[inline]
#[target_feature(enable = "neon")]
fn nibbles_neon(bytes: &Group, q: &[i8; 32]) -> [i32; 16] {
    let mask = vdup_n_u8(15);
    // Four partial sums a row, two rows a register.
    let mut sums: [int16x8_t; 8] = [vdupq_n_s16(0); 8];
    let steps = bytes.as_chunks::<STEP>().0.iter();
    for (step, q) in steps.zip(q.as_chunks::<8>().0) {
        let q = u64::from_le_bytes(q.map(|v| v as u8));
        let (low, high) = (q & 0xffff_ffff, q >> 32);
        let q_low = vcreate_s8(low | low << 32);
        let q_high = vcreate_s8(high | high << 32);
        for (sum, bytes) in sums.iter_mut().zip(step.as_chunks().0) {
            let bytes = vcreate_u8(u64::from_le_bytes(*bytes));
            *sum = vmlal_s8(*sum, vreinterpret_s8_u8(vand_u8(bytes, mask)), q_low);
            *sum = vmlal_s8(*sum, vreinterpret_s8_u8(vshr_n_u8::<4>(bytes)), q_high);
        }
    }
    let mut dots = [0; 16];
    for (dots, sum) in dots.as_chunks_mut::<2>().0.iter_mut().zip(sums) {
        // Four lanes of at most 15,240 in magnitude need 32 bits.
        *dots = [vget_low_s16(sum), vget_high_s16(sum)].map(|half| vaddlv_s16(half));
    }
    dots
}
