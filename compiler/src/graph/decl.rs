//! Where the rows of a model's tensors are in the checkpoint, and what they are for.

use crate::checkpoint::{Checkpoint, Raw};
use crate::error::{Error, Result};
use crate::quantize::row_f32;
use ork_formats::model::FloatType;

/// What a tensor is for; decides its engines and forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A projection: int8 on the NPU in prefill, 4-bit on the CPU in decode.
    Matrix,
    /// Routed experts: int8 and 4-bit on the CPU.
    Experts,
    /// A small matrix whose results decide: router, gate. fp16 on the CPU.
    Gate,
    /// Embedding or head: int8 rows on the CPU.
    Embedding,
    /// Norm weight, bias, convolution taps: f32.
    Vector,
    /// Norm weight that multiplies as `1 + w`: stored with the 1 added, in f32.
    OnePlus,
}

/// Rows of one stored tensor: runs of equal length at equal distances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Name in the checkpoint.
    pub of: String,
    /// Its shape there. Rows are counted over all dimensions but the last.
    pub shape: Vec<u32>,
    /// First row of the first run.
    pub first: u32,
    /// Rows of a run.
    pub run: u32,
    /// Rows from the start of one run to the start of the next.
    pub stride: u32,
    /// Number of runs.
    pub runs: u32,
}

impl Piece {
    /// All `rows` rows of a tensor of `shape`.
    #[must_use]
    pub fn whole(of: String, shape: &[u32], rows: u32) -> Self {
        Self {
            of,
            shape: shape.to_vec(),
            first: 0,
            run: rows,
            stride: rows,
            runs: 1,
        }
    }

    /// Rows `[first, first + run)` of each of `runs` blocks of `stride` rows.
    #[must_use]
    pub fn strided(of: &str, shape: &[u32], (first, run): (u32, u32), stride: u32) -> Self {
        let rows: u32 = shape[..shape.len() - 1].iter().product();
        Self {
            of: of.to_string(),
            shape: shape.to_vec(),
            first,
            run,
            stride,
            runs: rows / stride,
        }
    }

    /// Rows in all.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.run * self.runs
    }
}

/// One tensor that the ops name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorDecl {
    /// Name in the checkpoint, or of its own where it is made of pieces.
    pub name: String,
    /// Where its `stack * n` rows are, in order.
    pub pieces: Vec<Piece>,
    /// Matrices of one shape: experts; 1 otherwise.
    pub stack: u32,
    /// Rows of one matrix; 1 for vectors.
    pub n: u32,
    /// Columns.
    pub k: u32,
    /// Purpose.
    pub role: Role,
}

impl TensorDecl {
    /// The tensor `name` as the checkpoint stores it: `[k]` for one-row vectors, else `[n, k]`.
    #[must_use]
    pub fn stored(name: String, n: u32, k: u32, role: Role) -> Self {
        let shape = match role {
            Role::Vector | Role::OnePlus if n == 1 => vec![k],
            _ => vec![n, k],
        };
        Self {
            pieces: vec![Piece::whole(name.clone(), &shape, n)],
            name,
            stack: 1,
            n,
            k,
            role,
        }
    }

    /// Its rows in the checkpoint, every piece checked against the shape it must have.
    ///
    /// # Errors
    /// [`Error::Input`] when a tensor is missing, misshapen or of an unsupported type.
    pub fn rows<'a>(&self, checkpoint: &'a Checkpoint) -> Result<Rows<'a>> {
        let mut pieces = Vec::with_capacity(self.pieces.len());
        let mut start = 0;
        for piece in &self.pieces {
            let raw = checkpoint.tensor(&piece.of)?;
            let want: Vec<usize> = piece.shape.iter().map(|d| *d as usize).collect();
            if raw.shape != want {
                return Err(Error::Input(format!(
                    "tensor {}: shape {:?}, config.json says {want:?}; the two are of different models",
                    piece.of, raw.shape
                )));
            }
            pieces.push(Located {
                start,
                raw,
                first: piece.first as usize,
                run: piece.run as usize,
                stride: piece.stride as usize,
                rows: piece.rows() as usize,
            });
            start += piece.rows() as usize;
        }
        Ok(Rows {
            pieces,
            k: self.k as usize,
            count: start,
            plus: if self.role == Role::OnePlus { 1.0 } else { 0.0 },
        })
    }

    /// The values that the ops use, `[stack * n, k]`.
    ///
    /// # Errors
    /// As [`TensorDecl::rows`], and [`Error::Input`] for values that are not finite.
    pub fn read_f32(&self, checkpoint: &Checkpoint) -> Result<Vec<f32>> {
        let rows = self.rows(checkpoint)?;
        let mut values = vec![0.0; rows.count * rows.k];
        for (i, row) in values.chunks_exact_mut(rows.k).enumerate() {
            rows.row_f32(i, row);
        }
        match values.iter().position(|v| !v.is_finite()) {
            None => Ok(values),
            Some(first) => Err(Error::Input(format!(
                "tensor {}: {} at index {first}, {} non-finite of {} values; repair the checkpoint",
                self.name,
                values[first],
                values.iter().filter(|v| !v.is_finite()).count(),
                values.len()
            ))),
        }
    }
}

