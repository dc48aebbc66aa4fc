//! Where the rows of a model's tensors are in the checkpoint, and what they are for.

use crate::checkpoint::{Checkpoint, Tensor};
use crate::error::{Error, Result};
use ork_formats::model::FloatType;
use rayon::prelude::*;

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
            let tensor = checkpoint.tensor(&piece.of, self.k as usize)?;
            let want: Vec<usize> = piece.shape.iter().map(|d| *d as usize).collect();
            if tensor.shape != want {
                return Err(Error::Input(format!(
                    "{}: tensor {}: shape {:?}, config.json says {want:?}; the two are of different models",
                    tensor.file, piece.of, tensor.shape
                )));
            }
            pieces.push(Located {
                start,
                tensor,
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
        rows.check_finite()?;
        let mut values = vec![0.0; rows.count * rows.k];
        values
            .par_chunks_exact_mut(rows.k)
            .enumerate()
            .for_each(|(i, row)| rows.row_f32(i, row));
        Ok(values)
    }
}

struct Located<'a> {
    /// First row of the declared tensor.
    start: usize,
    tensor: Tensor<'a>,
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
    pub fn plain(&self) -> Option<FloatType> {
        let mut types = self.pieces.iter().map(|p| p.tensor.plain());
        let (first, _) = types.next()??;
        let same = types.all(|ty| ty.is_some_and(|(ty, _)| ty == first));
        (same && self.plus == 0.0).then_some(first)
    }

    /// The smallest type that holds every value; quantised tensors take a pass over them.
    #[must_use]
    pub fn float_type(&self) -> FloatType {
        let mut types = self.pieces.iter().map(|p| p.tensor.float_type());
        match types.next() {
            Some(first) if self.plus == 0.0 && types.all(|ty| ty == first) => first,
            // Pieces of different types have only f32 in common.
            _ => FloatType::F32,
        }
    }

    /// The tensors that hold the rows.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor<'_>> {
        self.pieces.iter().map(|p| &p.tensor)
    }

    /// Values of row `row` into `out` (`k` values).
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        let piece = self.pieces.partition_point(|p| p.start <= row) - 1;
        let p = &self.pieces[piece];
        let i = row - p.start;
        p.tensor
            .row(p.first + i / p.run * p.stride + i % p.run, out);
        if self.plus != 0.0 {
            out.iter_mut().for_each(|v| *v += self.plus);
        }
    }

    /// Refuses NaN and infinity, in scales and in the values that are used.
    ///
    /// # Errors
    /// [`Error::Input`] naming the tensor and the lowest index.
    pub fn check_finite(&self) -> Result<()> {
        self.pieces.iter().try_for_each(|p| p.tensor.check_finite())
    }

    /// The stored bytes of plain floats in order, run by run; nothing of quantised tensors.
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().flat_map(move |p| {
            let plain = p.tensor.plain();
            (0..p.rows / p.run).filter_map(move |i| {
                let (ty, bytes) = plain?;
                let row = self.k * ty.bytes() as usize;
                let at = (p.first + i * p.stride) * row;
                Some(&bytes[at..at + p.run * row])
            })
        })
    }

    /// Bytes that decide the values: what a compilation reads.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let share = |p: &Located<'_>| {
            let all = p.tensor.rows().max(1) as u64;
            p.tensor.stored_bytes() * p.rows as u64 / all
        };
        self.pieces.iter().map(share).sum()
    }

    /// BLAKE3 of what decides the values: the bytes of plain floats; of quantised tensors everything, and
    /// which rows are used.
    #[must_use]
    pub fn hash(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        for chunk in self.chunks() {
            hasher.update(chunk);
        }
        for p in self.pieces.iter().filter(|p| p.tensor.plain().is_none()) {
            hasher.update(&p.tensor.source_hash());
            for word in [p.first, p.run, p.stride, p.rows] {
                hasher.update(&(word as u64).to_le_bytes());
            }
        }
        *hasher.finalize().as_bytes()
    }
}
