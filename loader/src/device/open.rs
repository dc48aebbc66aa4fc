//! Finds, locks and fills a device.

use super::jobs::Jobs;
use super::node::Node;
use super::queue::Queue;
use super::rknpu::Rknpu;
use super::rocket::Rocket;
use super::uapi::drm;
use super::uapi::kernel::{Kernel, Lock};
use super::{Backend, Cpu, Device, Options, Sim};
use crate::error::{Error, Result};
use crate::map::Pack;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What [`Backend::Auto`] chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picked {
    /// Name and reason.
    pub why: String,
    /// Whether there is an NPU, so that a person wants to hear of it.
    pub npu: bool,
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
