//! The few DRM ioctls that every driver has (Linux `include/uapi/drm/drm.h`).

use super::kernel::{Fd, Kernel};
use super::{READ_WRITE, request};
use bytemuck::{Pod, Zeroable};
use std::io;

/// `struct drm_version`, 64-bit layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Version {
    /// Major version.
    pub major: i32,
    /// Minor version.
    pub minor: i32,
    /// Patch level.
    pub patch: i32,
    /// Padding.
    pub pad: u32,
    /// Room at `name`, then the name's length.
    pub name_len: u64,
    /// Address of the caller's buffer.
    pub name: u64,
    /// Room at `date`.
    pub date_len: u64,
    /// Address.
    pub date: u64,
    /// Room at `desc`.
    pub desc_len: u64,
    /// Address.
    pub desc: u64,
}

const _: () = assert!(size_of::<Version>() == 64);

/// DRM_IOCTL_VERSION
pub const VERSION: u32 = request(READ_WRITE, b'd', 0, size_of::<Version>());

/// `struct drm_prime_handle`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct PrimeHandle {
    /// GEM handle, out.
    pub handle: u32,
    /// Flags; unused when importing.
    pub flags: u32,
    /// dma-buf.
    pub fd: i32,
}

/// DRM_IOCTL_PRIME_FD_TO_HANDLE
pub const PRIME_FD_TO_HANDLE: u32 = request(READ_WRITE, b'd', 0x2e, size_of::<PrimeHandle>());

/// The driver's name.
///
/// # Errors
/// What the kernel says.
pub fn name(kernel: &dyn Kernel, fd: Fd) -> io::Result<String> {
    let mut text = [0u8; 32];
    let mut version = Version {
        name_len: text.len() as u64,
        name: text.as_mut_ptr() as u64,
        ..Version::default()
    };
    // SAFETY: VERSION takes this struct; `name` points to `name_len` writable bytes of this frame, the
    // other lengths are 0.
    unsafe { kernel.ioctl(fd, VERSION, bytemuck::bytes_of_mut(&mut version)) }?;
    let len = (version.name_len as usize).min(text.len());
    Ok(String::from_utf8_lossy(&text[..len]).into_owned())
}

/// Turns a dma-buf into a GEM handle of `fd`.
///
/// # Errors
/// What the kernel says.
pub fn import(kernel: &dyn Kernel, fd: Fd, buffer: Fd) -> io::Result<u32> {
    let mut prime = PrimeHandle {
        fd: buffer.0,
        ..PrimeHandle::default()
    };
    // SAFETY: PRIME_FD_TO_HANDLE takes this struct, which holds no address.
    unsafe { kernel.ioctl(fd, PRIME_FD_TO_HANDLE, bytemuck::bytes_of_mut(&mut prime)) }?;
    Ok(prime.handle)
}
