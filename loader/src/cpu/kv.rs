//! KV cache in blocks of 16 tokens, fp16 or f32.

use half::f16;
use half::slice::HalfFloatSliceExt;
use ork_formats::model::{Cache, FloatType};
use std::sync::Arc;

/// Tokens of one block.
pub(crate) const BLOCK: usize = 16;

/// `[tokens][kv_heads * head_dim]` of one block.
#[derive(Clone)]
enum Rows {
    Half(Vec<f16>),
    Full(Vec<f32>),
}

impl Rows {
    fn new(ty: FloatType, len: usize) -> Self {
        match ty {
            FloatType::F32 => Self::Full(vec![0.0; len]),
            FloatType::F16 | FloatType::Bf16 => Self::Half(vec![f16::ZERO; len]),
        }
    }

    fn store(&mut self, at: usize, row: &[f32]) {
        match self {
            Self::Half(bits) => bits[at..at + row.len()].convert_from_f32_slice(row),
            Self::Full(values) => values[at..at + row.len()].copy_from_slice(row),
        }
    }

    fn load(&self, at: usize, out: &mut [f32]) {
        match self {
            Self::Half(bits) => bits[at..at + out.len()].convert_to_f32_slice(out),
            Self::Full(values) => out.copy_from_slice(&values[at..at + out.len()]),
        }
    }
}

#[derive(Clone)]
struct Block {
    keys: Rows,
    values: Rows,
}

/// One layer's cache. Blocks are shared by reference count: a clone is a cheap snapshot.
#[derive(Clone)]
pub(crate) struct Kv {
    blocks: Vec<Arc<Block>>,
    width: usize,
    head_dim: usize,
    ty: FloatType,
    len: usize,
}

impl Kv {
    pub(crate) fn new(cache: &Cache, ty: FloatType) -> Self {
        Self {
            blocks: Vec::new(),
            width: (cache.kv_heads * cache.head_dim) as usize,
            head_dim: cache.head_dim as usize,
            ty,
            len: 0,
        }
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.head_dim
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether `other` is a cache of the same shape.
    pub(crate) fn fits(&self, other: &Self) -> bool {
        (self.width, self.head_dim, self.ty) == (other.width, other.head_dim, other.ty)
    }

    /// Forgets all tokens past the first `len`.
    pub(crate) fn truncate(&mut self, len: usize) {
        if len < self.len {
            self.blocks.truncate(len.div_ceil(BLOCK));
            self.len = len;
        }
    }

    /// Appends one token's keys and values `[kv_heads * head_dim]`.
    pub(crate) fn push(&mut self, keys: &[f32], values: &[f32]) {
        if self.len.is_multiple_of(BLOCK) {
            self.blocks.push(Arc::new(Block {
                keys: Rows::new(self.ty, BLOCK * self.width),
                values: Rows::new(self.ty, BLOCK * self.width),
            }));
        }
        let block = Arc::make_mut(self.blocks.last_mut().expect("pushed above"));
        let at = self.len % BLOCK * self.width;
        block.keys.store(at, keys);
        block.values.store(at, values);
        self.len += 1;
    }

    /// One head's key of token `t`.
    pub(crate) fn key(&self, t: usize, head: usize, out: &mut [f32]) {
        let at = t % BLOCK * self.width + head * self.head_dim;
        self.blocks[t / BLOCK].keys.load(at, out);
    }

    /// One head's value of token `t`.
    pub(crate) fn value(&self, t: usize, head: usize, out: &mut [f32]) {
        let at = t % BLOCK * self.width + head * self.head_dim;
        self.blocks[t / BLOCK].values.load(at, out);
    }
}
