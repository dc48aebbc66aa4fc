//! Where prefill matmuls run: the simulator or the CPU, behind one trait.

pub mod cpu;
pub mod sim;
pub mod w8a8;

use crate::error::Result;
use ork_formats::model::Chain;

/// Something that computes the plan's int32 blocks. All devices give the same blocks, bit for bit.
pub trait Device: Send + Sync {
    /// Short name for reports.
    fn name(&self) -> &'static str;

    /// Contents of an A or ring extent.
    fn bytes(&self, extent: u32) -> &[u8];

    /// Contents of an A or ring extent, to be written.
    fn bytes_mut(&mut self, extent: u32) -> &mut [u8];

    /// Runs `chains`, of which the first `rows` rows of the half-chunk are needed.
    ///
    /// # Errors
    /// [`crate::error::Error::Failed`] when the device faults.
    fn run(&mut self, chains: &[Chain], rows: u32) -> Result<()>;
}
