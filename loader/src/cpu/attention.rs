//! Causal grouped-query attention over the cached positions.

use super::kv::Kv;
use ork_kernels::{dot_f32, softmax};
use rayon::prelude::*;

/// What an attention op fixes.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Query heads; a multiple of the cache's heads.
    pub heads: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Sliding window in positions; 0 is unlimited.
    pub window: usize,
}

impl Shape {
    /// First position that the query at `position` sees.
    fn first(&self, position: usize) -> usize {
        match self.window {
            0 => 0,
            window => (position + 1).saturating_sub(window),
        }
    }
}

/// Attends from the rows of `q` (`[rows, heads * head_dim]`, positions `start..start + rows`) to the
/// positions already written to `kv`, into `out` of the same shape.
///
/// Each (row, head) is computed by one thread in one order, so threads do not change the result.
pub fn attend(kv: &Kv, shape: Shape, start: usize, q: &[f32], out: &mut [f32]) {
    let cache = kv.shape();
    let dim = cache.head_dim as usize;
    let group = shape.heads / cache.kv_heads as usize;
    let rows = q.len() / (shape.heads * dim);
    if rows == 0 {
        return;
    }
    let from = shape.first(start);
    let span = start + rows - from;
    // Unpacked once per call rather than once per row and query head.
    let unpack = |read: &(dyn Fn(usize, usize, &mut [f32]) + Sync)| {
        let mut all = vec![0.0; cache.kv_heads as usize * span * dim];
        all.par_chunks_mut(dim)
            .enumerate()
            .with_min_len(64)
            .for_each(|(i, out)| read(from + i % span, i / span, out));
        all
    };
    let keys = unpack(&|position, head, out| kv.key(position, head, out));
    let values = unpack(&|position, head, out| kv.value(position, head, out));

    out.par_chunks_mut(dim)
        .zip(q.par_chunks(dim))
        .enumerate()
        .for_each_init(Vec::new, |scores: &mut Vec<f32>, (i, (out, q))| {
            let (row, head) = (i / shape.heads, i % shape.heads);
            let position = start + row;
            let first = (head / group * span + shape.first(position) - from) * dim;
            let last = (head / group * span + position + 1 - from) * dim;
            scores.clear();
            scores.extend(
                keys[first..last]
                    .chunks_exact(dim)
                    .map(|key| dot_f32(q, key) * shape.scale),
            );
            softmax(scores);
            out.fill(0.0);
            for (weight, value) in scores.iter().zip(values[first..last].chunks_exact(dim)) {
                for (out, value) in out.iter_mut().zip(value) {
                    *out += weight * value;
                }
            }
        });
}

#[cfg(test)]
mod tests {
    use super::*;
    use ork_formats::model::{Cache, FloatType};

    const HEADS: usize = 4;
    const KV_HEADS: usize = 2;
    const DIM: usize = 8;

    fn noise(seed: usize, len: usize) -> Vec<f32> {
        (0..len)
            .map(|i| ((i * 7919 + seed * 104_729) % 997) as f32 / 498.5 - 1.0)
            .collect()
    }

    /// The definition in f64, one loop per sum.
    fn naive(k: &[f32], v: &[f32], shape: Shape, start: usize, q: &[f32]) -> Vec<f64> {
        let mut out = Vec::new();
        for row in 0..q.len() / (HEADS * DIM) {
            for head in 0..HEADS {
                let q = &q[(row * HEADS + head) * DIM..][..DIM];
                let at = |p: usize| (p * KV_HEADS + head / (HEADS / KV_HEADS)) * DIM;
                let pos = start + row;
                let seen: Vec<usize> = (0..=pos)
                    .filter(|p| shape.window == 0 || pos - p < shape.window)
                    .collect();
                let weight: Vec<f64> = seen
                    .iter()
                    .map(|p| {
                        let dot: f64 = (0..DIM)
                            .map(|i| f64::from(q[i]) * f64::from(k[at(*p) + i]))
                            .sum();
                        (dot * f64::from(shape.scale)).exp()
                    })
                    .collect();
                let total: f64 = weight.iter().sum();
                for i in 0..DIM {
                    let sum: f64 = seen
                        .iter()
                        .zip(&weight)
                        .map(|(p, w)| w * f64::from(v[at(*p) + i]))
                        .sum();
                    out.push(sum / total);
                }
            }
        }
        out
    }

    #[test]
    fn agrees_with_the_definition() {
        let cache = Cache {
            kv_heads: KV_HEADS as u32,
            head_dim: DIM as u32,
        };
        for (window, start, rows) in [(0, 0, 21), (0, 30, 3), (5, 0, 21), (5, 19, 4), (1, 7, 1)] {
            let total = start + rows;
            let width = KV_HEADS * DIM;
            let (k, v) = (noise(1, total * width), noise(2, total * width));
            let q = noise(3, rows * HEADS * DIM);
            let mut kv = Kv::new(cache, FloatType::F32);
            for p in 0..total {
                kv.write(p, &k[p * width..][..width], &v[p * width..][..width]);
            }
            let shape = Shape {
                heads: HEADS,
                scale: 0.7,
                window,
            };
            let mut out = vec![9.0; q.len()];
            attend(&kv, shape, start, &q, &mut out);
            for (got, want) in out.iter().zip(naive(&k, &v, shape, start, &q)) {
                assert!((f64::from(*got) - want).abs() < 1e-5, "{got} against {want}");
            }
        }
    }
}
