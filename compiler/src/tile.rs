//! Cuts a matrix and a chunk of rows into pieces that one program may compute.

use crate::error::{Error, Result};
use ork_caps::Caps;

/// Columns `[n0, n0 + cols)` of K slice `slice`, owned by `core`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Owning core.
    pub core: u32,
    /// First output channel.
    pub n0: u32,
    /// Output channels, padded.
    pub cols: u32,
    /// K slice.
    pub slice: u32,
}

/// How one `[n, k]` matrix is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tiling {
    /// K of one slice after padding.
    pub slice_k: u32,
    /// Equal K slices.
    pub k_slices: u32,
    /// N after padding.
    pub padded_n: u32,
    /// Most rows of one program.
    pub row_cap: u32,
    /// Pieces ordered by (core, columns, slice).
    pub pieces: Vec<Piece>,
}

impl Tiling {
    /// K of all slices together.
    #[must_use]
    pub fn padded_k(&self) -> u32 {
        self.slice_k * self.k_slices
    }
}

/// Cuts `[n, k]` for `cores` cores: column tiles are dealt in contiguous runs, cut again where a
/// program may not have more columns; a core may get none.
///
/// # Errors
/// [`Error::Fit`] where caps have no row cap for the slice.
pub fn tile(n: u32, k: u32, cores: u32, caps: &Caps) -> Result<Tiling> {
    let (slice_k, k_slices) = cut_k(k, caps);
    let row_cap = caps.m_cap(slice_k).ok_or_else(|| {
        Error::Fit(format!(
            "no row cap is known for K {slice_k} (from K {k}) on {}; add one to its caps",
            caps.name
        ))
    })?;
    let granule = caps.n_granule.value;
    let padded_n = n.next_multiple_of(granule);
    let tiles = padded_n / granule;
    let mut pieces = Vec::new();
    for core in 0..cores {
        let end = (core + 1) * tiles / cores * granule;
        let mut n0 = core * tiles / cores * granule;
        while n0 < end {
            let cols = caps.n_max.value.min(end - n0);
            pieces.extend((0..k_slices).map(|slice| Piece {
                core,
                n0,
                cols,
                slice,
            }));
            n0 += cols;
        }
    }
    Ok(Tiling {
        slice_k,
        k_slices,
        padded_n,
        row_cap,
        pieces,
    })
}

/// `(slice_k, slices)`: the fewest equal slices that are multiples of the granule and short enough.
fn cut_k(k: u32, caps: &Caps) -> (u32, u32) {
    let granule = caps.k_granule.value;
    let padded = k.next_multiple_of(granule);
    let slices = padded.div_ceil(caps.k_max.value);
    (padded.div_ceil(slices).next_multiple_of(granule), slices)
}

/// Rows of the two halves of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Halves {
    /// Rows of half 0, and at most of half 1.
    pub rows: u32,
    /// Row classes of each half, ascending.
    pub classes: [Vec<u32>; 2],
}

/// Cuts a chunk of `chunk` rows (a multiple of the row granule) into halves and row classes.
#[must_use]
pub fn halves(chunk: u32, caps: &Caps) -> Halves {
    let granule = caps.row_granule.value;
    let rows = (chunk / 2).next_multiple_of(granule).max(granule);
    let classes = |most: u32| (1..=most / granule).map(|i| i * granule).collect();
    Halves {
        rows,
        classes: [classes(rows), classes(chunk.saturating_sub(rows))],
    }
}

/// `(row0, m)` of the row tiles that cover `rows`.
pub fn row_tiles(rows: u32, cap: u32) -> impl Iterator<Item = (u32, u32)> {
    (0..rows.div_ceil(cap)).map(move |i| (i * cap, cap.min(rows - i * cap)))
}

/// Register-level numbers of one program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffering {
    /// Rows fetched ahead.
    pub grains_rows: u32,
    /// Convolution buffer banks for activations.
    pub data_banks: u32,
    /// Banks for weights.
    pub weight_banks: u32,
}

