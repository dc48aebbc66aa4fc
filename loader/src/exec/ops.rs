//! The ops that the CPU does in both phases, each over the rows of one lane.

use super::npu::Engine;
use super::{Memory, Phase};
use crate::cpu::activation::glu;
use crate::cpu::attention::{self, Shape};
use crate::cpu::{conv, delta, experts, linear};
use crate::map::Pack;
use ork_formats::model::{Manifest, Op, Rope, Slot, TensorId};
use ork_kernels as kernels;
use rayon::prelude::*;
use std::ops::Range;
use std::time::Instant;

/// cos and sin of one position.
type Angles = (Vec<f32>, Vec<f32>);

/// What is the same for every op of a chunk.
pub(super) struct Context<'a> {
    pub(super) pack: &'a Pack,
    pub(super) manifest: &'a Manifest,
    pub(super) phase: Phase,
    ids: &'a [u32],
    /// Of every row, for every rotary table.
    angles: Vec<Vec<Angles>>,
}

impl<'a> Context<'a> {
    pub(super) fn new(pack: &'a Pack, ids: &'a [u32], position: usize, phase: Phase) -> Self {
        let manifest = pack.reader().manifest();
        let of_rows = |rope| (0..ids.len()).map(|r| angles(rope, position + r)).collect();
        Self {
            pack,
            manifest,
            phase,
            ids,
            angles: manifest.model.ropes.iter().map(of_rows).collect(),
        }
    }

    fn width(&self, slot: Slot) -> usize {
        self.manifest.model.slots[slot as usize] as usize
    }

    /// Elements of a slot that belong to `rows`.
    pub(super) fn span(&self, slot: Slot, rows: &Range<usize>) -> Range<usize> {
        let width = self.width(slot);
        rows.start * width..rows.end * width
    }

    fn vector(&self, tensor: TensorId) -> Vec<f32> {
        linear::vector(self.pack.host(), &self.manifest.tensors[tensor as usize])
    }

    /// Adds a bias `[n]` to every row.
    pub(super) fn add_bias(&self, bias: TensorId, rows: &mut [f32]) {
        let bias = self.vector(bias);
        for row in rows.chunks_exact_mut(bias.len()) {
            row.iter_mut().zip(&bias).for_each(|(v, b)| *v += b);
        }
    }
}

/// cos and sin of one position, from f64 so that every ISA agrees.
fn angles(rope: &Rope, position: usize) -> Angles {
    rope.inv_freq
        .iter()
        .map(|f| {
            let angle = position as f64 * f64::from(*f);
            let magnitude = f64::from(rope.magnitude);
            (
                (libm::cos(angle) * magnitude) as f32,
                (libm::sin(angle) * magnitude) as f32,
            )
        })
        .unzip()
}

/// Elements that are worth another thread.
const GRAIN: usize = 1 << 13;

