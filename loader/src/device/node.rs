//! An open device file, and what is wrong with what it answers.

use super::uapi::kernel::{Fd, Kernel};
use crate::error::{Error, Result};
use ork_formats::model::NpuPlan;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// An opened and locked device file.
pub(super) struct Node {
    pub(super) kernel: Arc<dyn Kernel>,
    pub(super) fd: Fd,
    pub(super) path: PathBuf,
}

impl Node {
    /// An error of this node: "what: why".
    pub(super) fn failed(&self, what: &str, why: &io::Error) -> Error {
        Error::Failed(format!("{}: {what} failed: {why}", self.path.display()))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kernel.close(self.fd);
    }
}

pub(super) fn no_plan() -> Error {
    Error::Mismatch("a lossless pack has no NPU slice; use --backend cpu".into())
}

/// Allocation `i` was refused after `done` of `total` bytes.
pub(super) fn no_memory(
    node: &Node,
    i: usize,
    plan: &NpuPlan,
    done: u64,
    total: u64,
    why: &io::Error,
) -> Error {
    let extent = &plan.extents[i];
    Error::Fit(format!(
        "{}: {:?} buffer of {} bytes refused after {done} of {total}: {why}; free device memory, or use --backend cpu",
        node.path.display(),
        extent.region,
        extent.bytes
    ))
}

/// A device address that every register can hold.
pub(super) fn address(node: &Node, at: u64, bytes: u64) -> Result<u32> {
    /// No pack has a smaller page.
    const ALIGN: u64 = 4096;
    match at {
        0 => {}
        at if at.is_multiple_of(ALIGN) && at + bytes <= 1 << 32 => return Ok(at as u32),
        _ => {}
    }
    Err(Error::Failed(format!(
        "{}: device address {at:#x} for {bytes} bytes: must be a non-zero page below 4 GiB; reboot the board",
        node.path.display()
    )))
}

/// No two extents may overlap: a driver that answers so would have programs write over weights.
pub(super) fn disjoint(node: &Node, plan: &NpuPlan, bases: &[u32]) -> Result<()> {
    let mut ranges: Vec<(u64, u64)> = plan
        .extents
        .iter()
        .zip(bases)
        .map(|(e, base)| (u64::from(*base), u64::from(*base) + e.bytes))
        .collect();
    ranges.sort_unstable();
    match ranges.windows(2).find(|w| w[1].0 < w[0].1) {
        None => Ok(()),
        Some(w) => Err(Error::Failed(format!(
            "{}: device addresses {:#x}..{:#x} and {:#x}.. overlap; reboot the board",
            node.path.display(),
            w[0].0,
            w[0].1,
            w[1].0
        ))),
    }
}
