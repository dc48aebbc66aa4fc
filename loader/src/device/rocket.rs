//! The mainline driver: one task per job, the kernel waits and maintains caches.

use super::jobs::{Job, Jobs};
use super::node::{self, Node};
use super::queue::Driver;
use super::slice;
use super::uapi::memory::Mapping;
use super::uapi::rocket::{self as uapi, Task};
use crate::error::Result;
use crate::map::Pack;
use ork_formats::model::{NpuPlan, Region};
use ork_formats::regcmd;
use std::io::ErrorKind;
use std::sync::Arc;

/// How long one look waits.
const LOOK_NS: i64 = 200_000;
/// The kernel ends a job after 500 ms; whoever waits longer than this waits for a broken device.
const HUNG_NS: i64 = 5_000_000_000;

/// Handles and file of one open device; freed when dropped.
struct Held {
    node: Node,
    handles: Vec<u32>,
}

impl Drop for Held {
    fn drop(&mut self) {
        for handle in self.handles.drain(..).rev() {
            // Nothing to be done about a refusal on the way out; closing the file frees what is left.
            let _ = uapi::close(&*self.node.kernel, self.node.fd, handle);
        }
    }
}

pub(super) struct Rocket {
    held: Held,
    memory: Arc<Vec<Mapping>>,
    /// Handles of weights, programs and A buffers: what jobs read.
    reads: Vec<u32>,
    /// Handles of the ring: what jobs write.
    rings: Vec<u32>,
    /// Address of every program.
    programs: Vec<u32>,
}

impl Rocket {
    /// Allocates every extent in plan order, copies and relocates the NPU slice.
    pub(super) fn open(node: Node, pack: &Pack, jobs: &Jobs) -> Result<Self> {
        let plan = pack.reader().manifest().npu.as_ref();
        let plan = plan.ok_or_else(node::no_plan)?;
        let (held, mut memory, bases) = allocate(node, plan)?;
        slice::load(pack, plan, &bases, &mut memory);
        let handles = |wanted: &[Region]| -> Vec<u32> {
            let extents = plan.extents.iter().zip(&held.handles);
            extents
                .filter(|(e, _)| wanted.contains(&e.region))
                .map(|(_, handle)| *handle)
                .collect()
        };
        let reads = handles(&[Region::Weights, Region::Programs, Region::A]);
        let rings = handles(&[Region::Ring]);
        let programs = (0..plan.programs.len() as u64)
            .map(|p| slice::program_address(plan, &bases, p))
            .collect();
        let out = Self {
            held,
            memory: Arc::new(memory),
            reads,
            rings,
            programs,
        };
        for handle in &out.held.handles {
            out.finish(*handle)?;
        }
        out.warm_up(jobs)?;
        Ok(out)
    }

    /// The mapped extents.
    pub(super) fn memory(&self) -> Arc<Vec<Mapping>> {
        Arc::clone(&self.memory)
    }

    fn finish(&self, handle: u32) -> Result<()> {
        let node = &self.held.node;
        uapi::finish(&*node.kernel, node.fd, handle).map_err(|e| node.failed("FINI_BO", &e))
    }