struct Located<'a> {
    /// First row of the declared tensor.
    start: usize,
    raw: Raw<'a>,
    first: usize,
    run: usize,
    stride: usize,
    rows: usize,
}

/// The rows of one declared tensor, still in the checkpoint.
pub struct Rows<'a> {
    pieces: Vec<Located<'a>>,
    k: usize,
    count: usize,
    /// Added to every value.
    plus: f32,
}

impl Rows<'_> {
    /// Element type of the bytes, where they may be used as they are.
    #[must_use]
    pub fn ty(&self) -> Option<FloatType> {
        let first = self.pieces.first()?.raw.ty;
        let same = self.pieces.iter().all(|p| p.raw.ty == first);
        (same && self.plus == 0.0).then_some(first)
    }

    /// Values of row `row` into `out` (`k` values).
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        let piece = self.pieces.partition_point(|p| p.start <= row) - 1;
        let p = &self.pieces[piece];
        let i = row - p.start;
        let stored = p.first + i / p.run * p.stride + i % p.run;
        row_f32(&p.raw, self.k, stored, out);
        if self.plus != 0.0 {
            out.iter_mut().for_each(|v| *v += self.plus);
        }
    }

    /// The stored bytes in order, run by run.
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().flat_map(|p| {
            let row = self.k * p.raw.ty.bytes() as usize;
            (0..p.rows / p.run).map(move |i| {
                let at = (p.first + i * p.stride) * row;
                &p.raw.bytes[at..at + p.run * row]
            })
        })
    }

    /// Stored bytes in all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.chunks().map(|c| c.len() as u64).sum()
    }

    /// BLAKE3 of the stored bytes.
    #[must_use]
    pub fn hash(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        for chunk in self.chunks() {
            hasher.update(chunk);
        }
        *hasher.finalize().as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_pieces_pick_runs_of_every_block() {
        // Two heads of 3 query rows, then 2 gate rows each.
        let of = "w";
        let gate = Piece::strided(of, &[10, 4], (3, 2), 5);
        assert_eq!((gate.runs, gate.rows()), (2, 4));
        let bytes: Vec<u8> = (0..40u16)
            .flat_map(|i| f32::from(i).to_le_bytes())
            .collect();
        let raw = |_: usize| Raw {
            shape: vec![10, 4],
            ty: FloatType::F32,
            bytes: &bytes,
        };
        let located = |start, first, run| Located {
            start,
            raw: raw(start),
            first,
            run,
            stride: 5,
            rows: 2 * run,
        };
        let rows = Rows {
            pieces: vec![located(0, 3, 2), located(4, 0, 3)],
            k: 4,
            count: 10,
            plus: 0.0,
        };
        let firsts: Vec<f32> = (0..10)
            .map(|i| {
                let mut row = [0.0; 4];
                rows.row_f32(i, &mut row);
                row[0] / 4.0
            })
            .collect();
        assert_eq!(firsts, [3.0, 4.0, 8.0, 9.0, 0.0, 1.0, 2.0, 5.0, 6.0, 7.0]);
        assert_eq!(rows.bytes(), 160);
        assert_eq!(rows.chunks().next().unwrap()[..], bytes[48..80]);
    }
}
