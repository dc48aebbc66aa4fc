//! The vendor driver: native buffers, linked chains, one NONBLOCK submit per core, doorbells.

use super::Options;
use super::jobs::{Job, Jobs, Span, task_arrays};
use super::node::{self, Node};
use super::queue::Driver;
use super::slice;
use super::uapi::kernel::Fd;
use super::uapi::memory::Mapping;
use super::uapi::rknpu::{self as uapi, MemCreate, MemSync, SubcoreTask, Submit, Task};
use super::uapi::{dma_buf, drm};
use crate::error::{Error, Result};
use crate::map::Pack;
use ork_formats::model::{NpuPlan, Region};
use ork_formats::regcmd;
use std::sync::Arc;

/// Not a possible int32 result: the doorbell has not rung.
const SENTINEL: i32 = crate::exec::SENTINEL;
/// The kernel's NONBLOCK path compares this with microseconds, its blocking path with milliseconds.
const NONBLOCK_TIMEOUT: u32 = 60_000_000;
/// Milliseconds; the kernel waits up to three times as long.
const BLOCKING_TIMEOUT: u32 = 2_000;
/// One dma-heap allocation of 68 MB has hung; larger extents stay native.
const IMPORT_MOST: u64 = 16 << 20;

/// One allocation of the driver's.
struct Buffer {
    handle: u32,
    obj_addr: u64,
    /// The dma-buf of an import.
    import: Option<Fd>,
}

/// Buffers and file of one open device; freed in reverse when dropped.
struct Held {
    node: Node,
    buffers: Vec<Buffer>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let (kernel, fd) = (&*self.node.kernel, self.node.fd);
        for buffer in self.buffers.drain(..).rev() {
            // Nothing to be done about a refusal on the way out; closing the file frees what is left.
            let _ = uapi::destroy(kernel, fd, buffer.handle, buffer.obj_addr);
            if let Some(import) = buffer.import {
                kernel.close(import);
            }
        }
    }
}

pub(super) struct Rknpu {
    held: Held,
    memory: Arc<Vec<Mapping>>,
    /// (extent, first task) of every chain.
    arrays: Vec<(u32, u32)>,
    /// One program per submit: chains over imported buffers have wedged the fetch engine.
    single: bool,
    /// Something was handed over since the kernel last answered a blocking submit.
    pending: bool,
    warm: Vec<Job>,
}

