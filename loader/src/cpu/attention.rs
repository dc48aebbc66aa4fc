//! Causal grouped-query attention over the KV cache.

use super::kv::Kv;
use ork_kernels::{dot_f32, softmax};
use rayon::prelude::*;

/// The numbers of one attention op.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) scale: f32,
    /// 0 is unlimited.
    pub(crate) window: usize,
}

/// `q`, `out`: `[rows, heads * head_dim]`; the rows are the last ones in the cache. Each head is one
/// task with a fixed order inside, so thread counts do not show.
pub(crate) fn attention(kv: &Kv, q: &[f32], rows: usize, shape: Shape, out: &mut [f32]) {
    let dim = kv.head_dim();
    let width = shape.heads * dim;
    let group = shape.heads / shape.kv_heads;
    let first = kv.len() - rows;
    let by_head: Vec<Vec<f32>> = (0..shape.kv_heads)
        .into_par_iter()
        .map(|kv_head| {
            // Widened once per KV head, used by every row and query head of the group.
            let mut keys = vec![0.0; kv.len() * dim];
            let mut values = vec![0.0; kv.len() * dim];
            for t in 0..kv.len() {
                kv.key(t, kv_head, &mut keys[t * dim..][..dim]);
                kv.value(t, kv_head, &mut values[t * dim..][..dim]);
            }
            let mut result = vec![0.0; rows * group * dim];
            let mut scores = Vec::new();
            for (i, sum) in result.chunks_exact_mut(dim).enumerate() {
                let (row, head) = (i / group, kv_head * group + i % group);
                let end = first + row + 1;
                let start = match shape.window {
                    0 => 0,
                    w => end.saturating_sub(w),
                };
                let query = &q[row * width + head * dim..][..dim];
                scores.clear();
                scores.extend(
                    keys[start * dim..end * dim]
                        .chunks_exact(dim)
                        .map(|key| dot_f32(query, key) * shape.scale),
                );
                softmax(&mut scores);
                for (p, value) in scores.iter().zip(values[start * dim..].chunks_exact(dim)) {
                    for (sum, v) in sum.iter_mut().zip(value) {
                        *sum += p * v;
                    }
                }
            }
            result
        })
        .collect();
    for (kv_head, result) in by_head.iter().enumerate() {
        for (i, part) in result.chunks_exact(dim).enumerate() {
            let (row, head) = (i / group, kv_head * group + i % group);
            out[row * width + head * dim..][..dim].copy_from_slice(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ork_formats::model::{Cache, FloatType};

    #[test]
    fn equals_a_naive_loop_with_groups_and_window() {
        let (heads, kv_heads, dim, rows) = (4, 2, 8, 20);
        let noise = |i: usize| ((i * 7919 % 997) as f32) / 500.0 - 1.0;
        let q: Vec<f32> = (0..rows * heads * dim).map(noise).collect();
        let k: Vec<f32> = (0..rows * kv_heads * dim).map(|i| noise(i + 3)).collect();
        let v: Vec<f32> = (0..rows * kv_heads * dim).map(|i| noise(i + 11)).collect();
        let cache = Cache {
            kv_heads: 2,
            head_dim: 8,
        };
        let mut kv = Kv::new(&cache, FloatType::F32);
        for t in 0..rows {
            let at = t * kv_heads * dim..(t + 1) * kv_heads * dim;
            kv.push(&k[at.clone()], &v[at]);
        }
        for window in [0, 3] {
            let shape = Shape {
                heads,
                kv_heads,
                scale: 0.5,
                window,
            };
            let mut out = vec![0.0; q.len()];
            attention(&kv, &q, rows, shape, &mut out);
            for row in 0..rows {
                for head in 0..heads {
                    let start = if window == 0 {
                        0
                    } else {
                        (row + 1).saturating_sub(window)
                    };
                    let at = |t: usize| (t * kv_heads + head / 2) * dim;
                    let weights: Vec<f64> = (start..=row)
                        .map(|t| {
                            let dot: f32 = (0..dim)
                                .map(|j| q[(row * heads + head) * dim + j] * k[at(t) + j])
                                .sum();
                            f64::from(dot * 0.5).exp()
                        })
                        .collect();
                    let sum: f64 = weights.iter().sum();
                    for j in 0..dim {
                        let want: f64 = (start..=row)
                            .zip(&weights)
                            .map(|(t, w)| w / sum * f64::from(v[at(t) + j]))
                            .sum();
                        let have = f64::from(out[(row * heads + head) * dim + j]);
                        assert!((have - want).abs() < 1e-5, "{have} {want}");
                    }
                }
            }
        }
    }
}
