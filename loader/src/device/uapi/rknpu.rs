//! The vendor DRM driver (`drivers/rknpu/include/rknpu_ioctl.h`, driver 0.9.8).

use super::kernel::{Fd, Kernel};
use super::{READ_WRITE, request};
use bytemuck::{Pod, Zeroable};
use std::io;
use std::mem::offset_of;

/// `struct rknpu_action`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Action {
    /// Which.
    pub flags: u32,
    /// In or out.
    pub value: u32,
}

/// `struct rknpu_mem_create`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct MemCreate {
    /// GEM handle: out, or in for an import.
    pub handle: u32,
    /// [`DATA`] or [`TASKS`].
    pub flags: u32,
    /// Bytes; 0 for an import.
    pub size: u64,
    /// Kernel cookie, out.
    pub obj_addr: u64,
    /// IOVA, out.
    pub dma_addr: u64,
    /// SRAM bytes.
    pub sram_size: u64,
    /// IOMMU domain.
    pub iommu_domain_id: i32,
    /// Cores of SRAM.
    pub core_mask: u32,
}

/// `struct rknpu_mem_map`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct MemMap {
    /// GEM handle.
    pub handle: u32,
    /// Zero.
    pub reserved: u32,
    /// mmap offset, out.
    pub offset: u64,
}

/// `struct rknpu_mem_destroy`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct MemDestroy {
    /// GEM handle.
    pub handle: u32,
    /// Zero.
    pub reserved: u32,
    /// Kernel cookie.
    pub obj_addr: u64,
}

/// `struct rknpu_mem_sync`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct MemSync {
    /// [`TO_DEVICE`], [`FROM_DEVICE`].
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
    /// Kernel cookie.
    pub obj_addr: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// `struct rknpu_task`: one program of a chain, 40 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Task {
    /// Unused.
    pub flags: u32,
    /// Index, for traces.
    pub op_idx: u32,
    /// Blocks that run: [`ENABLE`].
    pub enable_mask: u32,
    /// Interrupts awaited: [`INT_MASK`]; any other value ends in a timeout.
    pub int_mask: u32,
    /// Interrupts cleared before the start.
    pub int_clear: u32,
    /// Out.
    pub int_status: u32,
    /// Register words, without the trailer.
    pub regcfg_amount: u32,
    /// Offset of the registers; 0.
    pub regcfg_offset: u32,
    /// IOVA of the stream. The struct is packed: this is at byte 32.
    pub regcmd_addr: u64,
}

/// `struct rknpu_subcore_task`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct SubcoreTask {
    /// First task.
    pub start: u32,
    /// Tasks.
    pub number: u32,
}

/// `struct rknpu_submit`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Submit {
    /// [`BLOCKING`] or [`DOORBELL`].
    pub flags: u32,
    /// Milliseconds; the NONBLOCK path compares it with microseconds, so it must be large there.
    pub timeout: u32,
    /// First task.
    pub task_start: u32,
    /// Tasks.
    pub task_number: u32,
    /// Tasks done, out.
    pub task_counter: u32,
    /// 0.
    pub priority: i32,
    /// Kernel cookie of the task array.
    pub task_obj_addr: u64,
    /// IOMMU domain (the older header has `regcfg_obj_addr` here).
    pub iommu_domain_id: u32,
    /// Zero.
    pub reserved: u32,
    /// 0: addresses in tasks are absolute.
    pub task_base_addr: u64,
    /// Nanoseconds, out.
    pub hw_elapse_time: i64,
    /// One bit: one submit per core.
    pub core_mask: u32,
    /// Unused without fences.
    pub fence_fd: i32,
    /// What each core runs; 0, 1 and 2 must be filled.
    pub subcore_task: [SubcoreTask; 5],
}

const _: () = {
    assert!(size_of::<Action>() == 8);
    assert!(size_of::<MemCreate>() == 48 && offset_of!(MemCreate, dma_addr) == 24);
    assert!(offset_of!(MemCreate, iommu_domain_id) == 40);
    assert!(size_of::<MemMap>() == 16 && offset_of!(MemMap, offset) == 8);
    assert!(size_of::<MemDestroy>() == 16 && offset_of!(MemDestroy, obj_addr) == 8);
    assert!(size_of::<MemSync>() == 32 && offset_of!(MemSync, size) == 24);
    assert!(size_of::<Task>() == 40 && offset_of!(Task, regcmd_addr) == 32);
    assert!(size_of::<SubcoreTask>() == 8);
    assert!(size_of::<Submit>() == 104 && offset_of!(Submit, task_obj_addr) == 24);
    assert!(offset_of!(Submit, task_base_addr) == 40 && offset_of!(Submit, core_mask) == 56);
    assert!(offset_of!(Submit, subcore_task) == 64);
    assert!(ACTION == 0xc008_6440 && SUBMIT == 0xc068_6441 && MEM_CREATE == 0xc030_6442);
    assert!(MEM_MAP == 0xc010_6443 && MEM_DESTROY == 0xc010_6444 && MEM_SYNC == 0xc020_6445);
};

