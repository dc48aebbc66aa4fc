//! Routed experts: routing, and each expert over the rows that chose it.

use super::activation::glu;
use super::linear::{self, Matrix};
use ork_formats::model::{Activation, Tensor, Tiles};
use ork_kernels as kernels;
use rayon::prelude::*;

/// Rows and columns of a native weight tile.
const TILE: usize = 32;

/// The numbers of one op.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) experts: usize,
    pub(crate) top: usize,
    pub(crate) renormalise: bool,
    pub(crate) act: Activation,
}

/// Which weights of the experts are used.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weights {
    /// The int8 tiles, where the pack has them.
    Batch,
    /// The host form.
    Host,
}

/// One expert's matrices, as stacks.
#[derive(Clone, Copy)]
pub(crate) struct Stacks<'a> {
    pub(crate) gate: &'a Tensor,
    pub(crate) up: &'a Tensor,
    pub(crate) down: &'a Tensor,
}

/// `x`, `out`: `[rows, width]`; `router`: `[rows, experts]`. A row's sum runs over its experts from the
/// likeliest on, whatever else is in the chunk.
pub(crate) fn experts(
    host: &[u8],
    stacks: Stacks<'_>,
    weights: Weights,
    (x, router): (&[f32], &[f32]),
    shape: Shape,
    out: &mut [f32],
) {
    let width = stacks.gate.k as usize;
    let chosen: Vec<Choice> = router
        .chunks_exact(shape.experts)
        .flat_map(|logits| route(logits, shape))
        .collect();
    // For each expert the rows that chose it, and for each choice its place in that list.
    let mut rows: Vec<Vec<usize>> = vec![Vec::new(); shape.experts];
    let places: Vec<usize> = chosen
        .iter()
        .enumerate()
        .map(|(i, choice)| {
            let list = &mut rows[choice.expert];
            list.push(i / shape.top);
            list.len() - 1
        })
        .collect();
    let quantised = match (weights, stacks.gate.batch) {
        (Weights::Batch, Some(_)) => Some(Rows::quantise(x, width)),
        _ => None,
    };
    let results: Vec<Vec<f32>> = rows
        .par_iter()
        .enumerate()
        .map(|(expert, rows)| match &quantised {
            _ if rows.is_empty() => Vec::new(),
            Some(all) => batched(host, stacks, expert, &all.pick(rows), shape.act),
            None => {
                let picked: Vec<f32> = rows
                    .iter()
                    .flat_map(|row| &x[row * width..][..width])
                    .copied()
                    .collect();
                plain(host, stacks, expert, &picked, shape.act)
            }
        })
        .collect();
    out.par_chunks_exact_mut(width)
        .enumerate()
        .for_each(|(row, out)| {
            out.fill(0.0);
            for i in row * shape.top..(row + 1) * shape.top {
                let Choice { expert, weight } = chosen[i];
                let result = &results[expert][places[i] * width..][..width];
                for (out, y) in out.iter_mut().zip(result) {
                    *out += weight * y;
                }
            }
        });
}

/// One expert of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    expert: usize,
    weight: f32,
}

/// The `top` likeliest experts, likeliest first, the lower index first where two are equal.
fn route(logits: &[f32], shape: Shape) -> Vec<Choice> {
    let mut p = logits.to_vec();
    kernels::softmax(&mut p);
    let mut chosen: Vec<Choice> = Vec::with_capacity(shape.top);
    for _ in 0..shape.top {
        let free = (0..p.len()).filter(|e| chosen.iter().all(|c| c.expert != *e));
        // Not-a-numbers compare as nothing, so even then an expert is found: `top` is at most all.
        let best = free.reduce(|best, e| if p[best] < p[e] { e } else { best });
        let expert = best.expect("the proofs bound the experts of a row");
        chosen.push(Choice {
            expert,
            weight: p[expert],
        });
    }
    if shape.renormalise {
        let sum = chosen.iter().fold(0.0, |sum, c| sum + c.weight);
        chosen.iter_mut().for_each(|c| c.weight /= sum);
    }
    chosen
}

