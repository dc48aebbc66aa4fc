//! The vendor driver's ioctls.

use crate::engine::Job;
use crate::kernel::{EINVAL, EIO, ENOMEM, argument, bad, errno, offset_of};
use crate::{Fault, Inner, State};
use ork_loader::device::uapi::rknpu::{
    ACT_RESET, ACTION, Action, GET_DRV_VERSION, INT_MASK, KERNEL_MAPPING, MEM_CREATE, MEM_DESTROY,
    MEM_MAP, MEM_SYNC, MemCreate, MemDestroy, MemMap, MemSync, NONBLOCK, SUBMIT, SubcoreTask,
    Submit, TO_DEVICE, Task,
};
use std::io;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

/// Cookies are handles far from anything a program would make up.
const COOKIE: u64 = 0xffff_ff80_0000_0000;

fn handle_of(cookie: u64) -> u32 {
    cookie.wrapping_sub(COOKIE) as u32
}

pub(crate) fn ioctl(
    inner: &Inner,
    mut state: MutexGuard<'_, State>,
    locked: bool,
    request: u32,
    bytes: &mut [u8],
) -> io::Result<()> {
    match request {
        ACTION => action(inner, &mut state, argument(bytes)?),
        MEM_CREATE => create(inner, &mut state, argument(bytes)?),
        MEM_MAP => {
            let map: &mut MemMap = argument(bytes)?;
            map.offset = offset_of(map.handle);
            Ok(())
        }
        MEM_DESTROY => state.free(argument::<MemDestroy>(bytes)?.handle),
        MEM_SYNC => sync(&mut state, argument(bytes)?),
        SUBMIT => {
            if !locked {
                state.violate("a client without the lock submitted");
            }
            submit(inner, state, argument(bytes)?)
        }
        _ => errno(EINVAL),
    }
}

fn action(inner: &Inner, state: &mut State, action: &mut Action) -> io::Result<()> {
    match action.flags {
        GET_DRV_VERSION => action.value = inner.config.version,
        ACT_RESET => {
            if inner.fault(|f| *f == Fault::ResetFails) {
                return errno(EIO);
            }
            state.resets += 1;
            state.cold = true;
            for buffer in state.buffers.values_mut() {
                buffer.cold = true;
            }
        }
        _ => return errno(EINVAL),
    }
    Ok(())
}

fn create(inner: &Inner, state: &mut State, create: &mut MemCreate) -> io::Result<()> {
    let imported = create.handle != 0;
    let bytes = match imported {
        true => state.buffers.get(&create.handle).ok_or_else(bad)?.len() as u64,
        false => create.size,
    };
    for fault in &inner.config.faults {
        if let Fault::NoMemoryAt(limit) = fault
            && *limit < state.allocated + bytes
        {
            return errno(ENOMEM);
        }
    }
    let address = address(inner, state, bytes);
    if !imported {
        create.handle = state.add_buffer(create.flags, address, bytes as usize);
    }
    let buffer = state.buffers.get_mut(&create.handle).ok_or_else(bad)?;
    (buffer.imported, buffer.address) = (imported, address);
    create.obj_addr = COOKIE + u64::from(create.handle);
    create.dma_addr = address;
    state.ledger.created += bytes;
    Ok(())
}

/// Top-down, page by page.
fn address(inner: &Inner, state: &mut State, bytes: u64) -> u64 {
    let page = inner.config.caps.page.value;
    if inner.fault(|f| *f == Fault::HighAddresses) {
        return 1 << 33;
    }
    if inner.fault(|f| *f == Fault::OverlappingAddresses) && !state.buffers.is_empty() {
        return state.edge;
    }
    let window = inner.config.caps.iova_budget.value;
    if window < state.allocated + bytes {
        state.violate("the IOVA window is exhausted: the kernel oopses");
    }
    state.edge = state.edge.saturating_sub(bytes.next_multiple_of(page));
    state.edge
}

fn sync(state: &mut State, sync: &MemSync) -> io::Result<()> {
    let handle = handle_of(sync.obj_addr);
    let buffer = state.buffers.get_mut(&handle).ok_or_else(bad)?;
    if buffer.imported {
        state.violate("MEM_SYNC of an imported buffer does nothing");
        return Ok(());
    }
    let (offset, size) = (sync.offset as usize, sync.size as usize);
    if buffer.len() < offset + size {
        return errno(EINVAL);
    }
    match sync.flags & TO_DEVICE != 0 {
        true => buffer.clean(offset, size),
        false => buffer.invalidate(offset, size),
    }
    Ok(())
}

/// What would wedge the board or time out.
fn wedge<T>(state: &mut State, text: &str) -> io::Result<T> {
    state.violate(text);
    errno(EIO)
}

fn submit(inner: &Inner, mut guard: MutexGuard<'_, State>, submit: &mut Submit) -> io::Result<()> {
    let state = &mut *guard;
    let number = state.ledger.submits;
    state.ledger.submits += 1;
    if inner.fault(|f| *f == Fault::RefuseSubmit(number)) {
        return errno(EINVAL);
    }
    let cores = inner.config.caps.cores.value;
    let core = submit.core_mask.trailing_zeros();
    if submit.core_mask.count_ones() != 1 || cores <= core {
        return wedge(state, "a submit must name exactly one core");
    }
    let run = SubcoreTask {
        start: submit.task_start,
        number: submit.task_number,
    };
    if submit.subcore_task[..3].iter().any(|s| *s != run) || submit.task_number == 0 {
        return wedge(state, "the subcore entries are not filled");
    }
    let blocking = submit.flags & NONBLOCK == 0;
    if blocking && state.cold && 1 < submit.task_number {
        return errno(EINVAL);
    }
    if !blocking && submit.timeout < 1_000_000 {
        return wedge(
            state,
            "the NONBLOCK path compares the timeout with microseconds",
        );
    }
    let Some(array) = state.buffers.get(&handle_of(submit.task_obj_addr)) else {
        return wedge(state, "the task array is no buffer");
    };
    if array.flags & KERNEL_MAPPING == 0 {
        return wedge(state, "the task array has no kernel mapping");
    }
    let size = size_of::<Task>();
    let (start, count) = (submit.task_start as usize, submit.task_number as usize);
    let Some(bytes) = array.kernel_read(start * size, count * size) else {
        return wedge(state, "the task array is too short");
    };
    let tasks: Vec<Task> = bytes
        .chunks_exact(size)
        .map(bytemuck::pod_read_unaligned)
        .collect();
    if tasks.iter().any(|t| t.int_mask != INT_MASK) {
        return wedge(state, "the interrupt mask never matches");
    }
    if tasks.iter().any(|t| t.regcfg_amount != 108) {
        return wedge(state, "a task does not write all registers");
    }
    let handles: Vec<u32> = state.buffers.keys().copied().collect();
    for buffer in state.buffers.values_mut() {
        buffer.users += 1;
    }
    let job = Job {
        number,
        programs: tasks.iter().map(|t| t.regcmd_addr as u32).collect(),
        linked: true,
        handles,
        epoch: state.resets,
    };
    state.queues[core as usize].push_back(job);
    state.running += 1;
    inner.changed.notify_all();
    if blocking {
        let deadline = Instant::now() + Duration::from_millis(u64::from(submit.timeout)) * 3;
        while guard.running != 0 {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return Err(io::ErrorKind::TimedOut.into());
            };
            guard = inner
                .changed
                .wait_timeout(guard, left)
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .0;
        }
        submit.task_counter = submit.task_number;
    }
    Ok(())
}