/// DRM_IOCTL_RKNPU_ACTION
pub const ACTION: u32 = request(READ_WRITE, b'd', 0x40, size_of::<Action>());
/// DRM_IOCTL_RKNPU_SUBMIT
pub const SUBMIT: u32 = request(READ_WRITE, b'd', 0x41, size_of::<Submit>());
/// DRM_IOCTL_RKNPU_MEM_CREATE
pub const MEM_CREATE: u32 = request(READ_WRITE, b'd', 0x42, size_of::<MemCreate>());
/// DRM_IOCTL_RKNPU_MEM_MAP
pub const MEM_MAP: u32 = request(READ_WRITE, b'd', 0x43, size_of::<MemMap>());
/// DRM_IOCTL_RKNPU_MEM_DESTROY
pub const MEM_DESTROY: u32 = request(READ_WRITE, b'd', 0x44, size_of::<MemDestroy>());
/// DRM_IOCTL_RKNPU_MEM_SYNC
pub const MEM_SYNC: u32 = request(READ_WRITE, b'd', 0x45, size_of::<MemSync>());

/// NON_CONTIGUOUS | CACHEABLE | IOMMU_LIMIT_IOVA_ALIGNMENT. Without CACHEABLE the mapping is
/// device-like and an unaligned copy raises SIGBUS.
pub const DATA: u32 = 0x403;
/// [`DATA`] | KERNEL_MAPPING: the kernel reads task arrays itself, and wedges the board without it.
pub const TASKS: u32 = 0x40b;
/// Flag that makes the difference.
pub const KERNEL_MAPPING: u32 = 0x8;
/// Sync after CPU writes.
pub const TO_DEVICE: u32 = 1;
/// Sync before CPU reads.
pub const FROM_DEVICE: u32 = 2;
/// PC | PINGPONG
pub const BLOCKING: u32 = 0x5;
/// PC | NONBLOCK | PINGPONG
pub const DOORBELL: u32 = 0x7;
/// The NONBLOCK bit.
pub const NONBLOCK: u32 = 0x2;
/// DPU group interrupts of both ping-pong register sets.
pub const INT_MASK: u32 = 0x300;
/// CNA, CORE and DPU.
pub const ENABLE: u32 = 0xd;
/// Clears everything.
pub const INT_CLEAR: u32 = 0x1_ffff;
/// GET_DRV_VERSION: major * 10000 + minor * 100 + patch.
pub const GET_DRV_VERSION: u32 = 1;
/// ACT_RESET: soft reset; makes every buffer cold.
pub const ACT_RESET: u32 = 6;

/// One action; returns its value.
///
/// # Errors
/// What the kernel says.
pub fn action(kernel: &dyn Kernel, fd: Fd, flags: u32) -> io::Result<u32> {
    let mut action = Action { flags, value: 0 };
    // SAFETY: ACTION takes this struct, which holds no address.
    unsafe { kernel.ioctl(fd, ACTION, bytemuck::bytes_of_mut(&mut action)) }?;
    Ok(action.value)
}

/// Allocates, or imports when `handle` is not 0.
///
/// # Errors
/// What the kernel says.
pub fn create(kernel: &dyn Kernel, fd: Fd, mut request: MemCreate) -> io::Result<MemCreate> {
    // SAFETY: MEM_CREATE takes this struct; the addresses in it are outputs.
    unsafe { kernel.ioctl(fd, MEM_CREATE, bytemuck::bytes_of_mut(&mut request)) }?;
    Ok(request)
}

/// mmap offset of a buffer.
///
/// # Errors
/// What the kernel says.
pub fn map_offset(kernel: &dyn Kernel, fd: Fd, handle: u32) -> io::Result<u64> {
    let mut map = MemMap {
        handle,
        ..MemMap::default()
    };
    // SAFETY: MEM_MAP takes this struct, which holds no address.
    unsafe { kernel.ioctl(fd, MEM_MAP, bytemuck::bytes_of_mut(&mut map)) }?;
    Ok(map.offset)
}

/// Frees a buffer.
///
/// # Errors
/// What the kernel says.
pub fn destroy(kernel: &dyn Kernel, fd: Fd, handle: u32, obj_addr: u64) -> io::Result<()> {
    let mut destroy = MemDestroy {
        handle,
        obj_addr,
        ..MemDestroy::default()
    };
    // SAFETY: MEM_DESTROY takes this struct; `obj_addr` is a cookie of the kernel's own.
    unsafe { kernel.ioctl(fd, MEM_DESTROY, bytemuck::bytes_of_mut(&mut destroy)) }
}

/// Cleans or invalidates a range of a buffer.
///
/// # Errors
/// What the kernel says.
pub fn sync(kernel: &dyn Kernel, fd: Fd, mut sync: MemSync) -> io::Result<()> {
    // SAFETY: MEM_SYNC takes this struct; `obj_addr` is a cookie of the kernel's own.
    unsafe { kernel.ioctl(fd, MEM_SYNC, bytemuck::bytes_of_mut(&mut sync)) }
}

/// Hands a chain to the NPU.
///
/// # Errors
/// What the kernel says.
pub fn submit(kernel: &dyn Kernel, fd: Fd, mut submit: Submit) -> io::Result<Submit> {
    // SAFETY: SUBMIT takes this struct; `task_obj_addr` is a cookie of the kernel's own.
    unsafe { kernel.ioctl(fd, SUBMIT, bytemuck::bytes_of_mut(&mut submit)) }?;
    Ok(submit)
}
