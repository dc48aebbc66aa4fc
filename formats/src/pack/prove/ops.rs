//! Ops and what they connect.

use super::shapes::{MAX_DIM, MAX_ROWS, host_form, shape, tensor, vector, width};
use super::{Proof, bad, ensure, mixers, same};
use crate::model::{Manifest, Op};
use crate::pack::PackError;

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
