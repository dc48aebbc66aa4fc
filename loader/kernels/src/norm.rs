//! Norms, activations, softmax, rotary embedding.

use crate::dot_f32;

/// `out = x / sqrt(mean(x^2) + eps) * w`; all slices have the same length.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let mean = dot_f32(x, x) / x.len() as f32;
    let r = 1.0 / (mean + eps).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x).zip(w) {
        *out = x * r * w;
    }
}

/// The nearest integer, ties away from zero, for |x| < 2^23; without libm, which has no vectors.
#[inline]
pub(crate) fn round_half_away(x: f32) -> i32 {
    // The float below 0.5: adding 0.5 itself would carry 0.49999997 up to 1.
    (x + 0.499_999_97_f32.copysign(x)) as i32
}

/// e^x within 2 ulp, with the same bits on every ISA (libm's `expf` differs between platforms), and
/// without branches, so that loops over it vectorise. Above 88 it stays at e^88, below -87.7 it is 0.
#[must_use]
#[inline]
pub fn exp(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it leaves the rounded integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let x = if x > 88.0 { 88.0 } else { x };
    // At -88 the exponent field below is 0, and with it the result.
    let x = if x < -88.0 { -88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts: n times the first is exact.
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23))
}

/// `out = gate / (1 + exp(-gate)) * up`.
pub fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + exp(-gate)) * up;
    }
}

/// `out = gelu(gate) * up` with the tanh form of gelu. tanh through [`exp`]:
/// `x / 2 * (1 + tanh(u)) = x / (1 + exp(-2u))`.
pub fn gelu_tanh_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, x), up) in out.iter_mut().zip(gate).zip(up) {
        // 2 sqrt(2 / pi)
        let u = 1.595_769 * (x + 0.044_715 * x * x * x);
        *out = x / (1.0 + exp(-u)) * up;
    }
}

/// Softmax in place, summed in order.
pub fn softmax(x: &mut [f32]) {
    let top = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for v in x.iter_mut() {
        *v = exp(*v - top);
    }
    let sum = x.iter().fold(0.0, |sum, v| sum + v);
    let r = 1.0 / sum;
    for v in x {
        *v *= r;
    }
}

/// Rotates the first `2 * cos.len()` lanes of one head. Pairs are (i, i + len), or (2i, 2i + 1) when
/// `interleaved`.
pub fn rope(x: &mut [f32], cos: &[f32], sin: &[f32], interleaved: bool) {
    let half = cos.len();
    for (i, (c, s)) in cos.iter().zip(sin).enumerate() {
        let (a, b) = match interleaved {
            true => (2 * i, 2 * i + 1),
            false => (i, i + half),
        };
        (x[a], x[b]) = (x[a] * c - x[b] * s, x[a] * s + x[b] * c);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::int4::tests::noise;

    #[test]
    fn rounding_equals_round() {
        let around = |v: f32| [v.next_down(), v, v.next_up()];
        let halves = (-260..=260).flat_map(|i| around(i as f32 * 0.5));
        for x in halves.chain((0..9999).map(|i| noise(i) * 130.0)) {
            assert_eq!(round_half_away(x), x.round() as i32, "{x}");
        }
    }

    #[test]
    fn exp_is_within_two_ulp() {
        for i in -87_000..=88_000 {
            let x = i as f32 / 1000.0;
            let want = f64::from(x).exp();
            let ulp = f64::from((want as f32).next_up()) - f64::from(want as f32);
            let off = (f64::from(exp(x)) - want).abs() / ulp;
            assert!(off <= 2.0, "exp({x}) is {off} ulp off");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(-88.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(1000.0), exp(88.0));
    }

    /// FNV-1a over the bits; the numbers below hold on every ISA.
    fn digest(values: &[f32]) -> u64 {
        values.iter().fold(0xcbf2_9ce4_8422_2325, |hash, v| {
            (hash ^ u64::from(v.to_bits())).wrapping_mul(0x100_0000_01b3)
        })
    }

    #[test]
    fn bits_are_the_same_on_every_isa() {
        let x: Vec<f32> = (0..1003).map(|i| noise(i) * 20.0).collect();
        let y: Vec<f32> = (0..1003).map(|i| noise(i + 7)).collect();
        let mut out = vec![0.0; x.len()];
        silu_mul(&x, &y, &mut out);
        let silu = digest(&out);
        rms_norm(&x, &y, 1e-5, &mut out);
        let norm = digest(&out);
        out.copy_from_slice(&x);
        softmax(&mut out);
        assert_eq!(
            [silu, norm, digest(&out)],
            [
                0x7e2b_e68c_4219_6492,
                0xca02_ba91_ec0d_768b,
                0xe6d3_6ed0_e836_d940
            ]
        );
    }

    #[test]
    fn every_length_is_close_to_f64() {
        for len in 1..68 {
            let x: Vec<f32> = (0..len).map(|i| noise(i) * 9.0).collect();
            let w: Vec<f32> = (0..len).map(|i| noise(i + 31)).collect();
            let wide: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
            let close = |have: f32, want: f64| {
                assert!((f64::from(have) - want).abs() < 1e-5 * want.abs().max(0.1));
            };
            let mut out = vec![0.0; len];
            rms_norm(&x, &w, 1e-6, &mut out);
            let mean = wide.iter().map(|v| v * v).sum::<f64>() / len as f64;
            for i in 0..len {
                close(out[i], wide[i] / (mean + 1e-6).sqrt() * f64::from(w[i]));
            }
            silu_mul(&x, &w, &mut out);
            for i in 0..len {
                close(out[i], wide[i] / (1.0 + (-wide[i]).exp()) * f64::from(w[i]));
            }
            out.copy_from_slice(&x);
            softmax(&mut out);
            let sum: f64 = wide.iter().map(|v| v.exp()).sum();
            for i in 0..len {
                close(out[i], wide[i].exp() / sum);
            }
        }
    }

    #[test]
    fn softmax_sums_to_one() {
        let mut x = [1.0, 2.0, -50.0, 2.0];
        softmax(&mut x);
        assert!((x.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert_eq!(x[1], x[3]);
    }

    #[test]
    fn rope_turns_pairs() {
        let mut x = [1.0, 2.0, 3.0, 4.0, 9.0];
        rope(&mut x, &[0.0, 1.0], &[1.0, 0.0], false);
        assert_eq!(x, [-3.0, 2.0, 1.0, 4.0, 9.0]);
        let mut x = [1.0, 2.0, 3.0, 4.0];
        rope(&mut x, &[0.0, 1.0], &[1.0, 0.0], true);
        assert_eq!(x, [-2.0, 1.0, 3.0, 4.0]);
    }

    #[test]
    fn gelu_is_close_to_its_definition() {
        for i in -800..800 {
            let x = i as f32 / 100.0;
            let mut out = [0.0];
            gelu_tanh_mul(&[x], &[2.0], &mut out);
            let wide = f64::from(x);
            let u = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044_715 * wide.powi(3));
            let want = wide * (1.0 + u.tanh());
            assert!((f64::from(out[0]) - want).abs() < 2e-6, "gelu({x})");
        }
    }

    #[test]
    fn norm_of_a_constant_is_its_weight() {
        let mut out = [0.0; 3];
        rms_norm(&[2.0; 3], &[1.0, -1.0, 0.5], 0.0, &mut out);
        assert_eq!(out, [1.0, -1.0, 0.5]);
    }
}