    /// Whether the device is done with a buffer, within a short wait.
    fn prepare(&self, handle: u32) -> Result<bool> {
        let node = &self.held.node;
        let deadline = node.kernel.now_ns() + LOOK_NS;
        match uapi::prepare(&*node.kernel, node.fd, handle, deadline) {
            Ok(()) => Ok(true),
            Err(e) if matches!(e.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => Ok(false),
            // drm_gem_shmem waits on the reservation: an expired deadline is EBUSY or ETIMEDOUT.
            Err(e) if e.kind() == ErrorKind::ResourceBusy => Ok(false),
            Err(e) => Err(node.failed("PREP_BO", &e)),
        }
    }

    /// The first job into a fresh buffer may leave it as it was.
    fn warm_up(&self, jobs: &Jobs) -> Result<()> {
        for half in 0..2 {
            let of_half = jobs.iter().filter(|j| j.half == half);
            let Some(job) = of_half.max_by_key(|j| (j.parts.len(), j.rows)) else {
                continue;
            };
            self.hand_over(job)?;
            for handle in self.writes(job) {
                self.wait_for(handle, "the first job")?;
            }
        }
        Ok(())
    }

    /// Waits until nothing runs on a buffer, much longer than the kernel lets a job hang.
    fn wait_for(&self, handle: u32, what: &str) -> Result<()> {
        let node = &self.held.node;
        let start = node.kernel.now_ns();
        while !self.prepare(handle)? {
            if HUNG_NS < node.kernel.now_ns() - start {
                return Err(node.failed(what, &ErrorKind::TimedOut.into()));
            }
        }
        Ok(())
    }

    /// Handles of the ring extents that a job writes.
    fn writes(&self, job: &Job) -> Vec<u32> {
        let extents = job.parts.iter().map(|p| p.c.at.extent);
        let mut handles: Vec<u32> = extents.map(|e| self.held.handles[e as usize]).collect();
        handles.sort_unstable();
        handles.dedup();
        handles
    }

    fn hand_over(&self, job: &Job) -> Result<u64> {
        let node = &self.held.node;
        let mut submits = 0;
        for part in &job.parts {
            let (a, c) = (part.a.at.extent as usize, part.c.at.extent as usize);
            self.finish(self.held.handles[a])?;
            self.finish(self.held.handles[c])?;
            let first = part.chain.first as usize;
            let tasks: Vec<Task> = self.programs[first..first + part.chain.count as usize]
                .iter()
                .map(|at| Task {
                    regcmd: *at,
                    regcmd_count: regcmd::WORDS as u32,
                })
                .collect();
            let writes = [self.held.handles[c]];
            uapi::submit(&*node.kernel, node.fd, &tasks, &self.reads, &writes)
                .map_err(|e| node.failed("a submit", &e))?;
            submits += 1;
        }
        Ok(submits)
    }
}

impl Drop for Rocket {
    /// No buffer is freed under a job.
    fn drop(&mut self) {
        // On the way out there is nothing to be done about a hung device.
        let _ = self.reset();
    }
}

impl Driver for Rocket {
    fn name(&self) -> &'static str {
        "rocket"
    }

    fn submit(&mut self, job: &Job) -> Result<u64> {
        self.hand_over(job)
    }

    fn poll(&mut self, job: &Job) -> Result<bool> {
        for handle in self.writes(job) {
            if !self.prepare(handle)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The kernel's scheduler ends a hung job and resets its core by itself, after half a second. Nothing
    /// may be handed over before that: a late job would write over a later result.
    fn reset(&mut self) -> Result<()> {
        for handle in &self.rings {
            self.wait_for(*handle, "the reset")?;
        }
        Ok(())
    }
}

fn allocate(node: Node, plan: &NpuPlan) -> Result<(Held, Vec<Mapping>, Vec<u32>)> {
    let kernel = Arc::clone(&node.kernel);
    let fd = node.fd;
    let total: u64 = plan.extents.iter().map(|e| e.bytes).sum();
    let mut held = Held {
        node,
        handles: Vec::new(),
    };
    let (mut memory, mut bases, mut done) = (Vec::new(), Vec::new(), 0);
    for (i, extent) in plan.extents.iter().enumerate() {
        let refused =
            |node: &Node, e: &std::io::Error| node::no_memory(node, i, plan, done, total, e);
        let bo =
            uapi::create(&*kernel, fd, extent.bytes as u32).map_err(|e| refused(&held.node, &e))?;
        held.handles.push(bo.handle);
        bases.push(node::address(&held.node, bo.dma_address, extent.bytes)?);
        let mapped = Mapping::new(&kernel, fd, bo.offset, extent.bytes as usize);
        memory.push(mapped.map_err(|e| refused(&held.node, &e))?);
        done += extent.bytes;
    }
    node::disjoint(&held.node, plan, &bases)?;
    Ok((held, memory, bases))
}