/// Applies one op to `rows`.
pub(super) fn apply(
    context: &Context<'_>,
    engine: &mut Engine,
    (state, slots): Memory<'_>,
    op: &Op,
    rows: &Range<usize>,
) {
    let began = Instant::now();
    let slots = &mut slots.0;
    let span = |slot| context.span(slot, rows);
    match *op {
        Op::Embed { table, out, scale } => {
            let table = &context.manifest.tensors[table as usize];
            let target = &mut slots[out as usize][span(out)];
            let width = context.width(out);
            for (id, row) in context.ids[rows.clone()]
                .iter()
                .zip(target.chunks_exact_mut(width))
            {
                linear::row(context.pack.host(), table, *id as usize, row);
                row.iter_mut().for_each(|v| *v *= scale);
            }
        }
        Op::RmsNorm {
            x,
            weight,
            out,
            eps,
        } => {
            let w = context.vector(weight);
            let mut target = std::mem::take(&mut slots[out as usize]);
            let copy;
            let source = match x == out {
                true => {
                    copy = target[span(x)].to_vec();
                    &copy[..]
                }
                false => &slots[x as usize][span(x)],
            };
            source
                .par_chunks_exact(w.len())
                .zip(target[span(out)].par_chunks_exact_mut(w.len()))
                .with_min_len((GRAIN / w.len()).max(1))
                .for_each(|(x, out)| kernels::rms_norm(x, &w, eps, out));
            slots[out as usize] = target;
        }
        Op::Linear {
            x,
            weight,
            bias,
            out,
        } => {
            let tensor = &context.manifest.tensors[weight as usize];
            let mut target = std::mem::take(&mut slots[out as usize]);
            let result = &mut target[span(out)];
            let source = &slots[x as usize][span(x)];
            linear::matmul(context.pack.host(), tensor, source, result);
            if let Some(bias) = bias {
                context.add_bias(bias, result);
            }
            slots[out as usize] = target;
        }
        Op::Rope {
            x,
            heads,
            head_dim,
            rope,
        } => {
            let table = &context.manifest.model.ropes[rope as usize];
            let angles = &context.angles[rope as usize][rows.clone()];
            let target = &mut slots[x as usize][span(x)];
            let row_width = (heads * head_dim) as usize;
            for (row, (cos, sin)) in target.chunks_exact_mut(row_width).zip(angles) {
                for head in row.chunks_exact_mut(head_dim as usize) {
                    kernels::rope(head, cos, sin, table.interleaved);
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
            let kv = &mut state.caches[cache as usize];
            let width = context.width(k);
            let keys = slots[k as usize][span(k)].chunks_exact(width);
            for (key, value) in keys.zip(slots[v as usize][span(v)].chunks_exact(width)) {
                kv.push(key, value);
            }
            let shape = Shape {
                heads: heads as usize,
                kv_heads: context.manifest.model.caches[cache as usize].kv_heads as usize,
                scale,
                window: window as usize,
            };
            let mut target = std::mem::take(&mut slots[out as usize]);
            let queries = &slots[q as usize][span(q)];
            attention::attention(kv, queries, rows.len(), shape, &mut target[span(out)]);
            slots[out as usize] = target;
            engine.times.attention += began.elapsed();
            return;
        }
        Op::Glu { gate, up, out, act } => {
            let mut target = std::mem::take(&mut slots[out as usize]);
            let copy = match out == gate || out == up {
                true => target[span(out)].to_vec(),
                false => Vec::new(),
            };
            let source = |slot: Slot| match slot == out {
                true => &copy[..],
                false => &slots[slot as usize][span(slot)],
            };
            source(gate)
                .par_chunks(GRAIN)
                .zip(source(up).par_chunks(GRAIN))
                .zip(target[span(out)].par_chunks_mut(GRAIN))
                .for_each(|((gate, up), out)| glu(act, gate, up, out));
            slots[out as usize] = target;
        }
        Op::Scale { x, scale } => {
            let target = &mut slots[x as usize][span(x)];
            target.iter_mut().for_each(|v| *v *= scale);
        }
        Op::Add { x, out, scale } => {
            let mut target = std::mem::take(&mut slots[out as usize]);
            let sum = &mut target[span(out)];
            for (out, x) in sum.iter_mut().zip(&slots[x as usize][span(x)]) {
                *out += x * scale;
            }
            slots[out as usize] = target;
        }
        Op::AddGated { x, gate, out } => {
            let mut target = std::mem::take(&mut slots[out as usize]);
            let lines = target[span(out)].chunks_exact_mut(context.width(out));
            let addends = slots[x as usize][span(x)].chunks_exact(context.width(x));
            let gates = &slots[gate as usize][span(gate)];
            for ((out, x), gate) in lines.zip(addends).zip(gates) {
                kernels::add_gated(*gate, x, out);
            }
            slots[out as usize] = target;
        }
        Op::Conv {
            x,
            weight,
            out,
            state: id,
        } => {
            let weight = context.vector(weight);
            let mut target = std::mem::take(&mut slots[out as usize]);
            let past = &mut state.recurrent[id as usize];
            let source = &slots[x as usize][span(x)];
            conv::conv(
                past,
                &weight,
                context.width(x),
                source,
                &mut target[span(out)],
            );
            slots[out as usize] = target;
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
            state: id,
        } => {
            let shape = delta::Shape {
                state: context.manifest.model.states[id as usize],
                key_heads: key_heads as usize,
                scale,
                eps,
            };
            let mut target = std::mem::take(&mut slots[out as usize]);
            let gates = delta::Gates {
                a: &slots[a as usize][span(a)],
                b: &slots[b as usize][span(b)],
                a_log: &context.vector(a_log),
                dt_bias: &context.vector(dt_bias),
            };
            let past = &mut state.recurrent[id as usize];
            let source = &slots[qkv as usize][span(qkv)];
            delta::delta(past, source, gates, shape, &mut target[span(out)]);
            slots[out as usize] = target;
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
            let shape = experts::Shape {
                experts: context.width(router),
                top: top as usize,
                renormalise,
                act,
            };
            let tensor = |id: TensorId| &context.manifest.tensors[id as usize];
            let stacks = experts::Stacks {
                gate: tensor(gate),
                up: tensor(up),
                down: tensor(down),
            };
            let weights = match context.phase {
                Phase::Prefill => experts::Weights::Batch,
                Phase::Decode => experts::Weights::Host,
            };
            let mut target = std::mem::take(&mut slots[out as usize]);
            let sources = (
                &slots[x as usize][span(x)],
                &slots[router as usize][span(router)],
            );
            let host = context.pack.host();
            experts::experts(
                host,
                stacks,
                weights,
                sources,
                shape,
                &mut target[span(out)],
            );
            slots[out as usize] = target;
        }
    }
    engine.times.other += began.elapsed();
}
