//! The oracle: a naive float32 forward pass. Slow, short and obvious; none of the kernels.

mod mixers;

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::graph::Graph;
use mixers::{Delta, Routing, activate, sigmoid};
use ndarray::{Array2, ArrayView2};
use ork_formats::model::{Op, Rope};

/// A model with its weights widened to f32.
pub struct Reference<'a> {
    graph: &'a Graph,
    weights: Vec<Vec<f32>>,
}

impl<'a> Reference<'a> {
    /// Reads every tensor of the graph.
    ///
    /// # Errors
    /// [`Error::Input`] for a missing or non-finite tensor.
    pub fn new(checkpoint: &Checkpoint, graph: &'a Graph) -> Result<Self> {
        let weights = graph.tensors.iter().map(|t| t.read_f32(checkpoint));
        Ok(Self {
            graph,
            weights: weights.collect::<Result<_>>()?,
        })
    }

    /// Logits `[tokens, vocab]` of a whole sequence from position 0.
    ///
    /// # Errors
    /// [`Error::Usage`] for no ids or an id outside the vocabulary.
    pub fn forward(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let model = &self.graph.model;
        if ids.is_empty() {
            return Err(Error::Usage("no token ids".into()));
        }
        if let Some(id) = ids.iter().find(|id| model.vocab <= **id) {
            return Err(Error::Usage(format!(
                "token id {id}: the vocabulary has {}",
                model.vocab
            )));
        }
        let mut slots: Vec<Array2<f32>> = model
            .slots
            .iter()
            .map(|w| Array2::zeros((ids.len(), *w as usize)))
            .collect();
        for op in &model.ops {
            self.op(op, ids, &mut slots);
        }
        let logits = slots[model.hidden as usize].dot(&self.matrix(model.head).t());
        Ok(logits.into_iter().collect())
    }

    /// Greedy continuation of `n` ids, recomputed from scratch for each.
    ///
    /// # Errors
    /// As [`Reference::forward`].
    pub fn greedy(&self, prompt: &[u32], n: usize) -> Result<Vec<u32>> {
        let mut ids = prompt.to_vec();
        for _ in 0..n {
            let logits = self.forward(&ids)?;
            let last = &logits[logits.len() - self.graph.model.vocab as usize..];
            let best =
                (0..last.len()).fold(0, |best, i| if last[best] < last[i] { i } else { best });
            ids.push(best as u32);
        }
        Ok(ids.split_off(prompt.len()))
    }

    fn matrix(&self, id: u32) -> ArrayView2<'_, f32> {
        let t = &self.graph.tensors[id as usize];
        let rows = t.stack as usize * t.n as usize;
        ArrayView2::from_shape((rows, t.k as usize), &self.weights[id as usize])
            .expect("graph::build checked the shape")
    }

    fn op(&self, op: &Op, ids: &[u32], slots: &mut [Array2<f32>]) {
        match *op {
            Op::Embed { table, out, scale } => {
                for (i, id) in ids.iter().enumerate() {
                    let row = &self.matrix(table).row(*id as usize) * scale;
                    slots[out as usize].row_mut(i).assign(&row);
                }
            }
            Op::RmsNorm {
                x,
                weight,
                out,
                eps,
            } => {
                let w = &self.weights[weight as usize];
                let mut y = slots[x as usize].clone();
                for group in y.as_slice_mut().expect("row-major").chunks_mut(w.len()) {
                    let mean = group.iter().map(|v| v * v).sum::<f32>() / w.len() as f32;
                    for (v, w) in group.iter_mut().zip(w) {
                        *v = *v / (mean + eps).sqrt() * w;
                    }
                }
                slots[out as usize] = y;
            }
            Op::Linear {
                x,
                weight,
                bias,
                out,
            } => {
                let mut y = slots[x as usize].dot(&self.matrix(weight).t());
                if let Some(bias) = bias {
                    for mut row in y.rows_mut() {
                        for (v, b) in row.iter_mut().zip(&self.weights[bias as usize]) {
                            *v += b;
                        }
                    }
                }
                slots[out as usize] = y;
            }
            Op::Rope {
                x,
                heads,
                head_dim,
                rope,
            } => {
                let table = &self.graph.model.ropes[rope as usize];
                let (heads, dim) = (heads as usize, head_dim as usize);
                for position in 0..ids.len() {
                    let mut row = slots[x as usize].row_mut(position);
                    let row = row.as_slice_mut().expect("row-major");
                    for head in row.chunks_mut(dim).take(heads) {
                        rotate(head, table, position);
                    }
                }
            }
            Op::Attention {
                q,
                k,
                v,
                out,
                heads,
                scale,
                window,
                cache,
            } => {
                let kv_heads = self.graph.model.caches[cache as usize].kv_heads;
                let shape = (heads as usize, kv_heads as usize, scale, window as usize);
                slots[out as usize] = attend(
                    &slots[q as usize],
                    &slots[k as usize],
                    &slots[v as usize],
                    shape,
                );
            }
            Op::Glu { gate, up, out, act } => {
                let gate = slots[gate as usize].mapv(|x| activate(act, x));
                slots[out as usize] = gate * &slots[up as usize];
            }
            Op::Scale { x, scale } => slots[x as usize] *= scale,
            Op::Add { x, out, scale } => {
                let sum = &slots[out as usize] + &(&slots[x as usize] * scale);
                slots[out as usize] = sum;
            }
            Op::AddGated { x, gate, out } => {
                let gate = slots[gate as usize].mapv(sigmoid);
                let sum = &slots[out as usize] + &(&slots[x as usize] * &gate);
                slots[out as usize] = sum;
            }
            Op::Conv { x, weight, out, .. } => {
                slots[out as usize] = mixers::conv(&slots[x as usize], self.matrix(weight));
            }
            Op::Delta {
                qkv,
                a,
                b,
                a_log,
                dt_bias,
                out,
                key_heads,
                scale,
                eps,
                state,
            } => {
                let delta = Delta {
                    a: &slots[a as usize],
                    b: &slots[b as usize],
                    a_log: &self.weights[a_log as usize],
                    dt_bias: &self.weights[dt_bias as usize],
                    key_heads: key_heads as usize,
                    scale,
                    eps,
                };
                let shape = self.graph.model.states[state as usize];
                slots[out as usize] = mixers::delta(&slots[qkv as usize], shape, &delta);
            }
            Op::Moe {
                x,
                router,
                gate,
                up,
                down,
                out,
                top,
                renormalise,
                act,
            } => {
                let routing = Routing {
                    top: top as usize,
                    renormalise,
                    act,
                };
                let weights = [gate, up, down].map(|id| self.matrix(id));
                let (x, router) = (&slots[x as usize], &slots[router as usize]);
                slots[out as usize] = mixers::experts(x, router, weights, &routing);
            }
        }
    }
}

