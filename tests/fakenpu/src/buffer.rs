//! A buffer: the CPU's view, the device's view, and what moves between them.

use std::ptr::NonNull;

pub(crate) struct Buffer {
    pub(crate) flags: u32,
    /// Device address.
    pub(crate) address: u64,
    /// Made from a dma-buf.
    pub(crate) imported: bool,
    /// Nothing was written by the device since it was made or the device was reset.
    pub(crate) cold: bool,
    /// Jobs that use it.
    pub(crate) users: u64,
    user: UserMemory,
    device: Vec<u8>,
}

impl Buffer {
    pub(crate) fn new(flags: u32, address: u64, bytes: usize) -> Self {
        Self {
            flags,
            address,
            imported: false,
            cold: true,
            users: 0,
            user: UserMemory::new(bytes),
            device: vec![0; bytes],
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.device.len()
    }

    pub(crate) fn user(&self) -> NonNull<u8> {
        self.user.at
    }

    /// Offset of a user address inside.
    pub(crate) fn offset_of(&self, at: *const u8) -> Option<usize> {
        let offset = (at as usize).checked_sub(self.user.at.as_ptr() as usize)?;
        (offset < self.len()).then_some(offset)
    }

    pub(crate) fn device(&mut self) -> &mut [u8] {
        &mut self.device
    }

    /// CPU to device.
    pub(crate) fn clean(&mut self, offset: usize, bytes: usize) {
        let end = (offset + bytes).min(self.len());
        // SAFETY: inside the allocation of `user`; the program promises not to write what it syncs
        // meanwhile, as it must on hardware.
        unsafe {
            let from = self.user.at.as_ptr().add(offset);
            let to = self.device.as_mut_ptr().add(offset);
            std::ptr::copy_nonoverlapping(from, to, end.saturating_sub(offset));
        }
    }

    /// Device to CPU.
    pub(crate) fn invalidate(&mut self, offset: usize, bytes: usize) {
        let end = (offset + bytes).min(self.len());
        // SAFETY: as for `clean`, the other way round.
        unsafe {
            let from = self.device.as_ptr().add(offset);
            let to = self.user.at.as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(from, to, end.saturating_sub(offset));
        }
    }

    /// What the kernel itself sees through its mapping: the CPU's view.
    pub(crate) fn kernel_read(&self, offset: usize, bytes: usize) -> Option<Vec<u8>> {
        let end = offset.checked_add(bytes)?;
        if self.len() < end {
            return None;
        }
        let mut out = vec![0; bytes];
        // SAFETY: inside the allocation, checked above.
        unsafe {
            let from = self.user.at.as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), bytes);
        }
        Some(out)
    }
}

/// Zeroed memory that user code reads and writes through the pointer.
struct UserMemory {
    memory: NonNull<u64>,
    at: NonNull<u8>,
    words: usize,
}

// SAFETY: plain memory; access is ordered by the fake's lock and by what drivers must do anyway.
unsafe impl Send for UserMemory {}

impl UserMemory {
    fn new(bytes: usize) -> Self {
        // 64-bit words: as aligned as any access of the programs.
        let words = bytes.div_ceil(8).max(1);
        let memory = NonNull::from(Box::leak(vec![0u64; words].into_boxed_slice())).cast();
        Self {
            memory,
            at: memory.cast(),
            words,
        }
    }
}

impl Drop for UserMemory {
    fn drop(&mut self) {
        let words = std::ptr::slice_from_raw_parts_mut(self.memory.as_ptr(), self.words);
        // SAFETY: leaked in `new` with this length.
        drop(unsafe { Box::from_raw(words) });
    }
}
