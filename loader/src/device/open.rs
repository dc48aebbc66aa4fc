//! Finds, locks and fills a device.

use super::jobs::Jobs;
use super::queue::Queue;
use super::rknpu::Rknpu;
use super::rocket::Rocket;
use super::uapi::drm;
use super::uapi::kernel::{Fd, Kernel, Lock};
use super::uapi::memory::Mapping;
use super::{Cpu, Device, Sim};
use crate::error::{Error, Result};
use crate::map::Pack;
use crate::session::Backend;
use ork_formats::model::{NpuPlan, Region};
use ork_formats::regcmd;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

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

/// What [`Backend::Auto`] chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picked {
    /// Name and reason.
    pub why: String,
    /// Whether there is an NPU, so that a person wants to hear of it.
    pub npu: bool,
}

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

/// The vendor driver's folder: primary nodes only. Its render node accepts submits and runs nothing.
const PRIMARY: (&str, &str) = ("/dev/dri", "card");
/// The mainline driver's.
const ACCEL: (&str, &str) = ("/dev/accel", "accel");

/// Opens the backend; with [`Backend::Auto`] the first of rknpu, rocket and the CPU that can run this
/// pack. Returns the device and, for `auto`, why it was chosen.
///
/// # Errors
/// [`Error::Busy`] when the device is absent, held or too old; [`Error::Fit`] when its memory is.
pub fn open(
    kernel: &Arc<dyn Kernel>,
    pack: &Pack,
    jobs: &Arc<Jobs>,
    backend: Backend,
    options: &Options,
) -> Result<(Box<dyn Device>, Option<Picked>)> {
    let device: Box<dyn Device> = match backend {
        Backend::Sim => Box::new(Sim::new(pack, options.threads)),
        Backend::Cpu => Box::new(Cpu::new(pack)),
        Backend::Rknpu => rknpu(kernel, pack, jobs, options)?,
        Backend::Rocket => rocket(kernel, pack, jobs, options)?,
        Backend::Auto => return auto(kernel, pack, jobs, options),
    };
    Ok((device, None))
}

fn auto(
    kernel: &Arc<dyn Kernel>,
    pack: &Pack,
    jobs: &Arc<Jobs>,
    options: &Options,
) -> Result<(Box<dyn Device>, Option<Picked>)> {
    let cpu = |why: String, npu| -> Result<(Box<dyn Device>, Option<Picked>)> {
        let why = format!("cpu ({why})");
        Ok((Box::new(Cpu::new(pack)), Some(Picked { why, npu })))
    };
    if pack.reader().manifest().npu.is_none() {
        return cpu("the pack has no NPU slice".into(), false);
    }
    let vendor = find(kernel, PRIMARY, "rknpu").is_some();
    let mainline = find(kernel, ACCEL, "rocket").is_some();
    let (name, result) = match (vendor, mainline) {
        (true, _) => ("rknpu", rknpu(kernel, pack, jobs, options)),
        (false, true) => ("rocket", rocket(kernel, pack, jobs, options)),
        (false, false) => return cpu("no NPU driver found".into(), false),
    };
    match result {
        Ok(device) => {
            let why = format!("{name} (found its driver)");
            Ok((device, Some(Picked { why, npu: true })))
        }
        // A pack of another SoC must not run there; the CPU reads any pack.
        Err(error) => cpu(format!("{name}: {error}"), true),
    }
}

fn rknpu(
    kernel: &Arc<dyn Kernel>,
    pack: &Pack,
    jobs: &Arc<Jobs>,
    options: &Options,
) -> Result<Box<dyn Device>> {
    let node = lock(kernel, PRIMARY, "rknpu", pack)?;
    let driver = Rknpu::open(node, pack, jobs, options)?;
    let memory = driver.memory();
    let queue = Queue::new(driver, memory, Arc::clone(jobs), options.timeout)?;
    Ok(Box::new(queue))
}

fn rocket(
    kernel: &Arc<dyn Kernel>,
    pack: &Pack,
    jobs: &Arc<Jobs>,
    options: &Options,
) -> Result<Box<dyn Device>> {
    let node = lock(kernel, ACCEL, "rocket", pack)?;
    let driver = Rocket::open(node, pack, jobs)?;
    let memory = driver.memory();
    let queue = Queue::new(driver, memory, Arc::clone(jobs), options.timeout)?;
    Ok(Box::new(queue))
}

/// The first node of a folder whose driver has this name.
fn find(kernel: &Arc<dyn Kernel>, (folder, prefix): (&str, &str), driver: &str) -> Option<Node> {
    let named = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(prefix)
    };
    kernel
        .nodes(folder)
        .into_iter()
        .filter(named)
        .find_map(|path| {
            let node = Node {
                fd: kernel.open(&path).ok()?,
                kernel: Arc::clone(kernel),
                path,
            };
            let name = drm::name(&**kernel, node.fd).ok()?;
            (name == driver).then_some(node)
        })
}

fn lock(kernel: &Arc<dyn Kernel>, place: (&str, &str), driver: &str, pack: &Pack) -> Result<Node> {
    let node = find(kernel, place, driver).ok_or_else(|| {
        Error::Busy(format!(
            "{}/{}*: no {driver} device; use --backend cpu",
            place.0, place.1
        ))
    })?;
    right_soc(pack, Path::new(COMPATIBLE))?;
    match kernel.lock(node.fd) {
        Ok(Lock::Held) => Ok(node),
        Ok(Lock::Busy(pid)) => {
            let who = pid.map_or_else(|| "another process".into(), |pid| format!("pid {pid}"));
            Err(Error::Busy(format!(
                "{}: busy, held by {who}; stop it, or use --backend cpu",
                node.path.display()
            )))
        }
        Err(e) => Err(node.failed("locking it", &e)),
    }
}

/// Names of this board and its SoC, each ended by a zero byte.
const COMPATIBLE: &str = "/sys/firmware/devicetree/base/compatible";

/// Refuses a pack of another SoC than the one we run on, where the machine says which that is.
fn right_soc(pack: &Pack, file: &Path) -> Result<()> {
    let caps = pack.reader().caps();
    let Ok(bytes) = std::fs::read(file) else {
        return Ok(());
    };
    let names: Vec<String> = bytes
        .split(|b| *b == 0)
        .map(|n| String::from_utf8_lossy(n).into_owned())
        .collect();
    match names.iter().any(|n| caps.compatible.contains(&n.as_str())) {
        true => Ok(()),
        false => Err(Error::Mismatch(format!(
            "the pack is for {}, this machine is {}; recompile it, or use --backend cpu",
            caps.name,
            names.join(" ").trim()
        ))),
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
