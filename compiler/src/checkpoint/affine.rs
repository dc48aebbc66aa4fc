//! MLX affine: unsigned codes of 1, 2, 3, 4, 5, 6 or 8 bits; `scale * code + bias` for each group along a row.

use super::floats::Floats;

/// A stored affine matrix; experts are more rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Affine<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: Floats<'a>,
    pub(super) biases: Floats<'a>,
    pub(super) bits: usize,
    pub(super) group: usize,
}

impl Affine<'_> {
    /// Row `row`, as long as `out`.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        let (bytes, groups) = (out.len() * self.bits / 8, out.len() / self.group);
        unpack(self.bits, &self.codes[row * bytes..][..bytes], out);
        for (g, values) in out.chunks_exact_mut(self.group).enumerate() {
            let scale = self.scales.at(row * groups + g);
            let bias = self.biases.at(row * groups + g);
            // Two roundings in f32, as MLX's own definition with widened scales has.
            values.iter_mut().for_each(|v| *v = scale * *v + bias);
        }
    }
}

/// Codes of one continuous little-endian bit stream, lowest bit first, as floats.
pub(super) fn unpack(bits: usize, codes: &[u8], out: &mut [f32]) {
    let mask = (1u64 << bits) - 1;
    // Eight codes fill exactly `bits` bytes, so no code straddles a chunk. Only the last may be short.
    for (values, bytes) in out.chunks_mut(8).zip(codes.chunks(bits)) {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        let word = u64::from_le_bytes(word);
        for (i, v) in values.iter_mut().enumerate() {
            *v = (word >> (i * bits) & mask) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit by bit: the slow meaning of the packing.
    #[test]
    fn codes_are_one_bit_stream() {
        let bytes: Vec<u8> = (0..96u32).map(|i| (i * 37 + 11) as u8).collect();
        for bits in [1, 2, 3, 4, 5, 6, 8] {
            let mut out = vec![0.0; bytes.len() * 8 / bits];
            unpack(bits, &bytes, &mut out);
            for (i, v) in out.iter().enumerate() {
                let bit = |b: usize| u32::from(bytes[b / 8] >> (b % 8) & 1);
                let want: u32 = (0..bits).map(|j| bit(i * bits + j) << j).sum();
                assert_eq!(*v, want as f32, "{bits} bits, code {i}");
            }
        }
        let mut out = [0.0; 4];
        unpack(8, &[1, 2, 3, 255], &mut out);
        assert_eq!(out, [1.0, 2.0, 3.0, 255.0], "a short last chunk");
    }
}
