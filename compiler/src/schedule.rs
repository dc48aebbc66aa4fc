//! The order of programs: one private chain per matrix, core, half and row class.

use crate::error::{Error, Result};
use crate::tile::{Halves, Tiling, row_tiles};
use ork_caps::Caps;
use ork_formats::model::{Chain, TensorId};

/// Programs and chains, before anything has an address.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// One entry per NPU matrix, in tensor order.
    pub matrices: Vec<Matrix>,
    /// Programs in file order.
    pub steps: Vec<Step>,
    /// Bytes of int32 results that the widest chain of each core leaves behind.
    pub ring: Vec<u64>,
    /// Longest padded K of all matrices.
    pub widest_k: u32,
}

/// One matrix and its chains.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Which tensor.
    pub tensor: TensorId,
    /// How it is cut.
    pub tiling: Tiling,
    /// Sorted by (half, rows, core).
    pub chains: Vec<Chain>,
}

/// One program without addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Index into [`Schedule::matrices`].
    pub matrix: u32,
    /// Index into the pieces of its tiling.
    pub piece: u32,
    /// Half-chunk.
    pub half: u32,
    /// First row inside the half-chunk.
    pub row0: u32,
    /// Rows.
    pub m: u32,
    /// Byte offset of its C block inside the core's part of the ring half.
    pub c_offset: u64,
}

/// C blocks start on cache lines, so that two cores never share one.
const C_ALIGN: u64 = 64;

/// Schedules `matrices` on `cores` cores for the row classes of `halves`.
///
/// # Errors
/// [`Error::Fit`] where a chain has more programs than one commit may.
pub fn schedule(
    matrices: Vec<(TensorId, Tiling)>,
    halves: &Halves,
    cores: u32,
    caps: &Caps,
) -> Result<Schedule> {
    let mut out = Schedule {
        ring: vec![0; cores as usize],
        ..Schedule::default()
    };
    for (tensor, tiling) in matrices {
        let mut chains = Vec::new();
        for (half, classes) in (0..).zip(&halves.classes) {
            for rows in classes {
                for core in 0..cores {
                    chains.extend(chain(&mut out, &tiling, core, half, *rows));
                }
            }
        }
        if let Some(long) = chains.iter().find(|c| caps.max_tasks.value < c.count) {
            return Err(Error::Fit(format!(
                "a chain of tensor {tensor} has {} programs, one commit takes {}; use a smaller --chunk",
                long.count, caps.max_tasks.value
            )));
        }
        out.widest_k = out.widest_k.max(tiling.padded_k());
        out.matrices.push(Matrix {
            tensor,
            tiling,
            chains,
        });
    }
    Ok(out)
}

/// Appends the programs of one chain; `None` where the core owns no columns.
fn chain(out: &mut Schedule, tiling: &Tiling, core: u32, half: u32, rows: u32) -> Option<Chain> {
    let first = out.steps.len();
    let matrix = out.matrices.len() as u32;
    let mut c_offset = 0;
    for (row0, m) in row_tiles(rows, tiling.row_cap) {
        for (piece, p) in (0..).zip(&tiling.pieces).filter(|(_, p)| p.core == core) {
            out.steps.push(Step {
                matrix,
                piece,
                half,
                row0,
                m,
                c_offset,
            });
            c_offset += (u64::from(m) * u64::from(p.cols) * 4).next_multiple_of(C_ALIGN);
        }
    }
    let ring = &mut out.ring[core as usize];
    *ring = (*ring).max(c_offset);
    let count = out.steps.len() - first;
    (count != 0).then_some(Chain {
        core,
        half,
        rows,
        first: first as u32,
        count: count as u32,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile::{halves, tile};
    use ork_caps::RK3588;

    #[test]
    fn chains_are_sorted_and_cover_every_step_once() {
        let halves = halves(192, &RK3588);
        let matrices = [(96, 9728), (33, 512)]
            .map(|(n, k)| tile(n, k, 3, &RK3588).unwrap())
            .into_iter();
        let s = schedule((0..).zip(matrices).collect(), &halves, 3, &RK3588).unwrap();
        let mut next = 0;
        for m in &s.matrices {
            let keys: Vec<_> = m.chains.iter().map(|c| (c.half, c.rows, c.core)).collect();
            assert!(keys.is_sorted());
            for c in &m.chains {
                assert_eq!(c.first, next);
                next += c.count;
            }
        }
        assert_eq!(next as usize, s.steps.len());
        // 96 columns: one tile a core, three K slices, two row tiles of the 128-row class.
        assert_eq!(s.ring, [6 * 64 * 32 * 4; 3]);
        assert_eq!(s.widest_k, 3 * 3584);
    }
}