/// Logits `[ids.len(), vocab]` of one sequence; keep a [`Reference`] to run several.
///
/// # Errors
/// As [`Reference::new`] and [`Reference::forward`].
pub fn forward(checkpoint: &Checkpoint, graph: &Graph, ids: &[u32]) -> Result<Vec<f32>> {
    Reference::new(checkpoint, graph)?.forward(ids)
}

/// The `n` ids that follow greedily; keep a [`Reference`] to run several.
///
/// # Errors
/// As [`Reference::new`] and [`Reference::forward`].
pub fn greedy(checkpoint: &Checkpoint, graph: &Graph, ids: &[u32], n: usize) -> Result<Vec<u32>> {
    Reference::new(checkpoint, graph)?.greedy(ids, n)
}

fn rotate(head: &mut [f32], rope: &Rope, position: usize) {
    let n = rope.inv_freq.len();
    for (i, f) in rope.inv_freq.iter().enumerate() {
        let (a, b) = if rope.interleaved {
            (2 * i, 2 * i + 1)
        } else {
            (i, i + n)
        };
        let (s, c) = (position as f64 * f64::from(*f)).sin_cos();
        let (s, c) = (s as f32 * rope.magnitude, c as f32 * rope.magnitude);
        (head[a], head[b]) = (head[a] * c - head[b] * s, head[a] * s + head[b] * c);
    }
}

/// `(heads, kv heads, scale, window)`; window 0 is unlimited.
fn attend(
    q: &Array2<f32>,
    k: &Array2<f32>,
    v: &Array2<f32>,
    (heads, kv_heads, scale, window): (usize, usize, f32, usize),
) -> Array2<f32> {
    let dim = q.ncols() / heads;
    let mut out = Array2::zeros(q.raw_dim());
    for head in 0..heads {
        let kv = head / (heads / kv_heads);
        for i in 0..q.nrows() {
            let start = if window == 0 {
                0
            } else {
                (i + 1).saturating_sub(window)
            };
            let score = |t: usize| -> f32 {
                let dot: f32 = (0..dim)
                    .map(|d| q[[i, head * dim + d]] * k[[t, kv * dim + d]])
                    .sum();
                dot * scale
            };
            let scores: Vec<f32> = (start..=i).map(score).collect();
            let top = scores.iter().copied().fold(f32::MIN, f32::max);
            let weights: Vec<f32> = scores.iter().map(|s| (s - top).exp()).collect();
            let sum: f32 = weights.iter().sum();
            for d in 0..dim {
                let mixed: f32 = (start..=i)
                    .zip(&weights)
                    .map(|(t, w)| w * v[[t, kv * dim + d]])
                    .sum();
                out[[i, head * dim + d]] = mixed / sum;
            }
        }
    }
    out
}
