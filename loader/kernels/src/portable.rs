//! The two integer inner loops without intrinsics: the truth the ISA files are tested against.

use crate::{Group, STEP};

/// Exact dot products of `a` `[k]` with 4 columns `w` `[4][k]`; k is a multiple of 8.
#[inline]
pub(crate) fn dot_4(a: &[i16], w: &[i16]) -> [i32; 4] {
    let k = a.len();
    std::array::from_fn(|n| {
        a.iter().zip(&w[n * k..][..k]).fold(0i32, |sum, (a, w)| {
            sum.wrapping_add(i32::from(*a).wrapping_mul(i32::from(*w)))
        })
    })
}

/// Exact dot products of the 16 rows' biased codes with one group of activations.
#[inline]
pub(crate) fn nibbles(bytes: &Group, q: &[i8; 32]) -> [i32; 16] {
    let mut dots = [0i32; 16];
    let steps = bytes.as_chunks::<STEP>().0.iter();
    for (step, q) in steps.zip(q.as_chunks::<8>().0) {
        for (dot, bytes) in dots.iter_mut().zip(step.as_chunks::<4>().0) {
            for (j, byte) in bytes.iter().enumerate() {
                let low = i32::from(byte & 15).wrapping_mul(i32::from(q[j]));
                let high = i32::from(byte >> 4).wrapping_mul(i32::from(q[4 + j]));
                *dot = dot.wrapping_add(low.wrapping_add(high));
            }
        }
    }
    dots
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::{dot_4 as isa_dot_4, nibbles as isa_nibbles};

    /// Codes at random, or all at one extreme.
    fn codes(len: usize, seed: usize, extreme: Option<i8>) -> Vec<i8> {
        let noise = |i| (crate::int4::tests::noise(i + seed) * 127.0) as i8;
        (0..len)
            .map(|i| extreme.unwrap_or_else(|| noise(i)))
            .collect()
    }

    #[test]
    fn the_isa_file_equals_portable_columns() {
        for k in (0..68).map(|i| i * 8).chain([4096]) {
            for extreme in [None, Some(-127), Some(127), Some(-128)] {
                let wide = |v: Vec<i8>| v.into_iter().map(i16::from).collect::<Vec<_>>();
                let a = wide(codes(k, 1, extreme));
                let w = wide(codes(4 * k, 77, extreme));
                assert_eq!(isa_dot_4(&a, &w), dot_4(&a, &w), "K {k}");
            }
        }
    }

    #[test]
    fn the_isa_file_equals_portable_nibbles() {
        for seed in 0..200 {
            let bytes: Group = std::array::from_fn(|i| match seed {
                0 => 0xff,
                1 => 0,
                _ => codes(1, i + 331 * seed, None)[0] as u8,
            });
            for extreme in [None, Some(-127), Some(127), Some(-128)] {
                let q = codes(32, seed, extreme).try_into().expect("32 codes");
                assert_eq!(isa_nibbles(&bytes, &q), nibbles(&bytes, &q), "seed {seed}");
            }
        }
    }
}
