//! Where prefill's int8 matmuls run.

mod cpu;
pub mod jobs;
mod node;
mod open;
mod queue;
mod rknpu;
mod rocket;
mod sim;
mod slice;
pub mod uapi;

pub use cpu::Cpu;
pub use open::{Picked, open};
pub use sim::Sim;

use crate::error::Result;
use crate::map::Pack;
use jobs::Jobs;
use ork_formats::model::{NpuPlan, Place, Region};
use serde::Serialize;
use std::time::Duration;

/// Where prefill runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The first of rknpu, rocket and cpu that can run the pack.
    Auto,
    /// The NPU through the vendor's DRM driver.
    Rknpu,
    /// The NPU through the mainline accel driver.
    Rocket,
    /// The bit-exact NPU simulator.
    Sim,
    /// CPU kernels.
    Cpu,
}

/// How to open a device.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads of the simulator.
    pub threads: usize,
    /// Try a driver older than the oldest known to work.
    pub force_driver: bool,
    /// Take weights, activations and results from dma-heap where they are small enough, and submit one
    /// program at a time.
    pub import: bool,
    /// Longest wait for one job.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: 1,
            force_driver: false,
            import: false,
            timeout: Duration::from_secs(2),
        }
    }
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Its doorbells rang.
    Done,
    /// It did not answer in time.
    Lost,
}

/// What a device did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Submits to the hardware.
    pub submits: u64,
    /// Jobs that were lost or left words unwritten.
    pub misses: u64,
    /// Resets.
    pub resets: u64,
    /// Nanoseconds between submit and doorbell, summed over jobs.
    pub busy_ns: u64,
}

/// A device: the A and ring extents of the plan, and a way to run jobs over them. One job per half may be
/// in flight; while it is, its A buffers and blocks belong to the device.
pub trait Device: Send {
    /// Name for reports.
    fn name(&self) -> &'static str;
    /// Bytes of an A or ring extent.
    fn bytes(&self, at: Place, len: usize) -> &[u8];
    /// As [`Device::bytes`], to write activations and sentinels.
    fn bytes_mut(&mut self, at: Place, len: usize) -> &mut [u8];
    /// Copies between two A buffers.
    fn copy(&mut self, from: Place, to: Place, len: usize);
    /// Whether real hardware works here, which outlives a process that is killed.
    fn is_hardware(&self) -> bool {
        false
    }
    /// Begins a job, of which the first `rows` rows matter.
    ///
    /// # Errors
    /// [`crate::error::Error::Failed`] when a stream faults or the driver refuses.
    fn start(&mut self, pack: &Pack, jobs: &Jobs, id: u32, rows: u32) -> Result<()>;
    /// Waits, in bounded time, for the job of a half that was started last.
    ///
    /// # Errors
    /// As [`Device::start`].
    fn wait(&mut self, _half: u32) -> Result<Ended> {
        Ok(Ended::Done)
    }
    /// The results of a half are read, its sentinels are back.
    fn release(&mut self, _half: u32) {}
    /// Makes the device usable after a lost job. Nothing may be in flight.
    ///
    /// # Errors
    /// When it cannot.
    fn reset(&mut self) -> Result<()> {
        Ok(())
    }
    /// Counts so far.
    fn counters(&self) -> Counters {
        Counters::default()
    }
}

/// [`Device::copy`] over host memory.
fn copy(extents: &mut [Vec<u8>], from: Place, to: Place, len: usize) {
    let (start, offset) = (from.offset as usize, to.offset as usize);
    if from.extent == to.extent {
        extents[from.extent as usize].copy_within(start..start + len, offset);
    } else if let Ok([from, to]) =
        extents.get_disjoint_mut([from.extent as usize, to.extent as usize])
    {
        to[offset..offset + len].copy_from_slice(&from[start..start + len]);
    }
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
