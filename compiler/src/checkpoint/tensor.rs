//! One tensor as the ops see it: decoded rows, whatever the file stores.

use super::affine::Affine;
use super::floats::{Floats, Kind, widen_into};
use super::fp8::Fp8;
use super::mx::Mx;
use crate::error::{Error, Result};
use half::{bf16, f16};
use ork_formats::model::FloatType;
use rayon::prelude::*;

/// Leading dimensions (experts) are more rows.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    /// Name in the checkpoint.
    pub name: String,
    /// File that holds it.
    pub file: String,
    /// Decoded dimensions of the whole tensor, outermost first.
    pub shape: Vec<usize>,
    pub(super) columns: usize,
    pub(super) rows: usize,
    pub(super) form: Form<'a>,
    /// The weight itself, then everything else that decides its values: (name, bytes).
    pub(super) parts: Vec<(String, Floats<'a>)>,
}

/// How the values are stored.
#[derive(Clone, Copy, Debug)]
pub(super) enum Form<'a> {
    /// Little-endian at any alignment: MLX does not pad its headers.
    Float(FloatType, &'a [u8]),
    Affine(Affine<'a>),
    Mx(Mx<'a>),
    Fp8(Fp8<'a>),
}

impl<'a> Tensor<'a> {
    /// Rows in all.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Type and bytes of the rows when they are stored as plain floats.
    #[must_use]
    pub fn plain(&self) -> Option<(FloatType, &'a [u8])> {
        let Form::Float(ty, bytes) = self.form else {
            return None;
        };
        Some((ty, bytes))
    }

    /// Decodes row `row` into `out`, which holds one value a column.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        match &self.form {
            Form::Float(ty, bytes) => {
                let at = row * self.columns * ty.bytes() as usize;
                widen_into(*ty, &bytes[at..], out);
            }
            Form::Affine(m) => m.row(row, out),
            Form::Mx(m) => m.row(row, out),
            Form::Fp8(m) => m.row(row, out),
        }
    }

    /// Every row, decoded. Values may be anything: see [`Tensor::check_finite`].
    #[must_use]
    pub fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.rows() * self.columns];
        if self.columns != 0 {
            values
                .par_chunks_exact_mut(self.columns)
                .enumerate()
                .for_each(|(row, out)| self.row(row, out));
        }
        values
    }

    /// Refuses NaN and infinity, in scales and in decoded values.
    ///
    /// # Errors
    /// [`Error::Input`] naming the tensor and the lowest index.
    pub fn check_finite(&self) -> Result<()> {
        // A scale names the damage better than the group of values that it spoils.
        for (name, floats) in self.parts.iter().skip(1) {
            let bad = |i: &usize| !floats.at(*i).is_finite();
            let mut found = (0..floats.len()).filter(bad);
            if let Some(first) = found.next() {
                let count = 1 + found.count();
                return Err(not_finite(
                    name,
                    first,
                    floats.at(first),
                    count,
                    floats.len(),
                ));
            }
        }
        let k = self.columns;
        // (index of the lowest, its value, how many) whichever thread finds them.
        let found = (0..self.rows())
            .into_par_iter()
            .map_init(
                || vec![0f32; k],
                |values, row| {
                    self.row(row, values);
                    let first = values.iter().position(|v| !v.is_finite())?;
                    let count = values.iter().filter(|v| !v.is_finite()).count();
                    Some((row * k + first, values[first], count))
                },
            )
            .flatten()
            .reduce_with(|a, b| {
                let low = if a.0 < b.0 { a } else { b };
                (low.0, low.1, a.2 + b.2)
            });
        match found {
            None => Ok(()),
            Some((index, value, count)) => {
                let all = self.rows() * k;
                Err(not_finite(&self.name, index, value, count, all))
            }
        }
    }

    /// The type of plain floats; else the smallest that holds every value exactly, which takes a pass
    /// over them.
    #[must_use]
    pub fn float_type(&self) -> FloatType {
        if let Form::Float(ty, _) = self.form {
            return ty;
        }
        let exact = |narrow: fn(f32) -> f32| {
            (0..self.rows()).into_par_iter().all(|row| {
                let mut values = vec![0.0; self.columns];
                self.row(row, &mut values);
                values.iter().all(|v| narrow(*v).to_bits() == v.to_bits())
            })
        };
        if exact(|v| bf16::from_f32(v).to_f32()) {
            FloatType::Bf16
        } else if exact(|v| f16::from_f32(v).to_f32()) {
            FloatType::F16
        } else {
            FloatType::F32
        }
    }

    /// Bytes that decide the values: what a compilation reads.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        match self.plain() {
            Some((_, bytes)) => bytes.len() as u64,
            None => self.parts.iter().map(|(_, f)| f.bytes.len() as u64).sum(),
        }
    }

    /// BLAKE3 of what decides the values: of the bytes for plain floats, else of the weight and all its
    /// companions, each with its name and length.
    #[must_use]
    pub fn source_hash(&self) -> [u8; 32] {
        if let Some((_, bytes)) = self.plain() {
            return *blake3::hash(bytes).as_bytes();
        }
        let mut hasher = blake3::Hasher::new();
        for (name, floats) in &self.parts {
            for bytes in [name.as_bytes(), floats.bytes] {
                hasher.update(&(bytes.len() as u64).to_le_bytes());
                hasher.update(bytes);
            }
        }
        *hasher.finalize().as_bytes()
    }

    /// What is suspicious about finite values, if anything.
    #[must_use]
    pub fn suspicion(&self) -> Option<String> {
        let Form::Mx(m) = &self.form else {
            return None;
        };
        let (lost, groups) = m.underflown();
        // A handful of groups of nothing but noise is no reason for alarm.
        (groups < lost * 100).then(|| {
            format!(
                "{}: tensor {}: {lost} of {groups} scales are 0 while their codes are not, the scales underflowed; quantise again with a global scale",
                self.file, self.name
            )
        })
    }
}

fn not_finite(name: &str, index: usize, value: f32, count: usize, all: usize) -> Error {
    Error::Input(format!(
        "tensor {name}: {value} at index {index}, {count} of {all} values are not finite; the checkpoint is \
         damaged, download it again"
    ))
}

/// The weight's own bytes as a part; their kind is never asked.
pub(super) fn whole(bytes: &[u8]) -> Floats<'_> {
    let kind = Kind::E4m3;
    Floats { kind, bytes }
}
