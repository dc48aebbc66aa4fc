//! Steps of recurrent layers: causal convolution, delta rule.

use crate::{dot_f32, exp};

/// `1 / (1 + exp(-x))`
#[must_use]
#[inline]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `out = sigmoid(gate) * up`.
pub fn sigmoid_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = up / (1.0 + exp(-gate));
    }
}

/// `out += sigmoid(gate) * x`.
pub fn add_gated(gate: f32, x: &[f32], out: &mut [f32]) {
    let gate = sigmoid(gate);
    for (out, x) in out.iter_mut().zip(x) {
        *out += gate * x;
    }
}

/// `out = scale * x / sqrt(sum x^2 + eps)`; both slices have the same length.
pub fn unit(x: &[f32], scale: f32, eps: f32, out: &mut [f32]) {
    let r = scale / (dot_f32(x, x) + eps).sqrt();
    for (out, x) in out.iter_mut().zip(x) {
        *out = x * r;
    }
}

/// One row of a depthwise convolution, then silu: `out[c] = silu(sum over j of taps[j][c] * rows[j][c])`,
/// added in the order of j. `rows` and `taps` hold as many rows of `out.len()` channels.
pub fn conv_silu(rows: &[f32], taps: &[f32], out: &mut [f32]) {
    let channels = out.len();
    out.fill(0.0);
    for (x, w) in rows.chunks_exact(channels).zip(taps.chunks_exact(channels)) {
        for ((out, x), w) in out.iter_mut().zip(x).zip(w) {
            *out += w * x;
        }
    }
    for out in out {
        *out /= 1.0 + exp(-*out);
    }
}

/// One token of the delta rule over the state `[v.len(), k.len()]` of one head: `S *= decay`,
/// `S += step * (v - S k) k^T`, `out = S q`.
pub fn delta_step(
    state: &mut [f32],
    (q, k, v): (&[f32], &[f32], &[f32]),
    (decay, step): (f32, f32),
    out: &mut [f32],
) {
    for ((row, v), out) in state.chunks_exact_mut(k.len()).zip(v).zip(out) {
        for s in row.iter_mut() {
            *s *= decay;
        }
        let d = step * (v - dot_f32(row, k));
        for (s, k) in row.iter_mut().zip(k) {
            *s += d * k;
        }
        *out = dot_f32(row, q);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::int4::tests::noise;

    fn values(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| noise(i + seed)).collect()
    }

    #[test]
    fn gates_are_close_to_f64() {
        for i in -900..900 {
            let x = i as f32 / 10.0;
            let want = 1.0 / (1.0 + f64::from(-x).exp());
            assert!((f64::from(sigmoid(x)) - want).abs() < 1e-6);
            let (mut product, mut sum) = ([0.0], [0.5]);
            sigmoid_mul(&[x], &[3.0], &mut product);
            add_gated(x, &[3.0], &mut sum);
            assert!((f64::from(product[0]) - 3.0 * want).abs() < 1e-6);
            assert!((f64::from(sum[0]) - 0.5 - 3.0 * want).abs() < 1e-6);
        }
    }

    #[test]
    fn convolution_equals_a_naive_loop() {
        for (channels, taps) in [(1, 2), (5, 4), (67, 3)] {
            let (x, w) = (values(channels * taps, 1), values(channels * taps, 999));
            let mut out = vec![9.0; channels];
            conv_silu(&x, &w, &mut out);
            for (c, have) in out.iter().enumerate() {
                let sum: f64 = (0..taps)
                    .map(|j| f64::from(x[j * channels + c]) * f64::from(w[j * channels + c]))
                    .sum();
                let want = sum / (1.0 + (-sum).exp());
                assert!((f64::from(*have) - want).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn delta_rule_equals_a_naive_loop() {
        let (dv, dk) = (7, 37);
        let mut state = vec![0.0f32; dv * dk];
        let mut wide = vec![0.0f64; dv * dk];
        for t in 0..50 {
            let (q, v) = (values(dk, 10 * t), values(dv, 77 * t));
            let mut k = vec![0.0; dk];
            unit(&values(dk, 31 * t + 5), 1.0, 1e-6, &mut k);
            let (decay, step) = (0.9, 0.3 + 0.01 * t as f32);
            let mut out = vec![0.0; dv];
            delta_step(&mut state, (&q, &k, &v), (decay, step), &mut out);
            for i in 0..dv {
                let row = &mut wide[i * dk..][..dk];
                row.iter_mut().for_each(|s| *s *= f64::from(decay));
                let read: f64 = row.iter().zip(&k).map(|(s, k)| s * f64::from(*k)).sum();
                let d = f64::from(step) * (f64::from(v[i]) - read);
                for (s, k) in row.iter_mut().zip(&k) {
                    *s += d * f64::from(*k);
                }
                let want: f64 = row.iter().zip(&q).map(|(s, q)| s * f64::from(*q)).sum();
                assert!((f64::from(out[i]) - want).abs() < 1e-5, "token {t}");
            }
        }
    }

    #[test]
    fn unit_vectors_have_the_length_asked_for() {
        let mut out = [0.0; 4];
        unit(&[3.0, 0.0, 4.0, 0.0], 0.5, 0.0, &mut out);
        assert_eq!(out, [0.3, 0.0, 0.4, 0.0]);
        unit(&[0.0; 4], 1.0, 1e-6, &mut out);
        assert_eq!(out, [0.0; 4]);
    }
}
