//! The gated delta rule, one head a task.

use ork_formats::model::State;
use ork_kernels::{delta_step, sigmoid, unit};
use rayon::prelude::*;

/// The numbers of one op.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) state: State,
    pub(crate) key_heads: usize,
    /// Factor on the queries.
    pub(crate) scale: f32,
    /// Added to the squared length of queries and keys.
    pub(crate) eps: f32,
}

/// What a row of each head decides with, `[rows, heads]`.
#[derive(Clone, Copy)]
pub(crate) struct Gates<'a> {
    pub(crate) a: &'a [f32],
    pub(crate) b: &'a [f32],
    /// `[heads]`
    pub(crate) a_log: &'a [f32],
    /// `[heads]`
    pub(crate) dt_bias: &'a [f32],
}

/// `qkv`: `[rows, 2 * key_heads * key_dim + heads * value_dim]`, `out`: `[rows, heads * value_dim]`. Each
/// head is one task with a fixed order inside, so neither thread counts nor chunks show.
pub(crate) fn delta(state: &mut [f32], qkv: &[f32], g: Gates<'_>, shape: Shape, out: &mut [f32]) {
    let (heads, dv, dk) = (
        shape.state.heads as usize,
        shape.state.rows as usize,
        shape.state.width as usize,
    );
    let keys = shape.key_heads * dk;
    let width = 2 * keys + heads * dv;
    let by_head: Vec<Vec<f32>> = state
        .par_chunks_exact_mut(dv * dk)
        .enumerate()
        .map(|(head, state)| {
            let at = head / (heads / shape.key_heads) * dk;
            let (mut q, mut k) = (vec![0.0; dk], vec![0.0; dk]);
            let mut result = vec![0.0; qkv.len() / width * dv];
            let rows = qkv.chunks_exact(width).zip(result.chunks_exact_mut(dv));
            for (t, (row, out)) in rows.enumerate() {
                unit(&row[at..][..dk], shape.scale, shape.eps, &mut q);
                unit(&row[keys + at..][..dk], 1.0, shape.eps, &mut k);
                let v = &row[2 * keys + head * dv..][..dv];
                let decay = decay(g.a[t * heads + head] + g.dt_bias[head], g.a_log[head]);
                let step = sigmoid(g.b[t * heads + head]);
                delta_step(state, (&q, &k, v), (decay, step), out);
            }
            result
        })
        .collect();
    for (head, result) in by_head.iter().enumerate() {
        for (row, part) in out
            .chunks_exact_mut(heads * dv)
            .zip(result.chunks_exact(dv))
        {
            row[head * dv..][..dv].copy_from_slice(part);
        }
    }
}

/// `exp(-exp(a_log) * softplus(x))`, from f64 so that every ISA agrees.
fn decay(x: f32, a_log: f32) -> f32 {
    let x = f64::from(x);
    let softplus = x.max(0.0) + libm::log1p(libm::exp(-x.abs()));
    libm::exp(-libm::exp(f64::from(a_log)) * softplus) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_split_of_the_sequence_gives_the_same_bits() {
        let shape = Shape {
            state: State {
                heads: 4,
                rows: 3,
                width: 5,
            },
            key_heads: 2,
            scale: 0.4,
            eps: 1e-6,
        };
        let noise = |i: usize| ((i * 7919 % 997) as f32) / 500.0 - 1.0;
        let rows = 9;
        let values =
            |n: usize, seed: usize| -> Vec<f32> { (0..n).map(|i| noise(i + seed)).collect() };
        let (qkv, a, b) = (
            values(rows * 32, 0),
            values(rows * 4, 5),
            values(rows * 4, 99),
        );
        let (a_log, dt_bias) = (values(4, 17), values(4, 23));
        let run = |split: usize| {
            let mut state = vec![0.0; 60];
            let mut out = vec![0.0; rows * 12];
            for (from, to) in [(0, split), (split, rows)] {
                let gates = Gates {
                    a: &a[from * 4..to * 4],
                    b: &b[from * 4..to * 4],
                    a_log: &a_log,
                    dt_bias: &dt_bias,
                };
                let out = &mut out[from * 12..to * 12];
                delta(&mut state, &qkv[from * 32..to * 32], gates, shape, out);
            }
            (out, state)
        };
        let whole = run(rows);
        assert!(whole.0.iter().all(|v| v.is_finite()));
        for split in 0..rows {
            assert_eq!(run(split), whole, "split at {split}");
        }
        // At position 0 the state is beta v k^T, so the result is beta (k q) v.
        let head = 3;
        let length = |x: &[f32]| (x.iter().map(|v| v * v).sum::<f32>() + 1e-6).sqrt();
        let (q, k) = (&qkv[5..10], &qkv[15..20]);
        let dot: f32 = q.iter().zip(k).map(|(q, k)| q * k).sum();
        let beta = 1.0 / (1.0 + (-b[head]).exp());
        for i in 0..3 {
            let want = beta * qkv[20 + head * 3 + i] * dot * 0.4 / length(q) / length(k);
            assert!((whole.0[head * 3 + i] - want).abs() < 1e-6);
        }
    }

    #[test]
    fn decay_does_not_overflow() {
        assert_eq!(decay(-200.0, 1.0), 1.0);
        assert_eq!(decay(1e30, 1.0), 0.0);
        assert!((decay(0.0, 0.0) - 0.5).abs() < 1e-7);
    }
}
