//! int8: activation quantisation, dot products, the native-tile matmul.

use crate::isa;
use crate::norm::round_half_away;

/// Elements along K that share an activation scale in decode.
pub const GROUP: usize = 32;
/// Columns, and elements along K, of a native weight tile.
const TILE: usize = 32;

#[inline]
fn scale_of(x: &[f32]) -> f32 {
    let (whole, rest) = x.as_chunks::<8>();
    let mut top = [0.0f32; 8];
    for x in whole {
        for (top, v) in top.iter_mut().zip(x) {
            let v = v.abs();
            *top = if v > *top { v } else { *top };
        }
    }
    let top = top
        .iter()
        .chain(rest)
        .fold(0.0f32, |top, v| top.max(v.abs()));
    top.max(1e-9) / 127.0
}

#[inline]
fn quantize(x: &[f32], scale: f32, q: &mut [i8]) {
    for (code, value) in q.iter_mut().zip(x) {
        // Clamped first, so that the conversion is in range.
        *code = round_half_away((value / scale).clamp(-127.0, 127.0)) as i8;
    }
}

/// Quantises one token's activations: s = max(absmax, 1e-9) / 127, round half away, clamp +-127.
/// `q` may be longer than `x`; the rest becomes zero (K padding). Returns s.
pub fn quantize_row(x: &[f32], q: &mut [i8]) -> f32 {
    let scale = scale_of(x);
    let (codes, padding) = q.split_at_mut(x.len());
    let (whole, rest) = x.as_chunks::<GROUP>();
    let (lines, tail) = codes.as_chunks_mut::<GROUP>();
    for (x, q) in whole.iter().zip(lines) {
        // The known length is what vectorises.
        quantize(x, scale, q);
    }
    quantize(rest, scale, tail);
    padding.fill(0);
    scale
}

/// Quantises per group of 32 for decode; `q` is `x` padded with zeros to whole groups, `scales` and
/// `sums` (sum of the group's codes) have one entry a group.
pub fn quantize_groups(x: &[f32], q: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
    q[x.len()..].fill(0);
    let (whole, rest) = x.as_chunks::<GROUP>();
    let mut groups = q.chunks_mut(GROUP).zip(scales.iter_mut().zip(sums));
    for (x, (q, (scale, sum))) in whole.iter().zip(&mut groups) {
        // The known length is what vectorises.
        (*scale, *sum) = quantize_group(x, q);
    }
    if let Some((q, (scale, sum))) = groups.next()
        && !rest.is_empty()
    {
        (*scale, *sum) = quantize_group(rest, q);
    }
}

#[inline(always)]
fn quantize_group(x: &[f32], q: &mut [i8]) -> (f32, i32) {
    let scale = scale_of(x);
    let q = &mut q[..x.len()];
    quantize(x, scale, q);
    let sum = q
        .iter()
        .fold(0i32, |sum, c| sum.wrapping_add(i32::from(*c)));
    (scale, sum)
}

/// Exact dot product of two slices of one length.
#[must_use]
pub fn dot_i8(a: &[i8], b: &[i8]) -> i32 {
    a.iter().zip(b).fold(0i32, |sum, (a, b)| {
        sum.wrapping_add(i32::from(*a).wrapping_mul(i32::from(*b)))
    })
}

/// `c[m][cols] = a[m][k] w[cols][k]^T`, exact in int32. `w` holds native 32 x 32 tiles:
/// byte `((n/32)*(k/32) + k/32)*1024 + (n%32)*32 + k%32`. k and cols are multiples of 32.
///
/// # Panics
/// When a slice does not have the length its shape asks for.
pub fn gemm_i8_tiles(a: &[i8], m: usize, k: usize, w: &[u8], cols: usize, c: &mut [i32]) {
    assert_eq!(a.len(), m * k, "bytes of A [{m}, {k}]");
    assert_eq!(w.len(), k * cols, "bytes of W [{cols}, {k}]");
    assert_eq!(c.len(), m * cols, "words of C [{m}, {cols}]");
    // Widened once: 16-bit products feed the multiply-add that every ISA has.
    let wide: Vec<i16> = a.iter().map(|v| i16::from(*v)).collect();
    let mut columns = vec![0i16; TILE * k];
    for (strip_index, strip) in w.chunks_exact(k * TILE).enumerate() {
        for (tile_index, tile) in strip.as_chunks::<{ TILE * TILE }>().0.iter().enumerate() {
            for (n, bytes) in tile.as_chunks::<TILE>().0.iter().enumerate() {
                let column = &mut columns[n * k + tile_index * TILE..][..TILE];
                for (wide, byte) in column.iter_mut().zip(bytes) {
                    *wide = i16::from(*byte as i8);
                }
            }
        }
        for (a, c) in wide.chunks_exact(k).zip(c.chunks_exact_mut(cols)) {
            let c = &mut c[strip_index * TILE..][..TILE];
            for (c, w) in c
                .as_chunks_mut::<4>()
                .0
                .iter_mut()
                .zip(columns.chunks_exact(4 * k))
            {
                *c = isa::dot_4(a, w);
            }
        }
    }
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

    #[test]
    fn every_length_equals_a_naive_loop() {
        for len in 0..68usize {
            for extreme in [None, Some(-127), Some(127)] {
                let code = |i| extreme.unwrap_or_else(|| (noise(i) * 127.0) as i8);
                let w: Vec<i8> = (0..len).map(code).collect();
                let q: Vec<i8> = (0..len).map(|i| code(i + 13)).collect();
                let scales: Vec<f32> = (0..len.div_ceil(GROUP)).map(noise).collect();
                let dot = |from: usize, to: usize| -> i32 {
                    (from..to).map(|i| i32::from(w[i]) * i32::from(q[i])).sum()
                };
                assert_eq!(dot_i8(&w, &q), dot(0, len));
                let mut want = 0.0f32;
                for (g, scale) in scales.iter().enumerate() {
                    want += dot(g * GROUP, len.min((g + 1) * GROUP)) as f32 * scale;
                }
                assert_eq!(int8_row(&w, &q, &scales).to_bits(), want.to_bits());
            }
            let acc: Vec<i32> = (0..len).map(|i| (noise(i) * 1e9) as i32).collect();
            let b: Vec<f32> = (0..len).map(noise).collect();
            let mut out = vec![0.0; len];
            dequantize_row(&acc, 0.3, &b, &mut out);
            for i in 0..len {
                assert_eq!(out[i], (acc[i] as f32 * 0.3) * b[i]);
            }
        }
    }

    #[test]
    fn rows_equal_a_naive_loop_at_every_length() {
        for len in 0..68usize {
            let x: Vec<f32> = (0..len).map(|i| noise(i) * 3.0).collect();
            let top = x.iter().fold(0.0f32, |top, v| top.max(v.abs()));
            let mut q = vec![7i8; len + 5];
            let scale = quantize_row(&x, &mut q);
            assert_eq!(scale, top.max(1e-9) / 127.0);
            for i in 0..len {
                let want = (x[i] / scale).round().clamp(-127.0, 127.0) as i8;
                assert_eq!(q[i], want);
            }
            assert_eq!(q[len..], [0; 5]);
        }
    }
}
