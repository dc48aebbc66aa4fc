//! The seam: every system call of a device driver.

use std::io;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// An open file of the kernel behind the seam.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fd(pub i32);

/// Outcome of trying to lock a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Ours until the file is closed.
    Held,
    /// Somebody else's; the process where known.
    Busy(Option<u32>),
}

/// What a driver needs of an operating system. [`super::linux`] is the real one.
pub trait Kernel: Send + Sync {
    /// Device nodes in a folder, sorted.
    fn nodes(&self, folder: &str) -> Vec<PathBuf>;
    /// Opens a node for reading and writing.
    ///
    /// # Errors
    /// What the kernel says.
    fn open(&self, path: &Path) -> io::Result<Fd>;
    /// Closes it, releasing its lock.
    fn close(&self, fd: Fd);
    /// Takes the exclusive advisory lock without waiting.
    ///
    /// # Errors
    /// What the kernel says, a busy lock excepted.
    fn lock(&self, fd: Fd) -> io::Result<Lock>;
    /// One ioctl.
    ///
    /// # Errors
    /// What the kernel says.
    ///
    /// # Safety
    /// `argument` is the struct that `request` takes, and every address in it is valid for what the
    /// request does with it.
    unsafe fn ioctl(&self, fd: Fd, request: u32, argument: &mut [u8]) -> io::Result<()>;
    /// Maps `len` bytes at `offset`, shared, readable and writable.
    ///
    /// # Errors
    /// What the kernel says.
    fn map(&self, fd: Fd, offset: u64, len: usize) -> io::Result<NonNull<u8>>;
    /// Unmaps.
    ///
    /// # Safety
    /// `at` came from [`Kernel::map`] with this `len`, and nothing refers to it any more.
    unsafe fn unmap(&self, at: NonNull<u8>, len: usize);
    /// Writes the cache lines of a range back to memory.
    ///
    /// # Safety
    /// The range is mapped.
    unsafe fn clean(&self, at: *const u8, len: usize);
    /// Writes back and drops the cache lines of a range, so that the next read comes from memory.
    ///
    /// # Safety
    /// The range is mapped.
    unsafe fn invalidate(&self, at: *const u8, len: usize);
    /// CLOCK_MONOTONIC, nanoseconds.
    fn now_ns(&self) -> i64;
}