/// One expert over `x` `[rows, width]` with its host form.
fn plain(host: &[u8], s: Stacks<'_>, expert: usize, x: &[f32], act: Activation) -> Vec<f32> {
    let rows = x.len() / s.gate.k as usize;
    let inner = s.gate.n as usize;
    let project = |tensor: &Tensor, x: &[f32]| {
        let mut out = vec![0.0; rows * tensor.n as usize];
        Matrix::of(host, tensor, expert).times(x, &mut out);
        out
    };
    let (gate, up) = (project(s.gate, x), project(s.up, x));
    let mut hidden = vec![0.0; rows * inner];
    glu(act, &gate, &up, &mut hidden);
    project(s.down, &hidden)
}

/// int8 rows `[rows, padded k]` with one scale each.
struct Rows {
    codes: Vec<i8>,
    scales: Vec<f32>,
    padded: usize,
}

impl Rows {
    fn quantise(x: &[f32], k: usize) -> Self {
        let padded = k.next_multiple_of(TILE);
        let mut codes = vec![0; x.len() / k * padded];
        let scales = codes
            .par_chunks_exact_mut(padded)
            .zip(x.par_chunks_exact(k))
            .map(|(q, x)| kernels::quantize_row(x, q))
            .collect();
        Self {
            codes,
            scales,
            padded,
        }
    }

    fn pick(&self, rows: &[usize]) -> Self {
        let line = |row: &usize| &self.codes[row * self.padded..][..self.padded];
        Self {
            codes: rows.iter().flat_map(line).copied().collect(),
            scales: rows.iter().map(|row| self.scales[*row]).collect(),
            padded: self.padded,
        }
    }
}

/// One expert over quantised rows with its int8 tiles.
fn batched(host: &[u8], s: Stacks<'_>, expert: usize, x: &Rows, act: Activation) -> Vec<f32> {
    let inner = s.gate.n as usize;
    let (gate, up) = (tiles(host, s.gate, expert, x), tiles(host, s.up, expert, x));
    let mut hidden = vec![0.0; x.scales.len() * inner];
    glu(act, &gate, &up, &mut hidden);
    tiles(host, s.down, expert, &Rows::quantise(&hidden, inner))
}

/// `[rows, n]`, scaled as every W8A8 result: (acc as f32 * s[row]) * b[n].
fn tiles(host: &[u8], tensor: &Tensor, expert: usize, x: &Rows) -> Vec<f32> {
    let Some(Tiles { at, scales }) = tensor.batch else {
        // The proofs give all three matrices the same forms.
        return vec![0.0; x.scales.len() * tensor.n as usize];
    };
    let n = tensor.n as usize;
    let padded_n = n.next_multiple_of(TILE);
    let len = padded_n * x.padded;
    let weights = &linear::bytes(host, at)[expert * len..][..len];
    let b: Vec<f32> = linear::bytes(host, scales)[expert * padded_n * 4..][..n * 4]
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")))
        .collect();
    let rows = x.scales.len();
    let mut acc = vec![0; rows * padded_n];
    kernels::gemm_i8_tiles(&x.codes, rows, x.padded, weights, padded_n, &mut acc);
    let mut out = vec![0.0; rows * n];
    for ((acc, out), s) in acc
        .chunks_exact(padded_n)
        .zip(out.chunks_exact_mut(n))
        .zip(&x.scales)
    {
        kernels::dequantize_row(&acc[..n], *s, &b, out);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routing_prefers_the_lower_index_and_renormalises() {
        let shape = |top, renormalise| Shape {
            experts: 4,
            top,
            renormalise,
            act: Activation::Silu,
        };
        let logits = [1.0, 3.0, 1.0, 3.0];
        let experts = |c: Vec<Choice>| c.iter().map(|c| c.expert).collect::<Vec<_>>();
        assert_eq!(experts(route(&logits, shape(3, false))), [1, 3, 0]);
        let halves = route(&logits, shape(2, true));
        assert!(halves.iter().all(|c| c.weight == 0.5));
        let all = route(&logits, shape(4, false));
        assert!((all.iter().map(|c| c.weight).sum::<f32>() - 1.0).abs() < 1e-6);
        assert_eq!(experts(route(&[f32::NAN; 4], shape(2, false))), [0, 1]);
    }
}