impl Rknpu {
    /// Allocates every extent in plan order, copies and relocates the NPU slice, warms the buffers.
    pub(super) fn open(node: Node, pack: &Pack, jobs: &Jobs, options: &Options) -> Result<Self> {
        let caps = pack.reader().caps();
        let version = uapi::action(&*node.kernel, node.fd, uapi::GET_DRV_VERSION)
            .map_err(|e| node.failed("its version is unreadable", &e))?;
        let dotted = |v: u32| format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100);
        if version < caps.driver_min.value && !options.force_driver {
            return Err(Error::Busy(format!(
                "{}: rknpu driver {} is older than {}; update the kernel, or try --force-driver",
                node.path.display(),
                dotted(version),
                dotted(caps.driver_min.value)
            )));
        }
        let plan = pack.reader().manifest().npu.as_ref();
        let plan = plan.ok_or_else(node::no_plan)?;
        let (held, mut memory, bases) = allocate(node, plan, options.import)?;
        let arrays = task_arrays(jobs, plan, caps.task_bytes.value).ok_or_else(|| {
            Error::Input("the pack's task extents are too small for its programs".into())
        })?;
        slice::load(pack, plan, &bases, &mut memory);
        write_tasks(plan, jobs, &bases, &arrays, &mut memory);
        let out = Self {
            warm: warm_jobs(jobs),
            held,
            memory: Arc::new(memory),
            arrays,
            single: options.import,
            pending: false,
        };
        for extent in 0..plan.extents.len() as u32 {
            out.sync_all(extent, uapi::TO_DEVICE)?;
        }
        out.warm_up()?;
        Ok(out)
    }

    /// The mapped extents.
    pub(super) fn memory(&self) -> Arc<Vec<Mapping>> {
        Arc::clone(&self.memory)
    }

    fn sync(&self, extent: u32, offset: u64, bytes: u64, flags: u32) -> Result<()> {
        let buffer = &self.held.buffers[extent as usize];
        let (kernel, fd) = (&*self.held.node.kernel, self.held.node.fd);
        let done = match buffer.import {
            // MEM_SYNC does not cover imports.
            Some(import) => dma_buf::access(kernel, import, flags & uapi::TO_DEVICE != 0),
            None => uapi::sync(
                kernel,
                fd,
                MemSync {
                    flags,
                    obj_addr: buffer.obj_addr,
                    offset,
                    size: bytes,
                    ..MemSync::default()
                },
            ),
        };
        done.map_err(|e| self.held.node.failed("a cache sync", &e))
    }

    fn sync_all(&self, extent: u32, flags: u32) -> Result<()> {
        let bytes = self.memory[extent as usize].len() as u64;
        self.sync(extent, 0, bytes, flags)
    }

    fn sync_span(&self, span: Span, flags: u32) -> Result<()> {
        let offset = u64::from(span.at.offset);
        self.sync(span.at.extent, offset, span.bytes, flags)
    }

    /// `count` tasks of a chain from its task `skip` on, on the chain's core.
    fn submit_tasks(
        &self,
        job: &Job,
        part: usize,
        skip: u32,
        count: u32,
        flags: u32,
    ) -> Result<()> {
        let part = &job.parts[part];
        let (extent, first) = self.arrays[part.index as usize];
        let run = SubcoreTask {
            start: first + skip,
            number: count,
        };
        let mut subcore_task = [SubcoreTask::default(); 5];
        // The kernel reads entry `core` or `core + 2`, as it counts cores; all that may be read are set.
        subcore_task[..3].fill(run);
        let submit = Submit {
            flags,
            timeout: match flags & uapi::NONBLOCK {
                0 => BLOCKING_TIMEOUT,
                _ => NONBLOCK_TIMEOUT,
            },
            task_start: run.start,
            task_number: run.number,
            task_obj_addr: self.held.buffers[extent as usize].obj_addr,
            core_mask: 1 << part.chain.core,
            fence_fd: -1,
            subcore_task,
            ..Submit::default()
        };
        let node = &self.held.node;
        uapi::submit(&*node.kernel, node.fd, submit)
            .map(drop)
            .map_err(|e| node.failed("a submit", &e))
    }

    /// The first job after an allocation or a reset may leave its output as it was: one program per core
    /// and half runs blocking, alone (a cold chain is refused), and its result is not used.
    fn warm_up(&self) -> Result<()> {
        for job in &self.warm {
            for part in 0..job.parts.len() {
                self.submit_tasks(job, part, 0, 1, uapi::BLOCKING)?;
            }
        }
        Ok(())
    }

    /// The last word of program `i` of a part: it is written last.
    fn rang(&self, job: &Job, part: usize) -> bool {
        let at = job.parts[part].doorbell;
        self.memory[at.extent as usize].poll(at.offset as usize) != SENTINEL
    }
}

impl Drop for Rknpu {
    /// A doorbell rings before the kernel has put its job away. Blocking submits queue behind whatever is
    /// left, so that no buffer is freed under it; the kernel bounds them.
    fn drop(&mut self) {
        if self.pending {
            // On the way out there is nothing to be done about a refusal.
            let _ = self.warm_up();
        }
    }
}

impl Driver for Rknpu {
    fn name(&self) -> &'static str {
        "rknpu"
    }

    fn submit(&mut self, job: &Job) -> Result<u64> {
        for part in &job.parts {
            self.sync_span(part.a, uapi::TO_DEVICE)?;
            // The sentinels, and no dirty line that could be written over a result.
            self.sync_span(part.c, uapi::TO_DEVICE)?;
        }
        self.pending = true;
        let mut submits = 0;
        for (i, part) in job.parts.iter().enumerate() {
            let count = part.chain.count;
            match self.single {
                true => (0..count)
                    .try_for_each(|skip| self.submit_tasks(job, i, skip, 1, uapi::BLOCKING))?,
                false => self.submit_tasks(job, i, 0, count, uapi::DOORBELL)?,
            }
            submits += if self.single { u64::from(count) } else { 1 };
        }
        Ok(submits)
    }

    fn poll(&mut self, job: &Job) -> Result<bool> {
        if !(0..job.parts.len()).all(|part| self.rang(job, part)) {
            return Ok(false);
        }
        for part in &job.parts {
            self.sync_span(part.c, uapi::FROM_DEVICE)?;
        }
        Ok(true)
    }

    fn reset(&mut self) -> Result<()> {
        let node = &self.held.node;
        // Refused or not, nothing more may be asked of what is in flight.
        self.pending = false;
        uapi::action(&*node.kernel, node.fd, uapi::ACT_RESET)
            .map_err(|e| node.failed("a reset", &e))?;
        self.warm_up()
    }
}

