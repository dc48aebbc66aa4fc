//! The mainline driver's ioctls.

use crate::engine::Job;
use crate::kernel::{EBUSY, EINVAL, ENOMEM, argument, bad, errno, now_ns, offset_of};
use crate::{Fault, Inner, State};
use ork_formats::regcmd;
use ork_loader::device::uapi::rocket::{
    self as uapi, CREATE_BO, CreateBo, FINI_BO, FiniBo, GEM_CLOSE, PREP_BO, PrepBo, SUBMIT, Submit,
    Task,
};
use std::io;
use std::sync::MutexGuard;
use std::time::Duration;

pub(crate) fn ioctl(
    inner: &Inner,
    mut state: MutexGuard<'_, State>,
    request: u32,
    bytes: &mut [u8],
) -> io::Result<()> {
    match request {
        CREATE_BO => create(inner, &mut state, argument(bytes)?),
        GEM_CLOSE => state.free(argument::<FiniBo>(bytes)?.handle),
        FINI_BO => {
            let handle = argument::<FiniBo>(bytes)?.handle;
            let buffer = state.buffers.get_mut(&handle).ok_or_else(bad)?;
            let len = buffer.len();
            buffer.clean(0, len);
            Ok(())
        }
        PREP_BO => prepare(inner, state, argument(bytes)?),
        SUBMIT => submit(inner, &mut state, argument(bytes)?),
        _ => errno(EINVAL),
    }
}

/// Bottom-up.
fn create(inner: &Inner, state: &mut State, create: &mut CreateBo) -> io::Result<()> {
    let bytes = u64::from(create.size);
    for fault in &inner.config.faults {
        if let Fault::NoMemoryAt(limit) = fault
            && *limit < state.allocated + bytes
        {
            return errno(ENOMEM);
        }
    }
    let address = match inner.fault(|f| *f == Fault::HighAddresses) {
        true => 1 << 33,
        false => state.edge,
    };
    if !inner.fault(|f| *f == Fault::OverlappingAddresses) {
        state.edge += bytes.next_multiple_of(inner.config.caps.page.value);
    }
    create.handle = state.add_buffer(0, address, create.size as usize);
    create.dma_address = address;
    create.offset = offset_of(create.handle);
    state.ledger.created += bytes;
    Ok(())
}

fn prepare(inner: &Inner, mut guard: MutexGuard<'_, State>, prep: &PrepBo) -> io::Result<()> {
    loop {
        let state = &mut *guard;
        let buffer = state.buffers.get_mut(&prep.handle).ok_or_else(bad)?;
        if buffer.users == 0 {
            let len = buffer.len();
            buffer.invalidate(0, len);
            return Ok(());
        }
        let left = prep.timeout_ns - now_ns();
        if left <= 0 {
            return errno(EBUSY);
        }
        guard = inner
            .changed
            .wait_timeout(guard, Duration::from_nanos(left as u64))
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .0;
    }
}

fn submit(inner: &Inner, state: &mut State, submit: &Submit) -> io::Result<()> {
    if submit.job_struct_size as usize != size_of::<uapi::Job>() {
        return errno(EINVAL);
    }
    for i in 0..submit.job_count as usize {
        // SAFETY: `jobs` points to `job_count` jobs, by the ioctl's contract.
        let job: uapi::Job = unsafe { (submit.jobs as *const uapi::Job).add(i).read_unaligned() };
        if job.task_struct_size as usize != size_of::<Task>() || job.task_count != 1 {
            state.violate("one task of the right size per job");
            return errno(EINVAL);
        }
        // SAFETY: `tasks` points to `task_count` tasks, by the ioctl's contract.
        let task: Task = unsafe { (job.tasks as *const Task).read_unaligned() };
        if task.regcmd_count as usize != regcmd::WORDS {
            state.violate("a task does not write all registers");
            return errno(EINVAL);
        }
        let mut handles = list(job.in_bo_handles, job.in_bo_handle_count);
        handles.extend(list(job.out_bo_handles, job.out_bo_handle_count));
        if handles.iter().any(|h| !state.buffers.contains_key(h)) {
            return errno(EINVAL);
        }
        let number = state.ledger.submits;
        state.ledger.submits += 1;
        if inner.fault(|f| *f == Fault::RefuseSubmit(number)) {
            return errno(EINVAL);
        }
        for handle in &handles {
            if let Some(buffer) = state.buffers.get_mut(handle) {
                buffer.users += 1;
            }
        }
        let core = number as usize % state.queues.len();
        state.queues[core].push_back(Job {
            number,
            programs: vec![task.regcmd],
            linked: false,
            handles,
            epoch: state.resets,
        });
        state.running += 1;
    }
    inner.changed.notify_all();
    Ok(())
}

fn list(at: u64, count: u32) -> Vec<u32> {
    (0..count as usize)
        // SAFETY: the address points to `count` handles, by the ioctl's contract.
        .map(|i| unsafe { (at as *const u32).add(i).read_unaligned() })
        .collect()
}
