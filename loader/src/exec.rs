//! Walks the op list over one chunk of rows.

use crate::cpu::attention::{self, Shape};
use crate::cpu::kv::Kv;
use crate::cpu::linear;
use crate::device::{Device, w8a8};
use crate::error::Result;
use crate::map::Pack;
use ork_formats::model::{
    Activation, FloatType, HostForm, Manifest, NpuPlan, Op, Rope, Slot, Tensor,
};
use rayon::prelude::*;
use std::sync::Arc;

/// Which form of the weights a chunk uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// W8A8 on the device where a tensor has that form.
    Prefill,
    /// The host form everywhere.
    Decode,
}

/// Small float data of a tensor, decoded once: everything that kernels take as `&[f32]`.
#[derive(Debug, Default)]
struct Floats {
    /// The tensor itself, when it is an f32 vector.
    vector: Vec<f32>,
    /// Scales of an int8 host form, one per row.
    rows: Vec<f32>,
    /// Scales of the NPU form, one per padded output channel.
    npu: Vec<f32>,
}

impl Floats {
    fn new(pack: &Pack, tensor: &Tensor) -> Self {
        let mut this = Self::default();
        match tensor.host {
            HostForm::Float {
                ty: FloatType::F32,
                at,
            } if tensor.n == 1 => this.vector = pack.floats(at),
            HostForm::Int8 { scales, .. } => this.rows = pack.floats(scales),
            HostForm::Float { .. } | HostForm::Int4 { .. } => {}
        }
        if let Some(form) = &tensor.npu {
            this.npu = pack.floats(form.scales);
        }
        this
    }
}

/// cos and sin of one rotary embedding, `[positions][pairs]`, extended as positions are reached.
#[derive(Debug, Default)]
struct Angles {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Angles {
    fn reach(&mut self, rope: &Rope, positions: usize) {
        let pairs = rope.inv_freq.len();
        for position in self.cos.len() / pairs..positions {
            for freq in &rope.inv_freq {
                // In f64 with libm: the same bits on every machine.
                let angle = position as f64 * f64::from(*freq);
                let magnitude = f64::from(rope.magnitude);
                self.cos.push((libm::cos(angle) * magnitude) as f32);
                self.sin.push((libm::sin(angle) * magnitude) as f32);
            }
        }
    }
}

/// Activations, caches and the device of one sequence. Runs on the calling thread's rayon pool.
pub struct Engine {
    pack: Arc<Pack>,
    plan: Option<Arc<NpuPlan>>,
    device: Option<Box<dyn Device>>,
    floats: Vec<Floats>,
    angles: Vec<Angles>,
    caches: Vec<Kv>,
    slots: Vec<Vec<f32>>,
}

impl Engine {
    /// An engine with empty caches. `plan` and `device` are absent in lossless packs.
    #[must_use]
    pub fn new(
        pack: Arc<Pack>,
        plan: Option<Arc<NpuPlan>>,
        device: Option<Box<dyn Device>>,
    ) -> Self {
        let manifest = pack.reader().manifest();
        let model = &manifest.model;
        Self {
            floats: manifest.tensors.iter().map(|t| Floats::new(&pack, t)).collect(),
            angles: model.ropes.iter().map(|_| Angles::default()).collect(),
            caches: model.caches.iter().map(|c| Kv::new(*c, model.kv)).collect(),
            slots: vec![Vec::new(); model.slots.len()],
            plan,
            device,
            pack,
        }
    }

    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        self.pack.reader().manifest()
    }

    /// Empties the caches.
    pub fn reset(&mut self) {
        self.caches.iter_mut().for_each(Kv::clear);
    }

    /// Runs all ops for `ids` at positions `start..`. `ids` is at most one chunk, every id below the
    /// vocabulary size.
    ///
    /// # Errors
    /// Whatever the device reports; the caches then hold nothing that a later call would not replace.
    pub fn forward(&mut self, ids: &[u32], start: usize, phase: Phase) -> Result<()> {
        let pack = Arc::clone(&self.pack);
        let model = &pack.reader().manifest().model;
        for (slot, width) in self.slots.iter_mut().zip(&model.slots) {
            slot.resize(ids.len() * *width as usize, 0.0);
        }
        for (angles, rope) in self.angles.iter_mut().zip(&model.ropes) {
            angles.reach(rope, start + ids.len());
        }
        model
            .ops
            .iter()
            .try_for_each(|op| self.op(&pack, op, ids, start, phase))
    }

    /// Logits `[rows, vocab]` of rows `from..to` of the last chunk.
    #[must_use]
    pub fn logits(&self, from: usize, to: usize) -> Vec<f32> {
        let model = &self.manifest().model;
        let head = &self.manifest().tensors[model.head as usize];
        let width = model.slots[model.hidden as usize] as usize;
        let hidden = &self.slots[model.hidden as usize][from * width..to * width];
        let mut out = vec![0.0; (to - from) * model.vocab as usize];
        let scales = &self.floats[model.head as usize].rows;
        linear::linear(&self.pack, head, scales, hidden, &mut out);
        out
    }

