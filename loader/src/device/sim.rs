//! The plan loaded into the bit-exact NPU simulator.

use super::Device;
use crate::error::{Error, Result};
use crate::map::Pack;
use ork_caps::Caps;
use ork_formats::model::{Chain, NpuPlan, Region};
use ork_formats::regcmd;
use ork_sim::Memory;
use std::sync::Arc;

/// One allocation of the simulated IOVA window.
#[derive(Debug)]
struct Extent {
    base: u32,
    bytes: Vec<u8>,
    writable: bool,
}

/// The simulated NPU with its memory.
#[derive(Debug)]
pub struct Sim {
    extents: Vec<Extent>,
    plan: Arc<NpuPlan>,
    caps: &'static Caps,
    threads: u32,
}

impl Sim {
    /// Allocates every extent of `plan` top-down below 4 GiB, as the kernel's IOVA allocator does,
    /// copies weights and programs in and relocates the programs.
    ///
    /// # Errors
    /// [`Error::Fit`] when the extents exceed the 32-bit window.
    pub fn new(pack: &Pack, plan: Arc<NpuPlan>, threads: u32) -> Result<Self> {
        let reader = pack.reader();
        let bases = bases(&plan, reader.caps().page.value)?;
        let (words, _) = reader.programs(pack.bytes()).as_chunks::<8>();
        let mut words: Vec<u64> = words.iter().map(|b| u64::from_le_bytes(*b)).collect();
        regcmd::apply(&mut words, &reader.relocs(pack.bytes()), &bases);
        let programs: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let weights = reader.npu_weights(pack.bytes());
        let extents = plan
            .extents
            .iter()
            .zip(bases)
            .map(|(extent, base)| {
                let mut bytes = vec![0; extent.bytes as usize];
                let section: &[u8] = match extent.region {
                    Region::Weights => weights,
                    Region::Programs => &programs,
                    Region::Tasks | Region::A | Region::Ring => &[],
                };
                // The extent is rounded up to a page, the section is not.
                let from = (extent.file_offset as usize).min(section.len());
                let len = bytes.len().min(section.len() - from);
                bytes[..len].copy_from_slice(&section[from..from + len]);
                Extent {
                    base,
                    bytes,
                    writable: extent.region == Region::Ring,
                }
            })
            .collect();
        Ok(Self {
            extents,
            plan,
            caps: reader.caps(),
            threads,
        })
    }

    /// Device address of program `index`.
    fn address(&self, index: u32) -> u32 {
        let at = u64::from(index) * regcmd::BYTES as u64;
        let (id, extent) = self
            .plan
            .extents
            .iter()
            .enumerate()
            .rfind(|(_, e)| e.region == Region::Programs && e.file_offset <= at)
            .expect("the reader proved that every program lies in an extent");
        self.extents[id].base + (at - extent.file_offset) as u32
    }
}

/// Base address of every extent, allocated downwards from 4 GiB.
fn bases(plan: &NpuPlan, page: u64) -> Result<Vec<u32>> {
    const WINDOW: u64 = 1 << 32;
    let total: u64 = plan.extents.iter().map(|e| e.bytes.next_multiple_of(page)).sum();
    // Page 0 stays free: address 0 in a command stream is always a fault.
    if total > WINDOW - page {
        return Err(Error::Fit(format!(
            "the plan needs {total} bytes of device memory, the window has {}; compile the pack with fewer layers on the NPU",
            WINDOW - page
        )));
    }
    let mut top = WINDOW;
    Ok(plan
        .extents
        .iter()
        .map(|extent| {
            top -= extent.bytes.next_multiple_of(page);
            top as u32
        })
        .collect())
}

impl Device for Sim {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn bytes(&self, extent: u32) -> &[u8] {
        &self.extents[extent as usize].bytes
    }

    fn bytes_mut(&mut self, extent: u32) -> &mut [u8] {
        &mut self.extents[extent as usize].bytes
    }

    fn run(&mut self, chains: &[Chain], _rows: u32) -> Result<()> {
        for chain in chains.iter().filter(|c| c.count != 0) {
            let pc = self.address(chain.first);
            let mut memory = Memory::new();
            for extent in &mut self.extents {
                memory.map(extent.base, &mut extent.bytes, extent.writable);
            }
            ork_sim::run(
                &mut memory,
                pc,
                regcmd::WORDS as u32,
                chain.count,
                self.caps,
                self.threads as usize,
            )
            .map_err(|fault| {
                Error::Failed(format!(
                    "simulated core {}, chain of {} programs from program {}: {fault}",
                    chain.core, chain.count, chain.first
                ))
            })?;
        }
        Ok(())
    }
}
