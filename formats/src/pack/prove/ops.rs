//! Ops, slots, tensors and host spans.

use super::{Proof, bad, ensure, mixers, same};
use crate::model::{FloatType, HostForm, Manifest, Op, Span, Tensor};
use crate::pack::PackError;
use crate::quant::int4;

/// Longest slot and largest dimension accepted: products of two stay far inside u64.
pub(super) const MAX_DIM: u32 = 1 << 20;
/// Most rows of a tensor: vocabularies are longer than any layer is wide.
const MAX_ROWS: u32 = 1 << 24;
/// Most matrices of a stack.
const MAX_STACK: u32 = 1 << 12;

/// Proves ops, slots, tensors and host spans against a host section of `host` bytes.
pub(in crate::pack) fn model(manifest: &Manifest, host: u64) -> Proof {
    let model = &manifest.model;
    ensure(!model.slots.is_empty() && model.slots.len() <= 4096, || {
        format!("{} activation slots", model.slots.len())
    })?;
    for width in &model.slots {
        ensure((1..=MAX_DIM).contains(width), || {
            format!("slot width {width}")
        })?;
    }
    // What a session allocates for every row it computes. A slot is filled from weights, so no honest
    // row is wider than the weights are long.
    let lanes: u64 = model.slots.iter().map(|w| u64::from(*w)).sum();
    ensure(lanes <= host.min(u64::from(MAX_DIM)), || {
        format!("activation slots of {lanes} lanes in all, {host} bytes of host weights")
    })?;
    ensure((1..=MAX_ROWS).contains(&model.vocab), || {
        format!("vocab {}", model.vocab)
    })?;
    ensure((1..=1 << 24).contains(&model.context), || {
        format!("context {}", model.context)
    })?;
    for tensor in &manifest.tensors {
        host_form(tensor, host)?;
    }
    for cache in &model.caches {
        let width = u64::from(cache.kv_heads) * u64::from(cache.head_dim);
        ensure((1..=u64::from(MAX_DIM)).contains(&width), || {
            format!("cache width {width}")
        })?;
    }
    mixers::states(&model.states, host)?;
    for rope in &model.ropes {
        ensure((1..=4096).contains(&rope.inv_freq.len()), || {
            format!("rope of {} frequencies", rope.inv_freq.len())
        })?;
        let finite = rope
            .inv_freq
            .iter()
            .chain([&rope.magnitude])
            .all(|f| f.is_finite());
        ensure(finite, || "rope frequencies are not finite".into())?;
    }
    for (index, op) in model.ops.iter().enumerate() {
        prove_op(manifest, op).map_err(|e| match e {
            PackError::Model(text) => bad(format!("op {index}: {text}")),
            other => other,
        })?;
    }
    // Two layers on one cache or state would mix their tokens.
    let mut caches = vec![0u32; model.caches.len()];
    let mut states = vec![0u32; model.states.len()];
    for op in &model.ops {
        match op {
            Op::Attention { cache, .. } => caches[*cache as usize] += 1,
            Op::Conv { state, .. } | Op::Delta { state, .. } => states[*state as usize] += 1,
            _ => {}
        }
    }
    for (name, uses) in [("cache", caches), ("state", states)] {
        if let Some(index) = uses.iter().position(|n| *n != 1) {
            return Err(bad(format!("{name} {index} serves {} layers", uses[index])));
        }
    }
    for id in manifest.text.prefix.iter().chain(&manifest.text.suffix) {
        ensure(*id < model.vocab, || {
            format!("prompt id {id}, the vocabulary has {}", model.vocab)
        })?;
    }
    let hidden = width(manifest, model.hidden)?;
    shape(manifest, model.head, model.vocab, hidden)
}

pub(super) fn width(manifest: &Manifest, slot: u32) -> Result<u32, PackError> {
    let slots = &manifest.model.slots;
    slots
        .get(slot as usize)
        .copied()
        .ok_or_else(|| bad(format!("slot {slot} of {}", slots.len())))
}

pub(super) fn tensor(manifest: &Manifest, id: u32) -> Result<&Tensor, PackError> {
    manifest
        .tensors
        .get(id as usize)
        .ok_or_else(|| bad(format!("tensor {id} of {}", manifest.tensors.len())))
}

fn shape(manifest: &Manifest, id: u32, n: u32, k: u32) -> Proof {
    stacked(manifest, id, 1, (n, k))
}

/// A stack of `stack` matrices `[n, k]`.
pub(super) fn stacked(manifest: &Manifest, id: u32, stack: u32, (n, k): (u32, u32)) -> Proof {
    let t = tensor(manifest, id)?;
    ensure((t.stack, t.n, t.k) == (stack, n, k), || {
        let of = |stack: u32| match stack {
            1 => String::new(),
            _ => format!("{stack} times "),
        };
        let (have, need) = (of(t.stack), of(stack));
        format!(
            "tensor {} is {have}[{}, {}], the op needs {need}[{n}, {k}]",
            t.name, t.n, t.k
        )
    })
}

/// Vectors are `[1, k]` in f32.
pub(super) fn vector(manifest: &Manifest, id: u32, k: u32) -> Proof {
    table(manifest, id, 1, k)
}

/// `[n, k]` in f32.
pub(super) fn table(manifest: &Manifest, id: u32, n: u32, k: u32) -> Proof {
    shape(manifest, id, n, k)?;
    let t = tensor(manifest, id)?;
    let f32s = matches!(
        t.host,
        HostForm::Float {
            ty: FloatType::F32,
            ..
        }
    );
    ensure(f32s, || format!("vector {} is not f32", t.name))
}

