//! The mainline driver (`include/uapi/drm/rocket_accel.h`).

use super::kernel::{Fd, Kernel};
use super::{READ_WRITE, WRITE, request};
use bytemuck::{Pod, Zeroable};
use std::io;

/// `struct drm_rocket_create_bo`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct CreateBo {
    /// Bytes.
    pub size: u32,
    /// GEM handle, out.
    pub handle: u32,
    /// IOVA, out.
    pub dma_address: u64,
    /// mmap offset, out.
    pub offset: u64,
}

/// `struct drm_rocket_task`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Task {
    /// IOVA of the stream.
    pub regcmd: u32,
    /// Words, trailer included.
    pub regcmd_count: u32,
}

/// `struct drm_rocket_job`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Job {
    /// Address of [`Task`]s.
    pub tasks: u64,
    /// Address of u32 handles that the job reads.
    pub in_bo_handles: u64,
    /// Address of u32 handles that it writes.
    pub out_bo_handles: u64,
    /// Tasks.
    pub task_count: u32,
    /// `size_of::<Task>()`
    pub task_struct_size: u32,
    /// Handles read.
    pub in_bo_handle_count: u32,
    /// Handles written.
    pub out_bo_handle_count: u32,
}

/// `struct drm_rocket_submit`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Submit {
    /// Address of [`Job`]s.
    pub jobs: u64,
    /// Jobs.
    pub job_count: u32,
    /// `size_of::<Job>()`
    pub job_struct_size: u32,
    /// Zero.
    pub reserved: u64,
}

/// `struct drm_rocket_prep_bo`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct PrepBo {
    /// GEM handle.
    pub handle: u32,
    /// Zero.
    pub reserved: u32,
    /// Absolute CLOCK_MONOTONIC deadline.
    pub timeout_ns: i64,
}

/// `struct drm_rocket_fini_bo`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct FiniBo {
    /// GEM handle.
    pub handle: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = {
    assert!(size_of::<CreateBo>() == 24 && size_of::<Submit>() == 24 && size_of::<Job>() == 40);
    assert!(size_of::<Task>() == 8 && size_of::<PrepBo>() == 16 && size_of::<FiniBo>() == 8);
    assert!(CREATE_BO == 0xc018_6440 && SUBMIT == 0x4018_6441);
};

/// DRM_IOCTL_ROCKET_CREATE_BO
pub const CREATE_BO: u32 = request(READ_WRITE, b'd', 0x40, size_of::<CreateBo>());
/// DRM_IOCTL_ROCKET_SUBMIT
pub const SUBMIT: u32 = request(WRITE, b'd', 0x41, size_of::<Submit>());
/// DRM_IOCTL_ROCKET_PREP_BO
pub const PREP_BO: u32 = request(WRITE, b'd', 0x42, size_of::<PrepBo>());
/// DRM_IOCTL_ROCKET_FINI_BO
pub const FINI_BO: u32 = request(WRITE, b'd', 0x43, size_of::<FiniBo>());
/// DRM_IOCTL_GEM_CLOSE
pub const GEM_CLOSE: u32 = request(WRITE, b'd', 0x09, size_of::<FiniBo>());

/// Allocates.
///
/// # Errors
/// What the kernel says.
pub fn create(kernel: &dyn Kernel, fd: Fd, size: u32) -> io::Result<CreateBo> {
    let mut bo = CreateBo {
        size,
        ..CreateBo::default()
    };
    // SAFETY: CREATE_BO takes this struct; the addresses in it are outputs.
    unsafe { kernel.ioctl(fd, CREATE_BO, bytemuck::bytes_of_mut(&mut bo)) }?;
    Ok(bo)
}

/// Waits until the device is done with a buffer, then lets the CPU in.
///
/// # Errors
/// What the kernel says; a timeout is `TimedOut` or `WouldBlock`.
pub fn prepare(kernel: &dyn Kernel, fd: Fd, handle: u32, deadline_ns: i64) -> io::Result<()> {
    let mut prep = PrepBo {
        handle,
        reserved: 0,
        timeout_ns: deadline_ns,
    };
    // SAFETY: PREP_BO takes this struct, which holds no address.
    unsafe { kernel.ioctl(fd, PREP_BO, bytemuck::bytes_of_mut(&mut prep)) }
}

/// Ends CPU access to a buffer.
///
/// # Errors
/// What the kernel says.
pub fn finish(kernel: &dyn Kernel, fd: Fd, handle: u32) -> io::Result<()> {
    let mut fini = FiniBo {
        handle,
        reserved: 0,
    };
    // SAFETY: FINI_BO takes this struct, which holds no address.
    unsafe { kernel.ioctl(fd, FINI_BO, bytemuck::bytes_of_mut(&mut fini)) }
}

/// Frees a buffer.
///
/// # Errors
/// What the kernel says.
pub fn close(kernel: &dyn Kernel, fd: Fd, handle: u32) -> io::Result<()> {
    let mut close = FiniBo {
        handle,
        reserved: 0,
    };
    // SAFETY: GEM_CLOSE takes a handle and padding, the layout of this struct.
    unsafe { kernel.ioctl(fd, GEM_CLOSE, bytemuck::bytes_of_mut(&mut close)) }
}

/// One job per task, each reading `reads` and writing `writes`.
///
/// # Errors
/// What the kernel says.
pub fn submit(
    kernel: &dyn Kernel,
    fd: Fd,
    tasks: &[Task],
    reads: &[u32],
    writes: &[u32],
) -> io::Result<()> {
    let jobs: Vec<Job> = tasks
        .iter()
        .map(|task| Job {
            tasks: std::ptr::from_ref(task) as u64,
            in_bo_handles: reads.as_ptr() as u64,
            out_bo_handles: writes.as_ptr() as u64,
            task_count: 1,
            task_struct_size: size_of::<Task>() as u32,
            in_bo_handle_count: reads.len() as u32,
            out_bo_handle_count: writes.len() as u32,
        })
        .collect();
    let mut submit = Submit {
        jobs: jobs.as_ptr() as u64,
        job_count: jobs.len() as u32,
        job_struct_size: size_of::<Job>() as u32,
        reserved: 0,
    };
    // SAFETY: SUBMIT takes this struct; every address in it and in the jobs points to that many elements
    // that outlive the call, which only reads them.
    unsafe { kernel.ioctl(fd, SUBMIT, bytemuck::bytes_of_mut(&mut submit)) }
}
