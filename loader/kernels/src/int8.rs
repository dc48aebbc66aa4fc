//! int8: activation quantisation, dot products, the native-tile matmul.

/// Elements along K that share an activation scale in decode.
pub const GROUP: usize = 32;

fn scale_of(x: &[f32]) -> f32 {
    let top = x.iter().fold(0.0f32, |top, v| top.max(v.abs()));
    top.max(1e-9) / 127.0
}

fn quantize(x: &[f32], scale: f32, q: &mut [i8]) {
    for (code, value) in q.iter_mut().zip(x) {
        // `round` is half away from zero.
        *code = (value / scale).round().clamp(-127.0, 127.0) as i8;
    }
}

/// Quantises one token's activations: s = max(absmax, 1e-9) / 127, round half away, clamp +-127.
/// `q` may be longer than `x`; the rest becomes zero (K padding). Returns s.
pub fn quantize_row(x: &[f32], q: &mut [i8]) -> f32 {
    let scale = scale_of(x);
    quantize(x, scale, q);
    q[x.len()..].fill(0);
    scale
}

/// Quantises per group of 32 for decode; `q` is `x` padded with zeros to whole groups, `scales` and
/// `sums` (sum of the group's codes) have one entry a group.
pub fn quantize_groups(x: &[f32], q: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
    q[x.len()..].fill(0);
    for (g, values) in x.chunks(GROUP).enumerate() {
        let codes = &mut q[g * GROUP..][..values.len()];
        scales[g] = scale_of(values);
        quantize(values, scales[g], codes);
        sums[g] = codes.iter().map(|c| i32::from(*c)).sum();
    }
}

/// Exact dot product.
#[must_use]
pub fn dot_i8(a: &[i8], b: &[i8]) -> i32 {
    a.iter().zip(b).fold(0, |sum, (a, b)| {
        i32::wrapping_add(sum, i32::from(i16::from(*a).wrapping_mul(i16::from(*b))))
    })
}

/// `c[m][cols] = a[m][k] w[cols][k]^T`, exact in int32. `w` holds native 32 x 32 tiles:
/// byte `((n/32)*(k/32) + k/32)*1024 + (n%32)*32 + k%32`. k and cols are multiples of 32.
pub fn gemm_i8_tiles(a: &[i8], m: usize, k: usize, w: &[u8], cols: usize, c: &mut [i32]) {
    debug_assert_eq!(a.len(), m * k);
    debug_assert_eq!(w.len(), k * cols);
    debug_assert_eq!(c.len(), m * cols);
    // Widened once: 16-bit products feed the pair-wise multiply-add every ISA has.
    let wide: Vec<i16> = a.iter().map(|v| i16::from(*v)).collect();
    let mut column = vec![0i16; k];
    for (strip_index, strip) in w.chunks_exact(k * 32).enumerate() {
        for row in 0..32 {
            for (part, tile) in column.chunks_exact_mut(32).zip(strip.chunks_exact(1024)) {
                for (wide, byte) in part.iter_mut().zip(&tile[row * 32..][..32]) {
                    *wide = i16::from(*byte as i8);
                }
            }
            for (line, out) in wide.chunks_exact(k).zip(c.chunks_exact_mut(cols)) {
                out[strip_index * 32 + row] = dot_i16(line, &column);
            }
        }
    }
}

fn dot_i16(a: &[i16], b: &[i16]) -> i32 {
    a.iter().zip(b).fold(0, |sum, (a, b)| {
        // Exact for K < 2^17; plain `+` would carry an overflow check and not vectorise.
        i32::wrapping_add(sum, i32::from(*a).wrapping_mul(i32::from(*b)))
    })
}

/// One int8 row times group-quantised activations; the caller multiplies by the row's scale.
#[must_use]
pub fn int8_row(w: &[i8], q: &[i8], scales: &[f32]) -> f32 {
    let mut sum = 0.0;
    for ((w, q), scale) in w.chunks(GROUP).zip(q.chunks(GROUP)).zip(scales) {
        sum += dot_i8(w, q) as f32 * scale;
    }
    sum
}

/// `out[n] = (acc[n] as f32 * s) * b[n]`.
pub fn dequantize_row(acc: &[i32], s: f32, b: &[f32], out: &mut [f32]) {
    for ((out, acc), b) in out.iter_mut().zip(acc).zip(b) {
        *out = (*acc as f32 * s) * b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::int4::tests::noise;

    #[test]
    fn rounding_is_half_away_and_padding_is_zero() {
        let mut q = [9i8; 6];
        let s = quantize_row(&[127.0, 0.5, -0.5, -127.0], &mut q);
        assert_eq!(s, 1.0);
        assert_eq!(q, [127, 1, -1, -127, 0, 0]);
        quantize_row(&[0.0; 4], &mut q);
        assert_eq!(q, [0; 6]);
    }

    #[test]
    fn tiles_equal_a_naive_loop_at_the_extremes_too() {
        for (m, k, cols) in [(1, 32, 32), (3, 96, 64), (7, 512, 32)] {
            for extreme in [false, true] {
                let code = |i: usize| {
                    if extreme {
                        -127
                    } else {
                        (noise(i) * 127.0) as i8
                    }
                };
                let a: Vec<i8> = (0..m * k).map(code).collect();
                let w: Vec<i8> = (0..k * cols).map(|i| code(i + 7)).collect();
                let mut tiles = vec![0u8; k * cols];
                for n in 0..cols {
                    for j in 0..k {
                        let at = ((n / 32) * (k / 32) + j / 32) * 1024 + (n % 32) * 32 + j % 32;
                        tiles[at] = w[n * k + j] as u8;
                    }
                }
                let mut c = vec![0; m * cols];
                gemm_i8_tiles(&a, m, k, &tiles, cols, &mut c);
                for row in 0..m {
                    for n in 0..cols {
                        let want: i64 = (0..k)
                            .map(|j| i64::from(a[row * k + j]) * i64::from(w[n * k + j]))
                            .sum();
                        assert_eq!(i64::from(c[row * cols + n]), want);
                    }
                }
            }
        }
    }

    #[test]
    fn groups_reconstruct_ragged_rows() {
        for len in 1..70usize {
            let x: Vec<f32> = (0..len).map(noise).collect();
            let groups = len.div_ceil(GROUP);
            let (mut q, mut s, mut t) =
                (vec![1; groups * GROUP], vec![0.0; groups], vec![0; groups]);
            quantize_groups(&x, &mut q, &mut s, &mut t);
            for (i, v) in x.iter().enumerate() {
                assert!((f32::from(q[i]) * s[i / GROUP] - v).abs() <= s[i / GROUP] * 0.51);
            }
            assert!(q[len..].iter().all(|c| *c == 0));
            let w = vec![1i8; len];
            let want: f32 = (0..groups).fold(0.0, |sum, g| sum + t[g] as f32 * s[g]);
            assert_eq!(int8_row(&w, &q, &s), want);
        }
    }
}
