//! What the kernel drivers define: structures, request numbers, and the one seam through which every
//! system call of a device goes. The tests put a fake kernel behind the seam.

pub mod dma_buf;
pub mod drm;
pub mod kernel;
pub mod linux;
pub mod memory;
pub mod rknpu;
pub mod rocket;

/// Request number of an ioctl, as `asm-generic/ioctl.h` composes it.
#[must_use]
pub const fn request(direction: u32, group: u8, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (group as u32) << 8 | number
}

/// The caller writes, the kernel reads.
pub const WRITE: u32 = 1;
/// Both.
pub const READ_WRITE: u32 = 3;