/// Fills the task arrays: one descriptor per program.
fn write_tasks(
    plan: &NpuPlan,
    jobs: &Jobs,
    bases: &[u32],
    arrays: &[(u32, u32)],
    memory: &mut [Mapping],
) {
    for part in jobs.iter().flat_map(|j| &j.parts) {
        let (extent, first) = arrays[part.index as usize];
        for i in 0..part.chain.count {
            let program = u64::from(part.chain.first + i);
            let task = Task {
                op_idx: program as u32,
                enable_mask: regcmd::ENABLE_MATMUL,
                int_mask: uapi::INT_MASK,
                int_clear: uapi::INT_CLEAR,
                regcfg_amount: regcmd::REGS as u32,
                regcmd_addr: u64::from(slice::program_address(plan, bases, program)),
                ..Task::default()
            };
            let at = (first + i) as usize * size_of::<Task>();
            memory[extent as usize].bytes_mut()[at..][..size_of::<Task>()]
                .copy_from_slice(bytemuck::bytes_of(&task));
        }
    }
}

/// A job per half that touches every core's buffers.
fn warm_jobs(jobs: &Jobs) -> Vec<Job> {
    (0..2)
        .filter_map(|half| {
            let of_half = jobs.iter().filter(|j| j.half == half);
            of_half.max_by_key(|j| (j.parts.len(), j.rows)).cloned()
        })
        .collect()
}

type Allocated = (Held, Vec<Mapping>, Vec<u32>);

fn allocate(node: Node, plan: &NpuPlan, import: bool) -> Result<Allocated> {
    let kernel = Arc::clone(&node.kernel);
    let fd = node.fd;
    let total: u64 = plan.extents.iter().map(|e| e.bytes).sum();
    let mut held = Held {
        node,
        buffers: Vec::new(),
    };
    let heap = match import {
        true => Some(
            kernel
                .open(dma_buf::HEAP.as_ref())
                .map_err(|e| Error::Busy(format!("{}: {e}; import needs it", dma_buf::HEAP)))?,
        ),
        false => None,
    };
    let (mut memory, mut bases, mut done) = (Vec::new(), Vec::new(), 0);
    let result = plan.extents.iter().enumerate().try_for_each(|(i, extent)| {
        let refused =
            |node: &Node, e: &std::io::Error| node::no_memory(node, i, plan, done, total, e);
        let (movable, small) = (
            matches!(extent.region, Region::Weights | Region::A | Region::Ring),
            extent.bytes <= IMPORT_MOST,
        );
        let dma_buf = match heap {
            Some(heap) if movable && small => Some(
                dma_buf::allocate(&*kernel, heap, extent.bytes)
                    .map_err(|e| refused(&held.node, &e))?,
            ),
            _ => None,
        };
        let request = match dma_buf {
            Some(buffer) => MemCreate {
                handle: drm::import(&*kernel, fd, buffer).map_err(|e| refused(&held.node, &e))?,
                flags: uapi::DATA,
                ..MemCreate::default()
            },
            None => MemCreate {
                flags: match extent.region {
                    Region::Tasks => uapi::TASKS,
                    _ => uapi::DATA,
                },
                size: extent.bytes,
                ..MemCreate::default()
            },
        };
        let made = uapi::create(&*kernel, fd, request).map_err(|e| refused(&held.node, &e))?;
        held.buffers.push(Buffer {
            handle: made.handle,
            obj_addr: made.obj_addr,
            import: dma_buf,
        });
        bases.push(node::address(&held.node, made.dma_addr, extent.bytes)?);
        let len = extent.bytes as usize;
        let mapped = match dma_buf {
            Some(buffer) => Mapping::new(&kernel, buffer, 0, len),
            None => uapi::map_offset(&*kernel, fd, made.handle)
                .and_then(|offset| Mapping::new(&kernel, fd, offset, len)),
        };
        memory.push(mapped.map_err(|e| refused(&held.node, &e))?);
        if dma_buf.is_none() {
            // Fresh pages may have dirty lines of their last owner.
            let sync = MemSync {
                flags: uapi::TO_DEVICE | uapi::FROM_DEVICE,
                obj_addr: made.obj_addr,
                size: extent.bytes,
                ..MemSync::default()
            };
            uapi::sync(&*kernel, fd, sync).map_err(|e| refused(&held.node, &e))?;
        }
        done += extent.bytes;
        Ok(())
    });
    if let Some(heap) = heap {
        kernel.close(heap);
    }
    result?;
    node::disjoint(&held.node, plan, &bases)?;
    Ok((held, memory, bases))
}
