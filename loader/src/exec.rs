//! Walks the op list over activation slots: the only place where device and CPU meet.

use crate::cpu::attention::{self, Shape};
use crate::cpu::{conv, delta, experts, linear};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::map::Pack;
use crate::state::State;
use ork_formats::model::{
    Activation, Chain, Manifest, NpuForm, NpuPlan, Op, Program, Region, Rope, Tensor,
};
use ork_kernels as kernels;
use rayon::prelude::*;

/// Not a possible int32 result (|sum| <= 127 * 127 * K): marks a word the device has not written.
const SENTINEL: i32 = 0x7fff_ffff;

/// Which weights a linear uses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Prompt tokens: W8A8 on the device.
    Prefill,
    /// Generated tokens: the host form.
    Decode,
}

/// Activation slots, reused by every chunk.
pub(crate) struct Slots(Vec<Vec<f32>>);

impl Slots {
    pub(crate) fn new(manifest: &Manifest) -> Self {
        Self(vec![Vec::new(); manifest.model.slots.len()])
    }

    /// The last chunk's rows of one slot.
    pub(crate) fn rows(&self, slot: u32) -> &[f32] {
        &self.0[slot as usize]
    }
}

/// Marks every row of every C block, so that a word the device missed is seen.
pub(crate) fn seed(device: &mut dyn Device, plan: &NpuPlan) {
    for (extent, _) in plan
        .extents
        .iter()
        .enumerate()
        .filter(|(_, e)| e.region == Region::Ring)
    {
        for word in device.bytes_mut(extent as u32).chunks_exact_mut(4) {
            word.copy_from_slice(&SENTINEL.to_le_bytes());
        }
    }
}

