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

/// e^x with the same bits on every ISA: range reduction by ln 2 in two parts, then a degree-6
/// polynomial (relative error below 2e-7). libm's `expf` differs between platforms.
#[must_use]
pub fn exp(x: f32) -> f32 {
    if x < -87.0 {
        return 0.0;
    }
    let x = x.min(88.0);
    let n = (x * std::f32::consts::LOG2_E).round();
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let p = 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r + 1.0;
    let p = p * r + 1.0;
    p * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

/// `out = gate / (1 + exp(-gate)) * up`.
pub fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + exp(-gate)) * up;
    }
}

/// Softmax in place, summed in order.
pub fn softmax(x: &mut [f32]) {
    let top = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for v in x.iter_mut() {
        *v = exp(*v - top);
        sum += *v;
    }
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

    #[test]
    fn exp_is_close_everywhere() {
        for i in -8800..8800 {
            let x = i as f32 / 100.0;
            let want = f64::from(x).exp();
            let have = f64::from(exp(x));
            let error = (have - want).abs() / want.max(1e-37);
            assert!(error < 4e-7 || x < -86.9, "exp({x}) off by {error}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
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
    fn norm_of_a_constant_is_its_weight() {
        let mut out = [0.0; 3];
        rms_norm(&[2.0; 3], &[1.0, -1.0, 0.5], 0.0, &mut out);
        assert_eq!(out, [1.0, -1.0, 0.5]);
    }
}
