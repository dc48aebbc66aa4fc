//! dma-heap allocation and CPU access to dma-bufs (Linux `dma-heap.h`, `dma-buf.h`).

use super::kernel::{Fd, Kernel};
use super::{READ_WRITE, WRITE, request};
use bytemuck::{Pod, Zeroable};
use std::io;

/// The heap that every kernel has.
pub const HEAP: &str = "/dev/dma_heap/system";

/// `struct dma_heap_allocation_data`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Allocation {
    /// Bytes.
    pub len: u64,
    /// dma-buf, out.
    pub fd: u32,
    /// O_RDWR | O_CLOEXEC.
    pub fd_flags: u32,
    /// Unused.
    pub heap_flags: u64,
}

const _: () = assert!(size_of::<Allocation>() == 24);

/// DMA_HEAP_IOCTL_ALLOC
pub const ALLOC: u32 = request(READ_WRITE, b'H', 0, size_of::<Allocation>());
/// DMA_BUF_IOCTL_SYNC
pub const SYNC: u32 = request(WRITE, b'b', 0, size_of::<u64>());

/// DMA_BUF_SYNC_READ | DMA_BUF_SYNC_WRITE
const BOTH: u64 = 3;
/// DMA_BUF_SYNC_END
pub const END: u64 = 4;

/// A dma-buf of `len` bytes.
///
/// # Errors
/// What the kernel says.
pub fn allocate(kernel: &dyn Kernel, heap: Fd, len: u64) -> io::Result<Fd> {
    /// O_RDWR | O_CLOEXEC on every Linux ISA we build for.
    const FLAGS: u32 = 0o2 | 0o2_000_000;
    let mut allocation = Allocation {
        len,
        fd_flags: FLAGS,
        ..Allocation::default()
    };
    // SAFETY: ALLOC takes this struct, which holds no address.
    unsafe { kernel.ioctl(heap, ALLOC, bytemuck::bytes_of_mut(&mut allocation)) }?;
    Ok(Fd(allocation.fd as i32))
}

/// Begins (`end` false) or ends CPU access to a dma-buf; the kernel cleans or invalidates caches.
///
/// # Errors
/// What the kernel says.
pub fn access(kernel: &dyn Kernel, buffer: Fd, end: bool) -> io::Result<()> {
    let mut flags = BOTH | if end { END } else { 0 };
    // SAFETY: SYNC takes one u64 of flags.
    unsafe { kernel.ioctl(buffer, SYNC, bytemuck::bytes_of_mut(&mut flags)) }
}
