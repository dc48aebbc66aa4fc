//! The KV cache of one layer, in blocks allocated as positions are reached.

use half::f16;
use half::slice::HalfFloatSliceExt;
use ork_formats::model::{Cache, FloatType};

/// Positions of one block.
pub const BLOCK: usize = 16;

/// One block of keys or values, `[BLOCK][kv_heads * head_dim]`.
#[derive(Clone, Debug)]
enum Block {
    F16(Vec<u16>),
    F32(Vec<f32>),
}

impl Block {
    fn new(ty: FloatType, width: usize) -> Self {
        match ty {
            FloatType::F32 => Self::F32(vec![0.0; BLOCK * width]),
            FloatType::F16 | FloatType::Bf16 => Self::F16(vec![0; BLOCK * width]),
        }
    }

    fn write(&mut self, at: usize, values: &[f32]) {
        match self {
            Self::F32(data) => data[at..at + values.len()].copy_from_slice(values),
            Self::F16(data) => {
                use half::slice::HalfBitsSliceExt;
                let to: &mut [f16] = data[at..at + values.len()].reinterpret_cast_mut();
                to.convert_from_f32_slice(values);
            }
        }
    }

    fn read(&self, at: usize, out: &mut [f32]) {
        match self {
            Self::F32(data) => out.copy_from_slice(&data[at..at + out.len()]),
            Self::F16(data) => ork_kernels::f16_to_f32(&data[at..at + out.len()], out),
        }
    }
}

/// Keys and values of one layer. Writing a position again replaces it, so a chunk that failed half
/// way leaves nothing behind once its positions are written again.
#[derive(Clone, Debug)]
pub struct Kv {
    shape: Cache,
    ty: FloatType,
    keys: Vec<Block>,
    values: Vec<Block>,
}

impl Kv {
    /// An empty cache that stores `ty` (f32, else f16).
    #[must_use]
    pub fn new(shape: Cache, ty: FloatType) -> Self {
        Self {
            shape,
            ty,
            keys: Vec::new(),
            values: Vec::new(),
        }
    }

    /// Key/value heads and elements per head.
    #[must_use]
    pub fn shape(&self) -> Cache {
        self.shape
    }

    /// Elements of one position.
    #[must_use]
    pub fn width(&self) -> usize {
        self.shape.kv_heads as usize * self.shape.head_dim as usize
    }

    /// Frees every block.
    pub fn clear(&mut self) {
        self.keys.clear();
        self.values.clear();
    }

    /// Stores the key and value rows of `position`, `[kv_heads * head_dim]` each.
    pub fn write(&mut self, position: usize, key: &[f32], value: &[f32]) {
        let width = self.width();
        while self.keys.len() <= position / BLOCK {
            self.keys.push(Block::new(self.ty, width));
            self.values.push(Block::new(self.ty, width));
        }
        let at = position % BLOCK * width;
        self.keys[position / BLOCK].write(at, key);
        self.values[position / BLOCK].write(at, value);
    }

    /// Unpacks the key of `head` at `position`, `[head_dim]`.
    pub fn key(&self, position: usize, head: usize, out: &mut [f32]) {
        self.keys[position / BLOCK].read(self.at(position, head), out);
    }

    /// Unpacks the value of `head` at `position`, `[head_dim]`.
    pub fn value(&self, position: usize, head: usize, out: &mut [f32]) {
        self.values[position / BLOCK].read(self.at(position, head), out);
    }

    fn at(&self, position: usize, head: usize) -> usize {
        position % BLOCK * self.width() + head * self.shape.head_dim as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Cache = Cache {
        kv_heads: 2,
        head_dim: 3,
    };

    fn row(position: usize) -> Vec<f32> {
        (0..6).map(|i| (position * 6 + i) as f32 * 0.37).collect()
    }

    #[test]
    fn positions_survive_across_blocks() {
        for ty in [FloatType::F32, FloatType::F16] {
            let mut kv = Kv::new(SHAPE, ty);
            for position in 0..BLOCK * 2 + 3 {
                let value: Vec<f32> = row(position).iter().map(|v| -v).collect();
                kv.write(position, &row(position), &value);
            }
            assert_eq!(kv.keys.len(), 3);
            let mut out = [0.0; 3];
            for position in 0..BLOCK * 2 + 3 {
                for head in 0..2 {
                    let want: Vec<f32> = row(position)[head * 3..][..3]
                        .iter()
                        .map(|v| match ty {
                            FloatType::F32 => *v,
                            _ => f16::from_f32(*v).to_f32(),
                        })
                        .collect();
                    kv.key(position, head, &mut out);
                    assert_eq!(out[..], want[..]);
                    kv.value(position, head, &mut out);
                    assert!(out.iter().zip(&want).all(|(a, b)| *a == -b));
                }
            }
        }
    }

    #[test]
    fn a_second_write_replaces() {
        let mut kv = Kv::new(SHAPE, FloatType::F32);
        kv.write(4, &row(1), &row(2));
        kv.write(4, &row(5), &row(6));
        let mut out = [0.0; 3];
        kv.key(4, 1, &mut out);
        assert_eq!(out[..], row(5)[3..]);
        kv.clear();
        assert!(kv.keys.is_empty());
    }
}
