//! Where prefill's int8 matmuls run.

mod cpu;
mod sim;

pub use cpu::Cpu;
pub use sim::Sim;

use crate::error::Result;
use crate::map::Pack;
use ork_formats::model::{Chain, NpuPlan, Region};

/// A device: the A and ring extents of the plan, and a way to run chains over them.
pub trait Device: Send {
    /// Name for reports.
    fn name(&self) -> &'static str;
    /// Bytes of an A or ring extent.
    fn bytes(&self, extent: u32) -> &[u8];
    /// As [`Device::bytes`], to write activations and sentinels.
    fn bytes_mut(&mut self, extent: u32) -> &mut [u8];
    /// Runs one half's chains, one per core, of which the first `rows` rows matter.
    ///
    /// # Errors
    /// [`crate::error::Error::Failed`] when a stream faults.
    fn run(&mut self, pack: &Pack, chains: &[Chain], rows: u32) -> Result<()>;
}

/// Zeroed host memory for every extent of the plan that `wanted` selects; empty for the others.
fn allocate(plan: &NpuPlan, wanted: impl Fn(Region) -> bool) -> Vec<Vec<u8>> {
    plan.extents
        .iter()
        .map(|e| match wanted(e.region) {
            true => vec![0; e.bytes as usize],
            false => Vec::new(),
        })
        .collect()
}
