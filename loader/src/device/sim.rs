//! The NPU simulator: executes the pack's own command streams.

use super::jobs::Jobs;
use super::{Device, allocate, copy, slice};
use crate::error::{Error, Result};
use crate::map::Pack;
use ork_formats::model::{Place, Region};
use ork_formats::regcmd;
use ork_sim::Memory;

/// Simulated device memory: every extent at an address below 4 GiB, handed out top-down as the vendor
/// driver does.
pub struct Sim {
    extents: Vec<Vec<u8>>,
    bases: Vec<u32>,
    threads: usize,
}

impl Sim {
    /// Allocates the plan's extents, copies the NPU slice in and relocates the streams.
    #[must_use]
    pub fn new(pack: &Pack, threads: usize) -> Self {
        let reader = pack.reader();
        let Some(plan) = &reader.manifest().npu else {
            return Self {
                extents: Vec::new(),
                bases: Vec::new(),
                threads,
            };
        };
        let mut extents = allocate(plan, |_| true);
        let mut top: u64 = 0xffff_f000;
        let bases: Vec<u32> = plan
            .extents
            .iter()
            .map(|e| {
                top -= e.bytes;
                top as u32
            })
            .collect();
        let programs = slice::relocated(pack, &bases);
        for (extent, bytes) in plan.extents.iter().zip(&mut extents) {
            let source = match extent.region {
                Region::Weights => reader.npu_weights(pack.bytes()),
                Region::Programs => &programs,
                Region::Tasks | Region::A | Region::Ring => continue,
            };
            let from = &source[extent.file_offset as usize..];
            let len = from.len().min(bytes.len());
            bytes[..len].copy_from_slice(&from[..len]);
        }
        Self {
            extents,
            bases,
            threads,
        }
    }
}

impl Device for Sim {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn bytes(&self, at: Place, len: usize) -> &[u8] {
        &self.extents[at.extent as usize][at.offset as usize..][..len]
    }

    fn bytes_mut(&mut self, at: Place, len: usize) -> &mut [u8] {
        &mut self.extents[at.extent as usize][at.offset as usize..][..len]
    }

    fn copy(&mut self, from: Place, to: Place, len: usize) {
        copy(&mut self.extents, from, to, len);
    }

    fn start(&mut self, pack: &Pack, jobs: &Jobs, id: u32, _rows: u32) -> Result<()> {
        let manifest = pack.reader().manifest();
        let plan = manifest.npu.as_ref().expect("jobs come from a plan");
        let mut memory = Memory::new();
        for ((extent, bytes), base) in plan.extents.iter().zip(&mut self.extents).zip(&self.bases) {
            memory.map(*base, bytes, extent.region == Region::Ring);
        }
        for part in &jobs.get(id).parts {
            let chain = &part.chain;
            let pc = slice::program_address(plan, &self.bases, u64::from(chain.first));
            let caps = pack.reader().caps();
            let words = regcmd::WORDS as u32;
            ork_sim::run(&mut memory, pc, words, chain.count, caps, self.threads).map_err(|e| {
                Error::Failed(format!(
                    "simulator: chain at program {} (core {}, half {}, {} rows): {e}",
                    chain.first, chain.core, chain.half, chain.rows
                ))
            })?;
        }
        Ok(())
    }
}