    /// Calls `f` with the input slots and the output slot; an input that is also the output is
    /// copied first.
    fn apply<const N: usize, T>(
        &mut self,
        inputs: [Slot; N],
        out: Slot,
        f: impl FnOnce(&mut Self, [&[f32]; N], &mut [f32]) -> T,
    ) -> T {
        let mut buffer = std::mem::take(&mut self.slots[out as usize]);
        let taken = inputs.map(|slot| match slot == out {
            true => buffer.clone(),
            false => std::mem::take(&mut self.slots[slot as usize]),
        });
        // An input named twice was emptied by its first use.
        let views = std::array::from_fn(|i| {
            let first = inputs.iter().position(|s| *s == inputs[i]).unwrap_or(i);
            taken[first].as_slice()
        });
        let result = f(self, views, &mut buffer);
        for (i, (slot, values)) in inputs.into_iter().zip(taken).enumerate() {
            if slot != out && !inputs[..i].contains(&slot) {
                self.slots[slot as usize] = values;
            }
        }
        self.slots[out as usize] = buffer;
        result
    }

    fn op(&mut self, pack: &Pack, op: &Op, ids: &[u32], start: usize, phase: Phase) -> Result<()> {
        let manifest = pack.reader().manifest();
        let model = &manifest.model;
        match *op {
            Op::Embed { table, out, scale } => {
                let tensor = &manifest.tensors[table as usize];
                let width = tensor.k as usize;
                let rows = &self.floats[table as usize].rows;
                let out = &mut self.slots[out as usize];
                for (id, out) in ids.iter().zip(out.chunks_exact_mut(width)) {
                    linear::row(pack, tensor, rows, *id as usize, out);
                    if scale != 1.0 {
                        out.iter_mut().for_each(|v| *v *= scale);
                    }
                }
            }
            Op::RmsNorm {
                x,
                weight,
                out,
                eps,
            } => self.apply([x], out, |this, [x], out| {
                let w = &this.floats[weight as usize].vector;
                out.par_chunks_mut(w.len())
                    .zip(x.par_chunks(w.len()))
                    .with_min_len(4)
                    .for_each(|(out, x)| ork_kernels::rms_norm(x, w, eps, out));
            }),
            Op::Linear {
                x,
                weight,
                bias,
                out,
            } => {
                let tensor = &manifest.tensors[weight as usize];
                self.apply([x], out, |this, [x], out| {
                    this.linear(pack, tensor, weight as usize, x, out, phase)?;
                    if let Some(bias) = bias {
                        let bias = &this.floats[bias as usize].vector;
                        for out in out.chunks_exact_mut(bias.len()) {
                            out.iter_mut().zip(bias).for_each(|(out, b)| *out += b);
                        }
                    }
                    Ok(())
                })?;
            }
            Op::Rope {
                x,
                heads,
                head_dim,
                rope,
            } => {
                let interleaved = model.ropes[rope as usize].interleaved;
                let pairs = model.ropes[rope as usize].inv_freq.len();
                let angles = &self.angles[rope as usize];
                self.slots[x as usize]
                    .par_chunks_mut(head_dim as usize)
                    .enumerate()
                    .with_min_len(16)
                    .for_each(|(i, x)| {
                        let at = (start + i / heads as usize) * pairs;
                        let (cos, sin) = (&angles.cos[at..at + pairs], &angles.sin[at..at + pairs]);
                        ork_kernels::rope(x, cos, sin, interleaved);
                    });
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
                let shape = Shape {
                    heads: heads as usize,
                    scale,
                    window: window as usize,
                };
                self.apply([q, k, v], out, |this, [q, k, v], out| {
                    let kv = &mut this.caches[cache as usize];
                    let width = kv.width();
                    let rows = k.chunks_exact(width).zip(v.chunks_exact(width));
                    for (row, (k, v)) in rows.enumerate() {
                        kv.write(start + row, k, v);
                    }
                    attention::attend(kv, shape, start, q, out);
                });
            }
            Op::Glu { gate, up, out, act } => {
                let width = model.slots[out as usize] as usize;
                let Activation::Silu = act;
                self.apply([gate, up], out, |_, [gate, up], out| {
                    out.par_chunks_mut(width)
                        .zip(gate.par_chunks(width))
                        .zip(up.par_chunks(width))
                        .for_each(|((out, gate), up)| ork_kernels::silu_mul(gate, up, out));
                });
            }
            Op::Add { x, out, scale } => self.apply([x], out, |_, [x], out| {
                for (out, x) in out.iter_mut().zip(x) {
                    *out += x * scale;
                }
            }),
        }
        Ok(())
    }

    fn linear(
        &mut self,
        pack: &Pack,
        tensor: &Tensor,
        id: usize,
        x: &[f32],
        out: &mut [f32],
        phase: Phase,
    ) -> Result<()> {
        let floats = &self.floats[id];
        match (phase, &tensor.npu, &self.plan, &mut self.device) {
            (Phase::Prefill, Some(form), Some(plan), Some(device)) => {
                w8a8::linear(device.as_mut(), plan, tensor, form, &floats.npu, x, out)
            }
            _ => {
                linear::linear(pack, tensor, &floats.rows, x, out);
                Ok(())
            }
        }
    }
}
