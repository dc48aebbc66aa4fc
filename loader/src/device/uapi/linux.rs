//! The real kernel; a kernel without devices where there is no Linux.

#[cfg(target_os = "linux")]
mod linux_only;

use super::kernel::Kernel;
use std::sync::Arc;

/// The operating system we run on.
#[must_use]
pub fn kernel() -> Arc<dyn Kernel> {
    #[cfg(target_os = "linux")]
    return Arc::new(linux_only::Linux);
    #[cfg(not(target_os = "linux"))]
    return Arc::new(none::None);
}

#[cfg(not(target_os = "linux"))]
mod none {
    use super::super::kernel::{Fd, Kernel, Lock};
    use std::io;
    use std::path::{Path, PathBuf};
    use std::ptr::NonNull;

    pub(super) struct None;

    fn unsupported<T>() -> io::Result<T> {
        Err(io::ErrorKind::Unsupported.into())
    }

    impl Kernel for None {
        fn nodes(&self, _folder: &str) -> Vec<PathBuf> {
            Vec::new()
        }
        fn open(&self, _path: &Path) -> io::Result<Fd> {
            unsupported()
        }
        fn close(&self, _fd: Fd) {}
        fn lock(&self, _fd: Fd) -> io::Result<Lock> {
            unsupported()
        }
        unsafe fn ioctl(&self, _fd: Fd, _request: u32, _argument: &mut [u8]) -> io::Result<()> {
            unsupported()
        }
        fn map(&self, _fd: Fd, _offset: u64, _len: usize) -> io::Result<NonNull<u8>> {
            unsupported()
        }
        unsafe fn unmap(&self, _at: NonNull<u8>, _len: usize) {}
        unsafe fn clean(&self, _at: *const u8, _len: usize) {}
        unsafe fn invalidate(&self, _at: *const u8, _len: usize) {}
        fn now_ns(&self) -> i64 {
            0
        }
    }
}