/// Runs one chunk of `ids` at positions `position..`.
pub(crate) fn run(
    pack: &Pack,
    device: &mut dyn Device,
    (state, slots): (&mut State, &mut Slots),
    ids: &[u32],
    position: usize,
    phase: Phase,
) -> Result<()> {
    let manifest = pack.reader().manifest();
    let host = pack.host();
    let rows = ids.len();
    let slots = &mut slots.0;
    for (slot, width) in slots.iter_mut().zip(&manifest.model.slots) {
        slot.resize(rows * *width as usize, 0.0);
    }
    let tensor = |id: u32| &manifest.tensors[id as usize];
    let width = |slot: u32| manifest.model.slots[slot as usize] as usize;
    for op in &manifest.model.ops {
        match *op {
            Op::Embed { table, out, scale } => {
                let out_width = width(out);
                for (id, row) in ids
                    .iter()
                    .zip(slots[out as usize].chunks_exact_mut(out_width))
                {
                    linear::row(host, tensor(table), *id as usize, row);
                    row.iter_mut().for_each(|v| *v *= scale);
                }
            }
            Op::RmsNorm {
                x,
                weight,
                out,
                eps,
            } => {
                let w = linear::vector(host, tensor(weight));
                let source = std::mem::take(&mut slots[x as usize]);
                let mut target = match x == out {
                    true => vec![0.0; source.len()],
                    false => std::mem::take(&mut slots[out as usize]),
                };
                for (x, out) in source
                    .chunks_exact(w.len())
                    .zip(target.chunks_exact_mut(w.len()))
                {
                    kernels::rms_norm(x, &w, eps, out);
                }
                slots[x as usize] = source;
                slots[out as usize] = target;
            }
            Op::Linear {
                x,
                weight,
                bias,
                out,
            } => {
                let t = tensor(weight);
                let mut target = std::mem::take(&mut slots[out as usize]);
                let source = &slots[x as usize];
                match (&t.npu, &manifest.npu, phase) {
                    (Some(form), Some(plan), Phase::Prefill) => {
                        prefill(pack, device, plan, form, t, source, &mut target)?;
                    }
                    _ => linear::matmul(host, t, source, &mut target),
                }
                if let Some(bias) = bias {
                    let bias = linear::vector(host, tensor(bias));
                    for row in target.chunks_exact_mut(bias.len()) {
                        row.iter_mut().zip(&bias).for_each(|(v, b)| *v += b);
                    }
                }
                slots[out as usize] = target;
            }
            Op::Rope {
                x,
                heads,
                head_dim,
                rope,
            } => {
                let table = &manifest.model.ropes[rope as usize];
                let row_width = (heads * head_dim) as usize;
                for (r, row) in slots[x as usize].chunks_exact_mut(row_width).enumerate() {
                    let (cos, sin) = angles(table, position + r);
                    for head in row.chunks_exact_mut(head_dim as usize) {
                        kernels::rope(head, &cos, &sin, table.interleaved);
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
                let kv_width = width(k);
                let keys = slots[k as usize].chunks_exact(kv_width);
                for (key, value) in keys.zip(slots[v as usize].chunks_exact(kv_width)) {
                    kv.push(key, value);
                }
                let shape = Shape {
                    heads: heads as usize,
                    kv_heads: manifest.model.caches[cache as usize].kv_heads as usize,
                    scale,
                    window: window as usize,
                };
                let mut target = std::mem::take(&mut slots[out as usize]);
                attention::attention(kv, &slots[q as usize], rows, shape, &mut target);
                slots[out as usize] = target;
            }
            Op::Glu { gate, up, out, act } => {
                let mut target = vec![0.0; slots[gate as usize].len()];
                glu(act, &slots[gate as usize], &slots[up as usize], &mut target);
                slots[out as usize] = target;
            }
            Op::Scale { x, scale } => {
                slots[x as usize].iter_mut().for_each(|v| *v *= scale);
            }
            Op::Add { x, out, scale } => {
                let mut target = std::mem::take(&mut slots[out as usize]);
                for (out, x) in target.iter_mut().zip(&slots[x as usize]) {
                    *out += x * scale;
                }
                slots[out as usize] = target;
            }
            Op::AddGated { x, gate, out } => {
                let mut target = std::mem::take(&mut slots[out as usize]);
                let lines = target.chunks_exact_mut(width(out));
                let addends = slots[x as usize].chunks_exact(width(x));
                for ((out, x), gate) in lines.zip(addends).zip(&slots[gate as usize]) {
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
                let weight = linear::vector(host, tensor(weight));
                let mut target = std::mem::take(&mut slots[out as usize]);
                let past = &mut state.recurrent[id as usize];
                conv::conv(past, &weight, width(x), &slots[x as usize], &mut target);
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
                    state: manifest.model.states[id as usize],
                    key_heads: key_heads as usize,
                    scale,
                    eps,
                };
                let mut target = std::mem::take(&mut slots[out as usize]);
                let gates = delta::Gates {
                    a: &slots[a as usize],
                    b: &slots[b as usize],
                    a_log: &linear::vector(host, tensor(a_log)),
                    dt_bias: &linear::vector(host, tensor(dt_bias)),
                };
                let past = &mut state.recurrent[id as usize];
                delta::delta(past, &slots[qkv as usize], gates, shape, &mut target);
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
                    experts: width(router),
                    top: top as usize,
                    renormalise,
                    act,
                };
                let stacks = experts::Stacks {
                    gate: tensor(gate),
                    up: tensor(up),
                    down: tensor(down),
                };
                let weights = match phase {
                    Phase::Prefill => experts::Weights::Batch,
                    Phase::Decode => experts::Weights::Host,
                };
                let mut target = std::mem::take(&mut slots[out as usize]);
                let sources = (&slots[x as usize][..], &slots[router as usize][..]);
                experts::experts(host, stacks, weights, sources, shape, &mut target);
                slots[out as usize] = target;
            }
        }
    }
    Ok(())
}

/// `out = act(gate) * up`.
pub(crate) fn glu(act: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match act {
        Activation::Silu => kernels::silu_mul(gate, up, out),
        Activation::GeluTanh => kernels::gelu_tanh_mul(gate, up, out),
        Activation::Sigmoid => kernels::sigmoid_mul(gate, up, out),
    }
}

/// cos and sin of one position, from f64 so that every ISA agrees.
fn angles(rope: &Rope, position: usize) -> (Vec<f32>, Vec<f32>) {
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

/// W8A8 over the two half-chunks, in order.
fn prefill(
    pack: &Pack,
    device: &mut dyn Device,
    plan: &NpuPlan,
    form: &NpuForm,
    tensor: &Tensor,
    x: &[f32],
    out: &mut [f32],
) -> Result<()> {
    let (n, k) = (tensor.n as usize, tensor.k as usize);
    let half_rows = plan.half_rows as usize;
    let scales: Vec<f32> = linear::bytes(pack.host(), form.scales)
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")))
        .collect();
    let halves = x.chunks(half_rows * k).zip(out.chunks_mut(half_rows * n));
    for (half, (x, out)) in halves.enumerate() {
        let rows = x.len() / k;
        let class = (rows as u32).next_multiple_of(64);
        let chains: Vec<Chain> = form
            .chains
            .iter()
            .filter(|c| c.half == half as u32 && c.rows == class)
            .copied()
            .collect();
        if chains.is_empty() {
            return Err(Error::Failed(format!(
                "{}: the pack has no chain for {class} rows of half {half}",
                tensor.name
            )));
        }
        let s = feed(device, plan, form, half, x, k, class as usize);
        device.run(pack, &chains, rows as u32)?;
        let programs: Vec<&Program> = chains
            .iter()
            .flat_map(|c| &plan.programs[c.first as usize..(c.first + c.count) as usize])
            .filter(|p| (p.row0 as usize) < rows)
            .collect();
        collect(device, &programs, &s, &scales, n, out)?;
        // Whole blocks, surplus rows too: other tensors lay their blocks over the same ring, and no
        // stale word of this one may pass for a result of theirs.
        for chain in &chains {
            for p in &plan.programs[chain.first as usize..(chain.first + chain.count) as usize] {
                let len = (p.m * p.n * 4) as usize;
                let block = &mut device.bytes_mut(p.c.extent)[p.c.offset as usize..][..len];
                for word in block.chunks_exact_mut(4) {
                    word.copy_from_slice(&SENTINEL.to_le_bytes());
                }
            }
        }
    }
    Ok(())
}

/// Quantises `x` `[rows, k]` into core 0's A buffer of `half`, slice by slice, surplus rows zero, and
/// copies it to the other cores. Returns each row's scale.
fn feed(
    device: &mut dyn Device,
    plan: &NpuPlan,
    form: &NpuForm,
    half: usize,
    x: &[f32],
    k: usize,
    class: usize,
) -> Vec<f32> {
    let (slice_k, slices) = (form.slice_k as usize, form.k_slices as usize);
    let padded = slice_k * slices;
    let quantised: Vec<(f32, Vec<i8>)> = x
        .par_chunks_exact(k)
        .map(|row| {
            let mut q = vec![0; padded];
            (kernels::quantize_row(row, &mut q), q)
        })
        .collect();
    let used = (slices - 1) * plan.half_rows as usize * slice_k + class * slice_k;
    let mut image = vec![0u8; used];
    for (row, (_, q)) in quantised.iter().enumerate() {
        for slice in 0..slices {
            let at = slice * plan.half_rows as usize * slice_k + row * slice_k;
            let codes = &q[slice * slice_k..][..slice_k];
            for (byte, code) in image[at..at + slice_k].iter_mut().zip(codes) {
                *byte = *code as u8;
            }
        }
    }
    for core in 0..plan.cores as usize {
        let place = plan.a_buffers[half * plan.cores as usize + core];
        let buffer = &mut device.bytes_mut(place.extent)[place.offset as usize..];
        buffer[..used].copy_from_slice(&image);
    }
    quantised.into_iter().map(|(s, _)| s).collect()
}

/// Sums K slices in int32, scales into `out` `[rows, n]`, checks every word.
fn collect(
    device: &dyn Device,
    programs: &[&Program],
    s: &[f32],
    scales: &[f32],
    n: usize,
    out: &mut [f32],
) -> Result<()> {
    for first in programs.iter().filter(|p| p.slice == 0) {
        let width = first.n as usize;
        let rows = (first.m as usize).min(s.len() - first.row0 as usize);
        let mut acc = vec![0i32; rows * width];
        let same = |p: &&&Program| p.row0 == first.row0 && p.n0 == first.n0;
        for p in programs.iter().filter(same) {
            let block = &device.bytes(p.c.extent)[p.c.offset as usize..][..rows * width * 4];
            for (acc, word) in acc.iter_mut().zip(block.chunks_exact(4)) {
                let value = i32::from_le_bytes(word.try_into().expect("4 bytes"));
                if value == SENTINEL {
                    return Err(Error::Failed(format!(
                        "{}: a result word was never written (rows {}+{}, channels {}+{})",
                        device.name(),
                        p.row0,
                        p.m,
                        p.n0,
                        p.n
                    )));
                }
                *acc += value;
            }
        }
        let (row0, n0) = (first.row0 as usize, first.n0 as usize);
        let columns = width.min(n - n0);
        for (row, acc) in acc.chunks_exact(width).enumerate() {
            let target = &mut out[(row0 + row) * n + n0..][..columns];
            kernels::dequantize_row(acc, s[row0 + row], &scales[n0..], target);
        }
    }
    Ok(())
}