fn prove_op(manifest: &Manifest, op: &Op) -> Proof {
    let w = |slot| width(manifest, slot).map(u64::from);
    match *op {
        Op::Embed { table, out, scale } => {
            ensure(scale.is_finite(), || format!("embedding scale {scale}"))?;
            shape(manifest, table, manifest.model.vocab, w(out)? as u32)
        }
        Op::RmsNorm {
            x,
            weight,
            out,
            eps,
        } => {
            same(w(x)?, w(out)?, "norm widths")?;
            ensure(eps.is_finite() && 0.0 <= eps, || format!("norm eps {eps}"))?;
            let group = tensor(manifest, weight)?.k;
            vector(manifest, weight, group)?;
            same(w(x)? % u64::from(group), 0, "norm width over its group")
        }
        Op::Linear {
            x,
            weight,
            bias,
            out,
        } => {
            shape(manifest, weight, w(out)? as u32, w(x)? as u32)?;
            ensure(x != out, || format!("linear in place on slot {x}"))?;
            match bias {
                Some(id) => vector(manifest, id, w(out)? as u32),
                None => Ok(()),
            }
        }
        Op::Rope {
            x,
            heads,
            head_dim,
            rope,
        } => {
            same(w(x)?, u64::from(heads) * u64::from(head_dim), "rope width")?;
            let table = manifest.model.ropes.get(rope as usize);
            let lanes = table.map(|r| 2 * r.inv_freq.len() as u64);
            ensure(lanes.is_some_and(|l| l <= u64::from(head_dim)), || {
                format!("rope {rope} rotates {lanes:?} of {head_dim} lanes")
            })
        }
        Op::Attention {
            q,
            k,
            v,
            out,
            heads,
            scale,
            cache,
            ..
        } => {
            let caches = &manifest.model.caches;
            let c = caches
                .get(cache as usize)
                .ok_or_else(|| bad(format!("cache {cache} of {}", caches.len())))?;
            let kv = u64::from(c.kv_heads) * u64::from(c.head_dim);
            let all = u64::from(heads) * u64::from(c.head_dim);
            same(w(k)?, kv, "key width")?;
            same(w(v)?, kv, "value width")?;
            same(w(q)?, all, "query width")?;
            same(w(out)?, all, "attention width")?;
            ensure(![q, k, v].contains(&out) && scale.is_finite(), || {
                format!("attention over slots {q}, {k}, {v} into {out}, scale {scale}")
            })?;
            ensure(heads != 0 && heads % c.kv_heads == 0, || {
                format!("{heads} heads over {} kv heads", c.kv_heads)
            })
        }
        Op::Glu { gate, up, out, .. } => {
            same(w(gate)?, w(up)?, "gate and up")?;
            same(w(gate)?, w(out)?, "gate and out")
        }
        Op::Scale { x, scale } => {
            w(x)?;
            ensure(scale.is_finite(), || format!("scale {scale}"))
        }
        Op::Add { x, out, scale } => {
            ensure(x != out && scale.is_finite(), || {
                format!("slot {x} times {scale} added to slot {out}")
            })?;
            same(w(x)?, w(out)?, "addends")
        }
        Op::AddGated { x, gate, out } => {
            ensure(x != out && gate != out, || {
                format!("slot {x} gated by slot {gate} added to slot {out}")
            })?;
            same(w(gate)?, 1, "width of the gate")?;
            same(w(x)?, w(out)?, "addends")
        }
        Op::Conv { .. } => mixers::conv(manifest, op),
        Op::Delta { .. } => mixers::delta(manifest, op),
        Op::Moe { .. } => mixers::moe(manifest, op),
    }
}

fn span(at: Span, need: u64, host: u64, name: &str) -> Proof {
    ensure(at.bytes == need, || {
        format!("{name}: {} bytes, its shape needs {need}", at.bytes)
    })?;
    ensure(at.offset.is_multiple_of(64), || {
        format!("{name}: offset {} is not 64-byte aligned", at.offset)
    })?;
    let end = at.offset.checked_add(at.bytes);
    ensure(end.is_some_and(|e| e <= host), || {
        format!(
            "{name}: {} bytes at {} exceed the host section's {host}",
            at.bytes, at.offset
        )
    })
}

fn host_form(t: &Tensor, host: u64) -> Proof {
    ensure(
        (1..=MAX_ROWS).contains(&t.n) && (1..=MAX_DIM).contains(&t.k),
        || format!("tensor {} is [{}, {}]", t.name, t.n, t.k),
    )?;
    ensure((1..=MAX_STACK).contains(&t.stack), || {
        format!("tensor {} is a stack of {}", t.name, t.stack)
    })?;
    let stack = u64::from(t.stack);
    let elements = stack * u64::from(t.n) * u64::from(t.k);
    match t.host {
        HostForm::Float { ty, at } => span(at, elements * ty.bytes(), host, &t.name),
        HostForm::Int8 { at, scales } => {
            span(at, elements, host, &t.name)?;
            span(scales, stack * u64::from(t.n) * 4, host, &t.name)
        }
        HostForm::Int4 { at } => {
            let one = int4::bytes(t.n as usize, t.k as usize);
            span(at, stack * one, host, &t.name)
        }
    }?;
    if let Some(tiles) = t.batch {
        let (n, k) = (t.n.next_multiple_of(32), t.k.next_multiple_of(32));
        let rows = stack * u64::from(n);
        span(tiles.at, rows * u64::from(k), host, &t.name)?;
        span(tiles.scales, rows * 4, host, &t.name)?;
    }
    match &t.npu {
        Some(form) => {
            ensure(t.stack == 1, || {
                format!("{}: a stack of {} on the NPU", t.name, t.stack)
            })?;
            let padded = u64::from(t.n.next_multiple_of(32));
            span(form.scales, padded * 4, host, &t.name)
        }
        None => Ok(()),
    }
}
