//! SSE2, which every x86-64 has: pair-wise multiply-add of 16-bit lanes.
#![expect(unsafe_code, reason = "target features of the baseline")]

use crate::{Group, STEP};
use std::arch::x86_64::{
    __m128i, _mm_add_epi32, _mm_and_si128, _mm_castps_si128, _mm_castsi128_ps, _mm_cvtsi128_si32,
    _mm_madd_epi16, _mm_set_epi16, _mm_set_epi64x, _mm_set1_epi8, _mm_set1_epi64x,
    _mm_setzero_si128, _mm_shuffle_epi32, _mm_shuffle_ps, _mm_srai_epi16, _mm_srli_epi16,
    _mm_unpackhi_epi8, _mm_unpackhi_epi64, _mm_unpacklo_epi8, _mm_unpacklo_epi64,
};

/// As `portable::dot_4`.
#[inline]
pub(crate) fn dot_4(a: &[i16], w: &[i16]) -> [i32; 4] {
    // SAFETY: SSE2 is part of x86-64, and the function has no other precondition.
    unsafe { dot_4_sse2(a, w) }
}

#[inline]
#[target_feature(enable = "sse2")]
fn dot_4_sse2(a: &[i16], w: &[i16]) -> [i32; 4] {
    let k = a.len();
    let columns: [&[[i16; 8]]; 4] = std::array::from_fn(|n| w[n * k..][..k].as_chunks().0);
    let [w0, w1, w2, w3] = columns;
    let mut sums = [_mm_setzero_si128(); 4];
    let steps = a
        .as_chunks()
        .0
        .iter()
        .zip(w0.iter().zip(w1))
        .zip(w2.iter().zip(w3));
    for ((a, (w0, w1)), (w2, w3)) in steps {
        let a = words(a);
        for (sum, w) in sums.iter_mut().zip([w0, w1, w2, w3]) {
            *sum = _mm_add_epi32(*sum, _mm_madd_epi16(a, words(w)));
        }
    }
    sums.map(|s| {
        let s = _mm_add_epi32(s, _mm_shuffle_epi32::<0b_00_01_10_11>(s));
        _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32::<0b_00_00_00_01>(s)))
    })
}

/// As `portable::nibbles`.
#[inline]
pub(crate) fn nibbles(bytes: &Group, q: &[i8; 32]) -> [i32; 16] {
    // SAFETY: SSE2 is part of x86-64, and the function has no other precondition.
    unsafe { nibbles_sse2(bytes, q) }
}

#[inline]
#[target_feature(enable = "sse2")]
fn nibbles_sse2(bytes: &Group, q: &[i8; 32]) -> [i32; 16] {
    let zero = _mm_setzero_si128();
    let mask = _mm_set1_epi8(15);
    // Two partial sums a row, two rows a register.
    let mut sums = [zero; 8];
    let steps = bytes.as_chunks::<STEP>().0.iter();
    for (step, q) in steps.zip(q.as_chunks::<8>().0) {
        let q = _mm_set1_epi64x(i64::from_le_bytes(q.map(|v| v as u8)));
        // Widened: each byte in the upper half of its lane, then shifted down with its sign.
        let q = _mm_srai_epi16::<8>(_mm_unpacklo_epi8(zero, q));
        let q_low = _mm_unpacklo_epi64(q, q);
        let q_high = _mm_unpackhi_epi64(q, q);
        for (sums, bytes) in sums
            .as_chunks_mut::<2>()
            .0
            .iter_mut()
            .zip(step.as_chunks().0)
        {
            let bytes = load(bytes);
            let low = _mm_and_si128(bytes, mask);
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
            let first = _mm_add_epi32(
                _mm_madd_epi16(_mm_unpacklo_epi8(low, zero), q_low),
                _mm_madd_epi16(_mm_unpacklo_epi8(high, zero), q_high),
            );
            let second = _mm_add_epi32(
                _mm_madd_epi16(_mm_unpackhi_epi8(low, zero), q_low),
                _mm_madd_epi16(_mm_unpackhi_epi8(high, zero), q_high),
            );
            sums[0] = _mm_add_epi32(sums[0], first);
            sums[1] = _mm_add_epi32(sums[1], second);
        }
    }
    let mut dots = [0; 16];
    for (dots, [a, b]) in dots
        .as_chunks_mut::<4>()
        .0
        .iter_mut()
        .zip(sums.as_chunks().0)
    {
        let (a, b) = (_mm_castsi128_ps(*a), _mm_castsi128_ps(*b));
        let even = _mm_castps_si128(_mm_shuffle_ps::<0b_10_00_10_00>(a, b));
        let odd = _mm_castps_si128(_mm_shuffle_ps::<0b_11_01_11_01>(a, b));
        let sum = _mm_add_epi32(even, odd);
        *dots = [
            _mm_cvtsi128_si32(sum),
            _mm_cvtsi128_si32(_mm_shuffle_epi32::<1>(sum)),
            _mm_cvtsi128_si32(_mm_shuffle_epi32::<2>(sum)),
            _mm_cvtsi128_si32(_mm_shuffle_epi32::<3>(sum)),
        ];
    }
    dots
}

/// Compiles to one unaligned load.
#[inline]
#[target_feature(enable = "sse2")]
fn words(v: &[i16; 8]) -> __m128i {
    _mm_set_epi16(v[7], v[6], v[5], v[4], v[3], v[2], v[1], v[0])
}

/// Compiles to one unaligned load.
#[inline]
#[target_feature(enable = "sse2")]
fn load(bytes: &[u8; 16]) -> __m128i {
    let v = u128::from_le_bytes(*bytes);
    _mm_set_epi64x((v >> 64) as i64, v as i64)
}
