//! Mapped device memory, shared by the engine, the worker and the hardware.

use super::kernel::{Fd, Kernel};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// One mapped buffer; unmapped when dropped.
pub struct Mapping {
    kernel: Arc<dyn Kernel>,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory of the whole process; who may touch which bytes when is what the
// callers of `slice` and `slice_mut` promise.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` at `offset`.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn new(kernel: &Arc<dyn Kernel>, fd: Fd, offset: u64, len: usize) -> io::Result<Self> {
        Ok(Self {
            at: kernel.map(fd, offset, len)?,
            kernel: Arc::clone(kernel),
            len,
        })
    }

    /// Mapped bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn inside(&self, offset: usize, len: usize) -> *mut u8 {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "bytes {offset}+{len} of a mapping of {}",
            self.len
        );
        // SAFETY: within the mapping, checked above.
        unsafe { self.at.as_ptr().add(offset) }
    }

    /// Everything, before the mapping is shared and before any job knows of it.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: mapped; `&mut self` excludes other slices, and drivers hand over jobs through a shared
        // reference only.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }

    /// A range, to read.
    ///
    /// # Safety
    /// While it lives nobody writes the range: no job that writes it is in flight.
    #[must_use]
    pub unsafe fn slice(&self, offset: usize, len: usize) -> &[u8] {
        // SAFETY: mapped; the caller's promise excludes writers.
        unsafe { std::slice::from_raw_parts(self.inside(offset, len), len) }
    }

    /// A range, to write.
    ///
    /// # Safety
    /// While it lives nobody else touches the range: no job that reads or writes it is in flight, and no
    /// other slice overlaps it.
    #[must_use]
    #[expect(clippy::mut_from_ref, reason = "the caller promises exclusiveness")]
    pub unsafe fn slice_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        // SAFETY: mapped; the caller's promise excludes others.
        unsafe { std::slice::from_raw_parts_mut(self.inside(offset, len), len) }
    }

    /// One word from memory, past the caches, while the device may be writing it.
    ///
    /// # Panics
    /// When it is not aligned or outside.
    #[must_use]
    pub fn poll(&self, offset: usize) -> i32 {
        let at = self.inside(offset, 4);
        assert!(
            at.align_offset(4) == 0,
            "a doorbell at {offset} is unaligned"
        );
        // SAFETY: mapped.
        unsafe { self.kernel.invalidate(at, 4) };
        #[expect(clippy::cast_ptr_alignment, reason = "asserted above")]
        let word = at.cast::<i32>();
        // SAFETY: mapped and aligned; volatile, since the device writes it.
        i32::from_le(unsafe { word.read_volatile() })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: ours since `new`; slices borrow from self, so none is left.
        unsafe { self.kernel.unmap(self.at, self.len) };
    }
}
