//! Float dot products in one fixed order.

const LANES: usize = 16;

/// Sums `widen(w[i]) * x[i]` in 16 lanes, element i in lane i % 16, then the lanes pair-wise.
#[inline(always)]
fn lanes<W: Copy>(w: &[W], x: &[f32], widen: impl Fn(W) -> f32) -> f32 {
    let (w_whole, w_rest) = w[..x.len()].as_chunks::<LANES>();
    let (x_whole, x_rest) = x.as_chunks::<LANES>();
    let mut acc = [0.0f32; LANES];
    for (w, x) in w_whole.iter().zip(x_whole) {
        for lane in 0..LANES {
            acc[lane] += widen(w[lane]) * x[lane];
        }
    }
    for (acc, (w, x)) in acc.iter_mut().zip(w_rest.iter().zip(x_rest)) {
        *acc += widen(*w) * x;
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

/// The value of binary16 bits. Branch-free integer and multiply steps, which vectorise; the `half`
/// crate asks the CPU's features for every element.
#[inline]
pub(crate) fn widen(bits: u16) -> f32 {
    // Exponent and fraction as an f32 are 2^112 too small, subnormals included.
    let magnitude =
        f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let special = if bits & 0x7c00 == 0x7c00 {
        0x7f80_0000
    } else {
        0
    };
    let sign = u32::from(bits & 0x8000) << 16;
    f32::from_bits(magnitude.to_bits() | special | sign)
}

/// `sum a[i] * b[i]`; both slices have the same length.
#[must_use]
pub fn dot_f32(a: &[f32], b: &[f32]) -> f32 {
    lanes(b, a, |v| v)
}

/// As [`dot_f32`], the weights as little-endian f32 bytes at any alignment.
#[must_use]
pub fn dot_f32_bytes(w: &[u8], x: &[f32]) -> f32 {
    lanes(w.as_chunks().0, x, f32::from_le_bytes)
}

/// As [`dot_f32`], the weights as little-endian bfloat16 bytes at any alignment.
#[must_use]
pub fn dot_bf16(w: &[u8], x: &[f32]) -> f32 {
    lanes(w.as_chunks().0, x, |b| {
        f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)
    })
}

/// As [`dot_f32`], the weights as little-endian binary16 bytes at any alignment.
#[must_use]
pub fn dot_f16(w: &[u8], x: &[f32]) -> f32 {
    lanes(w.as_chunks().0, x, |b| widen(u16::from_le_bytes(b)))
}

/// Widens binary16 bits.
pub fn f16_to_f32(bits: &[u16], out: &mut [f32]) {
    for (out, bits) in out.iter_mut().zip(bits) {
        *out = widen(*bits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::int4::tests::noise;
    use half::f16;

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

    #[test]
    fn the_order_is_sixteen_lanes_then_pairs() {
        for len in 0..68 {
            let a: Vec<f32> = (0..len).map(noise).collect();
            let b: Vec<f32> = (0..len).map(|i| noise(i + 5)).collect();
            let mut lanes = [0.0f32; 16];
            for i in 0..len {
                lanes[i % 16] += a[i] * b[i];
            }
            for width in [8, 4, 2, 1] {
                for i in 0..width {
                    lanes[i] += lanes[i + width];
                }
            }
            assert_eq!(
                dot_f32(&a, &b).to_bits(),
                lanes[0].to_bits(),
                "length {len}"
            );
        }
    }

    #[test]
    fn every_binary16_widens_as_the_half_crate_does() {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let mut out = vec![0.0; bits.len()];
        f16_to_f32(&bits, &mut out);
        for (bits, have) in bits.iter().zip(&out) {
            let want = f16::from_bits(*bits).to_f32();
            let same = have.to_bits() == want.to_bits() || have.is_nan() && want.is_nan();
            assert!(same, "{bits:#06x} gives {have}, not {want}");
        }
    }
}
