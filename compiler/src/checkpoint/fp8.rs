//! FP8 with scales that multiply: one for all, for each row, or for each block. The last blocks may be ragged.

use super::floats::{E4M3, E5M2, Floats, Kind};

/// A stored FP8 matrix, or one for each expert.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8<'a> {
    pub(super) codes: Floats<'a>,
    pub(super) scales: Floats<'a>,
    /// Rows of a matrix.
    pub(super) n: usize,
    pub(super) grid: Grid,
}

/// Which scale belongs to which value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    /// Rows and columns that share a scale.
    pub(super) block: (usize, usize),
    /// Scales of one expert; 0 where the experts share them.
    pub(super) expert: usize,
    /// The block is not the declared one but read from the shapes.
    pub(super) inferred: bool,
}

impl Fp8<'_> {
    /// Row `row`, as long as `out`.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        let Grid { block, expert, .. } = self.grid;
        let across = out.len().div_ceil(block.1);
        let first = row / self.n * expert + row % self.n / block.0 * across;
        let codes = &self.codes.bytes[row * out.len()..];
        let table = if self.codes.kind == Kind::E5m2 {
            &E5M2
        } else {
            &E4M3
        };
        let blocks = out.chunks_mut(block.1).zip(codes.chunks(block.1));
        for (i, (values, codes)) in blocks.enumerate() {
            decode(table, codes, self.scales.at(first + i), values);
        }
    }
}

fn decode(table: &[f32; 256], codes: &[u8], scale: f32, out: &mut [f32]) {
    for (v, byte) in out.iter_mut().zip(codes) {
        *v = table[usize::from(*byte)] * scale;
    }
}

/// Reads the meaning of scales of shape `scales` over matrices `[experts, n, k]`; `declared` is the
/// block that the config gives.
pub(super) fn grid(
    scales: &[usize],
    (experts, n, k): (usize, usize, usize),
    declared: (usize, usize),
) -> Option<Grid> {
    let count: usize = scales.iter().product();
    if count == 1 {
        return Some(Grid {
            block: (n, k),
            expert: 0,
            inferred: false,
        });
    }
    // The part that repeats for each expert.
    let one = match scales {
        [e, rest @ ..] if experts != 1 && *e == experts => rest,
        all if experts == 1 => match all {
            // A leading 1 may be the expert of a stack of one.
            [1, rest @ ..] if rest.len() == 2 => rest,
            _ => all,
        },
        _ => return None,
    };
    let expert = one.iter().product();
    let (block, inferred) = match *one {
        [] | [1] | [1, 1] => ((n, k), false),
        [rows] | [rows, 1] if rows == n => ((1, k), false),
        [down, across] => {
            match n.div_ceil(declared.0) == down && k.div_ceil(declared.1) == across {
                true => (declared, false),
                false => ((side(n, down)?, side(k, across)?), true),
            }
        }
        _ => return None,
    };
    Some(Grid {
        block,
        expert,
        inferred,
    })
}

/// The block side that covers `length` with `count` blocks: a power of two where one does, else the exact
/// quotient. For a count of 1 every long enough side means the same.
fn side(length: usize, count: usize) -> Option<usize> {
    if count == 1 {
        return Some(length);
    }
    let power = (0..usize::BITS - 1).map(|i| 1 << i);
    power
        .take_while(|side| *side < length)
        .find(|side| length.div_ceil(*side) == count)
        .or_else(|| (count != 0 && length.is_multiple_of(count)).then(|| length / count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_shapes_say_what_they_cover() {
        let dims = (1, 192, 320);
        let block = |scales: &[usize]| Some(grid(scales, dims, (128, 128))?.block);
        assert_eq!(block(&[]), Some((192, 320)));
        assert_eq!(block(&[1]), Some((192, 320)));
        assert_eq!(block(&[1, 1]), Some((192, 320)));
        assert_eq!(block(&[192]), Some((1, 320)));
        assert_eq!(block(&[192, 1]), Some((1, 320)));
        assert_eq!(block(&[2, 3]), Some((128, 128)));
        assert_eq!(block(&[3, 5]), Some((64, 64)), "inferred, ragged nowhere");
        assert_eq!(block(&[6, 10]), Some((32, 32)));
        assert_eq!(block(&[2, 7]), None);
        assert_eq!(block(&[5]), None);
        let stack = |scales: &[usize]| grid(scales, (4, 192, 320), (128, 128));
        let grid = |block, expert| {
            Some(Grid {
                block,
                expert,
                inferred: false,
            })
        };
        assert_eq!(stack(&[1]), grid((192, 320), 0));
        assert_eq!(stack(&[4]), grid((192, 320), 1));
        assert_eq!(stack(&[4, 1, 1]), grid((192, 320), 1));
        assert_eq!(stack(&[4, 192, 1]), grid((1, 320), 192));
        assert_eq!(stack(&[4, 2, 3]), grid((128, 128), 6));
        assert_eq!(stack(&[2, 3]), None);
    }

    #[test]
    fn ragged_blocks_take_their_own_scale() {
        let codes: Vec<u8> = vec![0x38; 3 * 5];
        let scales: Vec<u8> = [1f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat();
        let fp8 = Fp8 {
            codes: Floats {
                kind: Kind::E4m3,
                bytes: &codes,
            },
            scales: Floats {
                kind: Kind::Plain(ork_formats::model::FloatType::F32),
                bytes: &scales,
            },
            n: 3,
            grid: grid(&[2, 2], (1, 3, 5), (2, 3)).unwrap(),
        };
        let mut out = [0.0; 5];
        fp8.row(1, &mut out);
        assert_eq!(out, [1.0, 1.0, 1.0, 2.0, 2.0]);
        fp8.row(2, &mut out);
        assert_eq!(out, [3.0, 3.0, 3.0, 4.0, 4.0]);
    }
}
