//! Shapes that ops rely on: slots, tensors and the bytes of their forms.

use super::{Proof, bad, ensure};
use crate::model::{FloatType, HostForm, Manifest, Span, Tensor};
use crate::pack::PackError;
use crate::quant::int4;

/// Longest slot and largest dimension accepted: products of two stay far inside u64.
pub(super) const MAX_DIM: u32 = 1 << 20;
/// Most rows of a tensor: vocabularies are longer than any layer is wide.
pub(super) const MAX_ROWS: u32 = 1 << 24;
/// Most matrices of a stack.
const MAX_STACK: u32 = 1 << 12;

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

pub(super) fn shape(manifest: &Manifest, id: u32, n: u32, k: u32) -> Proof {
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

pub(super) fn host_form(t: &Tensor, host: u64) -> Proof {
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
