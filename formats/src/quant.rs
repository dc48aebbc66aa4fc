//! Byte layouts of quantised host tensors.

/// Rounds to the nearest integer, ties to even: the rule for weights (activations round half away).
#[must_use]
pub fn round_half_even(x: f32) -> f32 {
    x.round_ties_even()
}

/// 4-bit groups: codes -8..7 with an f16 scale per 32 along K, in panels of 16 rows.
///
/// A panel is its codes, then its scales. Codes: for each 8-wide step s along K, 64 bytes; byte
/// `4 * row + j` holds `code(row, 8s + j) + 8` in the low and `code(row, 8s + 4 + j) + 8` in the high
/// nibble. So one 64-byte load feeds a 16-lane dot-product instruction with all 16 rows, and each
/// 16 bytes feed a 4-lane one. Scales: for each group, 16 little-endian f16, one a row. K is padded
/// to 32 and N to 16 with code 0 and scale 0.
pub mod int4 {
    use half::f16;

    /// Rows of a panel.
    pub const PANEL: usize = 16;
    /// Elements along K that share a scale.
    pub const GROUP: usize = 32;

    /// Bytes of one panel of K elements.
    #[must_use]
    pub fn panel_bytes(k: usize) -> usize {
        let groups = k.div_ceil(GROUP);
        groups * (GROUP * PANEL / 2 + PANEL * 2)
    }

    /// Bytes of an `[n, k]` matrix.
    #[must_use]
    pub fn bytes(n: usize, k: usize) -> u64 {
        n.div_ceil(PANEL) as u64 * panel_bytes(k) as u64
    }

    /// Packs codes `[n][k]` and f16 scale bits `[n][ceil(k / 32)]`.
    ///
    /// # Panics
    /// When the slices do not have these lengths or a code is outside -8..=7.
    #[must_use]
    pub fn pack(codes: &[i8], scales: &[u16], n: usize, k: usize) -> Vec<u8> {
        let groups = k.div_ceil(GROUP);
        assert_eq!(codes.len(), n * k);
        assert_eq!(scales.len(), n * groups);
        let mut out = vec![0u8; bytes(n, k) as usize];
        let code = |row: usize, col: usize| {
            let code = if row < n && col < k {
                codes[row * k + col]
            } else {
                0
            };
            assert!((-8..=7).contains(&code), "code {code} of row {row}");
            (code + 8) as u8
        };
        for (p, panel) in out.chunks_exact_mut(panel_bytes(k)).enumerate() {
            let (nibbles, tail) = panel.split_at_mut(groups * GROUP * PANEL / 2);
            for (s, step) in nibbles.chunks_exact_mut(64).enumerate() {
                for (i, byte) in step.iter_mut().enumerate() {
                    let (row, col) = (p * PANEL + i / 4, s * 8 + i % 4);
                    *byte = code(row, col) | code(row, col + 4) << 4;
                }
            }
            for (i, scale) in tail.chunks_exact_mut(2).enumerate() {
                let (row, group) = (p * PANEL + i % PANEL, i / PANEL);
                let bits = if row < n {
                    scales[row * groups + group]
                } else {
                    0
                };
                scale.copy_from_slice(&bits.to_le_bytes());
            }
        }
        out
    }

    /// Decodes row `row` of a packed `[n, k]` matrix into `out` (`k` values).
    pub fn unpack_row(packed: &[u8], k: usize, row: usize, out: &mut [f32]) {
        let panel = &packed[row / PANEL * panel_bytes(k)..][..panel_bytes(k)];
        let scales = &panel[k.div_ceil(GROUP) * GROUP * PANEL / 2..];
        let row = row % PANEL;
        for (col, value) in out.iter_mut().enumerate() {
            let byte = panel[col / 8 * 64 + row * 4 + col % 4];
            let nibble = if col % 8 < 4 { byte & 15 } else { byte >> 4 };
            let at = (col / GROUP * PANEL + row) * 2;
            let scale = f16::from_le_bytes([scales[at], scales[at + 1]]);
            *value = f32::from(nibble as i8 - 8) * scale.to_f32();
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn pack_and_unpack_agree_on_ragged_shapes() {
            for (n, k) in [(1usize, 1usize), (16, 32), (17, 33), (40, 100)] {
                let codes: Vec<i8> = (0..n * k).map(|i| (i * 5 % 16) as i8 - 8).collect();
                let groups = k.div_ceil(GROUP);
                let scales: Vec<u16> = (0..n * groups)
                    .map(|i| f16::from_f32(i as f32 * 0.25 - 2.0).to_bits())
                    .collect();
                let packed = pack(&codes, &scales, n, k);
                assert_eq!(packed.len() as u64, bytes(n, k));
                let mut out = vec![0.0; k];
                for row in 0..n {
                    unpack_row(&packed, k, row, &mut out);
                    for (col, have) in out.iter().enumerate() {
                        let scale = f16::from_bits(scales[row * groups + col / GROUP]).to_f32();
                        assert_eq!(*have, f32::from(codes[row * k + col]) * scale);
                    }
                }
            }
        }
    }
}
