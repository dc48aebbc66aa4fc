//! The NPU slice of a pack on its way into device memory.

use super::uapi::memory::Mapping;
use crate::map::Pack;
use ork_formats::model::{NpuPlan, Region};
use ork_formats::regcmd;

/// The streams, relocated to `bases`.
pub(super) fn relocated(pack: &Pack, bases: &[u32]) -> Vec<u8> {
    let (words, _) = pack.reader().programs().as_chunks::<8>();
    let mut words: Vec<u64> = words.iter().map(|b| u64::from_le_bytes(*b)).collect();
    regcmd::apply(&mut words, pack.reader().relocs(), bases);
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// Copies the NPU slice into device memory, once, and lets its pages go.
pub(super) fn load(pack: &Pack, plan: &NpuPlan, bases: &[u32], memory: &mut [Mapping]) {
    let programs = relocated(pack, bases);
    for (extent, mapping) in plan.extents.iter().zip(memory) {
        let source = match extent.region {
            Region::Weights => pack.reader().npu_weights(pack.bytes()),
            Region::Programs => &programs[..],
            Region::Tasks | Region::A | Region::Ring => continue,
        };
        let from = &source[extent.file_offset as usize..];
        let len = from.len().min(mapping.len());
        mapping.bytes_mut()[..len].copy_from_slice(&from[..len]);
    }
    pack.forget_npu_weights();
}

/// Device address of a program.
pub(super) fn program_address(plan: &NpuPlan, bases: &[u32], program: u64) -> u32 {
    let at = program * regcmd::BYTES as u64;
    let (index, extent) = plan
        .extents
        .iter()
        .enumerate()
        .find(|(_, e)| {
            let inside = e.file_offset <= at && at < e.file_offset + e.bytes;
            e.region == Region::Programs && inside
        })
        .expect("the reader proved that every program is in an extent");
    bases[index] + (at - extent.file_offset) as u32
}