/// Splits the convolution buffer for a program of `m` rows and `k` elements. A row of `k_granule`
/// elements times `row_granule` rows fills one bank exactly.
#[must_use]
pub fn buffering(m: u32, k: u32, caps: &Caps) -> Buffering {
    let data_banks = m.div_ceil(caps.row_granule.value) * k.div_ceil(caps.k_granule.value);
    // What the published generators use: a power of two whose rows fit 64 KiB.
    let window = 65536 / k;
    let grains = if window == 0 { 1 } else { 1 << window.ilog2() };
    Buffering {
        grains_rows: (m + 1).min(grains),
        data_banks,
        weight_banks: caps.cbuf_banks.value.saturating_sub(data_banks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ork_caps::RK3588;

    #[test]
    fn k_is_padded_and_cut_into_equal_slices() {
        for (k, expect) in [
            (1, (512, 1)),
            (512, (512, 1)),
            (768, (1024, 1)),
            (2560, (2560, 1)),
            (4096, (4096, 1)),
            (4097, (2560, 2)),
            (8192, (4096, 2)),
            (9728, (3584, 3)),
        ] {
            assert_eq!(cut_k(k, &RK3588), expect, "K {k}");
        }
    }

    #[test]
    fn row_caps_follow_the_slice() {
        for (k, rows) in [
            (512, 704),
            (1024, 320),
            (1536, 192),
            (2048, 128),
            (9728, 64),
        ] {
            assert_eq!(tile(32, k, 1, &RK3588).unwrap().row_cap, rows, "K {k}");
        }
    }

    #[test]
    fn cores_own_contiguous_column_tiles() {
        let t = tile(2560, 512, 3, &RK3588).unwrap();
        let runs: Vec<_> = t.pieces.iter().map(|p| (p.core, p.n0, p.cols)).collect();
        // 80 tiles: 26, 27, 27.
        assert_eq!(runs, [(0, 0, 832), (1, 832, 864), (2, 1696, 864)]);
    }

    #[test]
    fn a_core_may_own_nothing() {
        let t = tile(33, 512, 3, &RK3588).unwrap();
        let runs: Vec<_> = t.pieces.iter().map(|p| (p.core, p.n0, p.cols)).collect();
        assert_eq!(runs, [(1, 0, 32), (2, 32, 32)]);
    }

    #[test]
    fn wide_matrices_are_cut_at_the_column_limit() {
        let t = tile(20000, 5000, 1, &RK3588).unwrap();
        let runs: Vec<_> = t.pieces.iter().map(|p| (p.n0, p.cols, p.slice)).collect();
        assert_eq!(
            runs,
            [
                (0, 8192, 0),
                (0, 8192, 1),
                (8192, 8192, 0),
                (8192, 8192, 1),
                (16384, 3616, 0),
                (16384, 3616, 1)
            ]
        );
    }

    #[test]
    fn halves_and_classes() {
        let h = halves(512, &RK3588);
        assert_eq!(
            (h.rows, h.classes[1].as_slice()),
            (256, &[64, 128, 192, 256][..])
        );
        let h = halves(192, &RK3588);
        assert_eq!(h.rows, 128);
        assert_eq!(h.classes, [vec![64, 128], vec![64]]);
        let h = halves(64, &RK3588);
        assert_eq!(h.classes, [vec![64], vec![]]);
    }

    #[test]
    fn row_tiles_cover_the_class() {
        assert_eq!(
            row_tiles(256, 192).collect::<Vec<_>>(),
            [(0, 192), (192, 64)]
        );
        assert_eq!(row_tiles(64, 704).collect::<Vec<_>>(), [(0, 64)]);
    }

    #[test]
    fn banks_sum_and_leave_room_for_weights() {
        for (k, cap) in RK3588.m_caps.value {
            let b = buffering(*cap, *k, &RK3588);
            assert_eq!(b.data_banks + b.weight_banks, 12);
            assert_ne!(b.weight_banks, 0, "K {k}");
        }
        assert_eq!(buffering(64, 3584, &RK3588).grains_rows, 16);
        assert_eq!(buffering(64, 512, &RK3588).grains_rows, 65);
    }
}
