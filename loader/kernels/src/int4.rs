//! 4-bit panels of 16 rows: decode's hot loop.

use crate::float::widen;
use crate::{Group, isa};

/// Rows of a panel.
const PANEL: usize = 16;
/// Elements along K that share scales.
const GROUP: usize = 32;

/// `out[r] = sum over groups g of (dot(code + 8, q) - 8 * sums[g]) as f32 * (scale[g][r] * scales[g])`
/// for the 16 rows of one panel; `kp` is K padded to whole groups. The biased nibbles stay unsigned
/// and the bias is taken off with the group's sum, which the activations know already.
pub fn int4_panel(
    panel: &[u8],
    kp: usize,
    q: &[i8],
    scales: &[f32],
    sums: &[i32],
    out: &mut [f32; PANEL],
) {
    let (codes, tail) = panel.split_at(kp * PANEL / 2);
    let mut total = [0.0f32; PANEL];
    let groups = codes
        .as_chunks::<{ size_of::<Group>() }>()
        .0
        .iter()
        .zip(q.as_chunks::<GROUP>().0)
        .zip(tail.as_chunks::<{ PANEL * 2 }>().0)
        .zip(scales.iter().zip(sums));
    for (((bytes, q), row_scales), (scale, sum)) in groups {
        let dots = isa::nibbles(bytes, q);
        let bias = sum.wrapping_mul(8);
        for ((total, dot), bits) in total
            .iter_mut()
            .zip(dots)
            .zip(row_scales.as_chunks::<2>().0)
        {
            let row_scale = widen(u16::from_le_bytes(*bits));
            *total += dot.wrapping_sub(bias) as f32 * (row_scale * scale);
        }
    }
    *out = total;
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use half::f16;

    /// Deterministic values in -1..1.
    pub(crate) fn noise(i: usize) -> f32 {
        let x = (i as u32).wrapping_mul(2_654_435_761).rotate_left(13) ^ 0x9e37;
        f32::from((x.wrapping_mul(0x85eb_ca6b) >> 16) as u16) / 32768.0 - 1.0
    }

    #[test]
    fn panel_equals_a_naive_loop() {
        for kp in [32, 64, 192] {
            let code = |row: usize, col: usize| ((row * 31 + col * 7) % 16) as i32 - 8;
            let scale = |row: usize, g: usize| f16::from_f32(noise(row + 17 * g));
            let mut panel = vec![0u8; kp * 8 + kp / 32 * 32];
            for row in 0..PANEL {
                for col in 0..kp {
                    let nibble = (code(row, col) + 8) as u8;
                    let shift = if col % 8 < 4 { 0 } else { 4 };
                    panel[col / 8 * 64 + row * 4 + col % 4] |= nibble << shift;
                }
                for g in 0..kp / 32 {
                    let at = kp * 8 + (g * PANEL + row) * 2;
                    panel[at..at + 2].copy_from_slice(&scale(row, g).to_le_bytes());
                }
            }
            let x: Vec<f32> = (0..kp).map(noise).collect();
            let (mut q, mut s, mut t) = (vec![0; kp], vec![0.0; kp / 32], vec![0; kp / 32]);
            crate::quantize_groups(&x, &mut q, &mut s, &mut t);
            let mut out = [0.0; PANEL];
            int4_panel(&panel, kp, &q, &s, &t, &mut out);
            for (row, have) in out.iter().enumerate() {
                let mut want = 0.0f32;
                for (g, step) in s.iter().enumerate() {
                    let dot: i32 = (g * 32..g * 32 + 32)
                        .map(|col| code(row, col) * i32::from(q[col]))
                        .sum();
                    want += dot as f32 * (scale(row, g).to_f32() * step);
                }
                assert_eq!(*have, want, "row {row} of K {kp}");
            }
        }
    }
}
