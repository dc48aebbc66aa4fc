//! int8 NPU form: one scale per output channel, native weight tiles.

use super::symmetric;
use ork_formats::layout;
use ork_formats::model::Block;
use rayon::prelude::*;

/// Rows of a native weight tile.
const TILE_ROWS: usize = 32;

/// A whole quantised matrix, row-major and padded with zeros.
#[derive(Clone, Debug)]
pub struct Codes {
    /// `[padded_n][padded_k]`
    pub codes: Vec<i8>,
    /// `[padded_n]`
    pub scales: Vec<f32>,
    /// Columns of `codes`.
    pub padded_k: usize,
    /// Largest magnitude an accumulator can reach with any int8 activations.
    pub bound: u64,
}

/// Quantises `[n, k]` whose rows `row(i, out)` yields, padded to `[padded_n, padded_k]`.
pub fn quantize(
    (n, k): (usize, usize),
    (padded_n, padded_k): (usize, usize),
    row: impl Fn(usize, &mut [f32]) + Sync,
) -> Codes {
    let mut codes = vec![0i8; padded_n * padded_k];
    let mut scales = vec![0f32; padded_n];
    let bound = codes
        .par_chunks_exact_mut(padded_k)
        .zip(&mut scales)
        .take(n)
        .enumerate()
        .map_init(
            || vec![0f32; k],
            |values, (i, (line, scale))| {
                row(i, values);
                *scale = symmetric(values, &mut line[..k]);
                let sum: u64 = line.iter().map(|c| u64::from(c.unsigned_abs())).sum();
                sum * 127
            },
        )
        .max()
        .unwrap_or(0);
    Codes {
        codes,
        scales,
        padded_k,
        bound,
    }
}

impl Codes {
    /// The native tiles of one block; `slice_k` columns per slice.
    #[must_use]
    pub fn block(&self, block: &Block, slice_k: usize) -> Vec<u8> {
        let mut out = vec![0u8; block.cols as usize * slice_k];
        let k0 = block.slice as usize * slice_k;
        // 32 channels are contiguous in the native layout, so bands of them pack independently.
        out.par_chunks_exact_mut(TILE_ROWS * slice_k)
            .enumerate()
            .for_each_init(
                || vec![0i8; TILE_ROWS * slice_k],
                |band, (tile, bytes)| {
                    for (r, line) in band.chunks_exact_mut(slice_k).enumerate() {
                        let n = block.n0 as usize + tile * TILE_ROWS + r;
                        line.copy_from_slice(&self.codes[n * self.padded_k + k0..][..slice_k]);
                    }
                    layout::pack_weights(band, TILE_ROWS, slice_k, bytes);
                },
            );
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ork_formats::model::Place;

    #[test]
    fn blocks_are_native_tiles_of_the_padded_matrix() {
        let (n, k) = (70, 50);
        let value = |r: usize, c: usize| ((r * 31 + c * 17) % 255) as f32 - 127.0;
        let q = quantize((n, k), (96, 1024), |r, out| {
            for (c, v) in out.iter_mut().enumerate() {
                *v = value(r, c);
            }
            out[0] = 127.0;
        });
        let block = Block {
            core: 0,
            n0: 32,
            cols: 64,
            slice: 0,
            at: Place {
                extent: 0,
                offset: 0,
            },
        };
        let bytes = q.block(&block, 512);
        for r in 0..64 {
            for c in 0..512 {
                let want = match (32 + r, c) {
                    (row, 0) if row < n => 127,
                    (row, col) if row < n && col < k => value(row, col) as i8,
                    _ => 0,
                };
                assert_eq!(bytes[layout::weight_index(r, c, 16)] as i8, want, "{r} {c}");
            }
        }
        assert!(
            q.block(&Block { slice: 1, ..block }, 512)
                .iter()
                .all(|b| *b == 0)
        );
        assert_eq!(q.scales[n..], [0.0; 26]);
        assert!(q.bound <= 50 * 127 * 127);
    }
}
