//! Float dot products in one fixed order.

use half::f16;

const LANES: usize = 16;

/// Sums `f(i)` over `0..len` in 16 lanes, then the lanes pair-wise.
fn lanes(len: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut acc = [0.0f32; LANES];
    let whole = len / LANES * LANES;
    for base in (0..whole).step_by(LANES) {
        for (lane, acc) in acc.iter_mut().enumerate() {
            *acc += f(base + lane);
        }
    }
    for i in whole..len {
        acc[i - whole] += f(i);
    }
    let mut width = LANES / 2;
    while 0 < width {
        for i in 0..width {
            acc[i] += acc[i + width];
        }
        width /= 2;
    }
    acc[0]
}

/// `sum a[i] * b[i]`; both slices have the same length.
#[must_use]
pub fn dot_f32(a: &[f32], b: &[f32]) -> f32 {
    let b = &b[..a.len()];
    lanes(a.len(), |i| a[i] * b[i])
}

/// As [`dot_f32`], the weights as little-endian f32 bytes at any alignment.
#[must_use]
pub fn dot_f32_bytes(w: &[u8], x: &[f32]) -> f32 {
    let (w, _) = w.as_chunks::<4>();
    let w = &w[..x.len()];
    lanes(x.len(), |i| f32::from_le_bytes(w[i]) * x[i])
}

/// As [`dot_f32`], the weights as little-endian bfloat16 bytes at any alignment.
#[must_use]
pub fn dot_bf16(w: &[u8], x: &[f32]) -> f32 {
    let (w, _) = w.as_chunks::<2>();
    let w = &w[..x.len()];
    lanes(x.len(), |i| {
        f32::from_bits(u32::from(u16::from_le_bytes(w[i])) << 16) * x[i]
    })
}

/// As [`dot_f32`], the weights as little-endian binary16 bytes at any alignment.
#[must_use]
pub fn dot_f16(w: &[u8], x: &[f32]) -> f32 {
    let (w, _) = w.as_chunks::<2>();
    let w = &w[..x.len()];
    lanes(x.len(), |i| f16::from_le_bytes(w[i]).to_f32() * x[i])
}

/// Widens binary16 bits.
pub fn f16_to_f32(bits: &[u16], out: &mut [f32]) {
    for (out, bits) in out.iter_mut().zip(bits) {
        *out = f16::from_bits(*bits).to_f32();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::int4::tests::noise;

    #[test]
    fn every_length_is_close_to_f64_and_all_types_agree() {
        for len in 0..68 {
            // Multiples of 1/64 are exact in every storage type.
            let a: Vec<f32> = (0..len).map(|i| (noise(i) * 64.0).trunc() / 64.0).collect();
            let b: Vec<f32> = (0..len).map(|i| noise(i + 99)).collect();
            let want: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(a * b)).sum();
            let have = dot_f32(&a, &b);
            assert!((f64::from(have) - want).abs() < 1e-4);
            let f32s: Vec<u8> = a.iter().flat_map(|v| v.to_le_bytes()).collect();
            let f16s: Vec<u8> = a
                .iter()
                .flat_map(|v| f16::from_f32(*v).to_le_bytes())
                .collect();
            let bf16s: Vec<u8> = a
                .iter()
                .flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes())
                .collect();
            assert_eq!(dot_f32_bytes(&f32s, &b), have);
            assert_eq!(dot_f16(&f16s, &b), have);
            assert_eq!(dot_bf16(&bf16s, &b), have);
        }
    }
}
