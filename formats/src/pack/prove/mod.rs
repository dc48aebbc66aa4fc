//! What must hold of a manifest, its programs and its relocations before anything runs.
//!
//! Written from the specification alone: it shares types with the compiler, never logic. Every loop is
//! linear (or sorted) in what the file itself holds, so no forged count can make it slow.

mod mixers;
mod ops;
mod plan;
mod shapes;
mod streams;

pub(super) use ops::model;

use super::PackError;
use crate::model::{Manifest, NpuPlan, Place, Region};
use crate::regcmd::{self, Reloc};
use ork_caps::Caps;

type Proof = Result<(), PackError>;

fn bad(text: String) -> PackError {
    // Tensor names come from the file.
    PackError::Model(crate::one_line(&text))
}

fn ensure(holds: bool, text: impl FnOnce() -> String) -> Proof {
    if holds { Ok(()) } else { Err(bad(text())) }
}

fn same(a: u64, b: u64, what: &str) -> Proof {
    ensure(a == b, || format!("{what}: {a} against {b}"))
}

fn inside(plan: &NpuPlan, at: Place, bytes: u64, region: Region, what: &str) -> Proof {
    let extent = plan.extents.get(at.extent as usize).ok_or_else(|| {
        bad(format!(
            "{what}: extent {} of {}",
            at.extent,
            plan.extents.len()
        ))
    })?;
    ensure(extent.region == region, || {
        format!(
            "{what}: extent {} is {:?}, not {region:?}",
            at.extent, extent.region
        )
    })?;
    ensure(u64::from(at.offset) + bytes <= extent.bytes, || {
        format!(
            "{what}: {bytes} bytes at {} exceed extent {} of {}",
            at.offset, at.extent, extent.bytes
        )
    })?;
    ensure(at.offset.is_multiple_of(16), || {
        format!("{what}: offset {} is not 16-byte aligned", at.offset)
    })
}

/// Proves extents, forms, streams and relocations.
pub(super) fn programs(
    manifest: &Manifest,
    caps: &Caps,
    stream: &[u8],
    relocs: &[Reloc],
    weights: u64,
) -> Proof {
    let Some(plan) = &manifest.npu else {
        same(stream.len() as u64, 0, "program bytes without an NPU plan")?;
        same(weights, 0, "NPU weight bytes without an NPU plan")?;
        same(relocs.len() as u64, 0, "relocations without an NPU plan")?;
        let forms = manifest.tensors.iter().filter(|t| t.npu.is_some()).count();
        return same(forms as u64, 0, "NPU forms without an NPU plan");
    };
    let bytes = (plan.programs.len() * regcmd::BYTES) as u64;
    same(stream.len() as u64, bytes, "program bytes")?;
    plan::extents(plan, caps, stream.len() as u64, weights)?;
    let next = plan::chains(manifest, plan, caps, weights)?;
    streams::lint(plan, caps, stream, &next)?;
    streams::relocations(plan, stream, relocs, &next)
}
