//! The seam: files, mappings, caches, and which ioctl goes where.

use crate::{Abi, Fake, Fault, File, Inner, State, rknpu, rocket};
use ork_loader::device::uapi::dma_buf::{self, Allocation};
use ork_loader::device::uapi::drm::{self, PrimeHandle, Version};
use ork_loader::device::uapi::kernel::{Fd, Kernel, Lock};
use std::io;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::time::Instant;

pub(crate) const EINVAL: i32 = 22;
pub(crate) const ENOMEM: i32 = 12;
pub(crate) const EIO: i32 = 5;
pub(crate) const EBADF: i32 = 9;
pub(crate) const EBUSY: i32 = 16;
const ENOENT: i32 = 2;
const ENOTTY: i32 = 25;

pub(crate) fn errno<T>(code: i32) -> io::Result<T> {
    Err(io::Error::from_raw_os_error(code))
}

/// The seam's clock.
pub(crate) fn now_ns() -> i64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as i64
}

/// mmap offsets carry the handle.
const OFFSET_SHIFT: u32 = 20;

/// The mmap offset of a handle.
pub(crate) fn offset_of(handle: u32) -> u64 {
    u64::from(handle) << OFFSET_SHIFT
}

/// An ioctl's argument as the struct it must be.
pub(crate) fn argument<T: bytemuck::Pod>(bytes: &mut [u8]) -> io::Result<&mut T> {
    match bytemuck::try_from_bytes_mut(bytes) {
        Ok(value) => Ok(value),
        Err(_) => errno(EINVAL),
    }
}

impl Inner {
    fn nodes(&self, folder: &str) -> Vec<PathBuf> {
        let names: &[&str] = match (self.config.abi, folder) {
            (Abi::Rknpu, "/dev/dri") => &["card0", "card1", "renderD128", "renderD129"],
            (Abi::Rocket, "/dev/accel") => &["accel0"],
            _ => &[],
        };
        names.iter().map(|n| Path::new(folder).join(n)).collect()
    }

    fn open(&self, path: &Path) -> io::Result<Fd> {
        let folder = path.parent().and_then(Path::to_str).unwrap_or("");
        let heap = self.config.abi == Abi::Rknpu && path == Path::new(dma_buf::HEAP);
        if !heap && !self.nodes(folder).iter().any(|n| n == path) {
            return errno(ENOENT);
        }
        Ok(self.lock().add_file(path.to_path_buf()))
    }

    fn driver_name(path: &Path) -> &'static str {
        match path.to_str() {
            Some("/dev/dri/card1" | "/dev/dri/renderD129") => "rknpu",
            Some("/dev/accel/accel0") => "rocket",
            _ => "rockchip",
        }
    }

    fn ioctl(&self, fd: Fd, request: u32, bytes: &mut [u8]) -> io::Result<()> {
        let mut state = self.lock();
        if let Some(handle) = state.dma_bufs.get(&fd.0).copied() {
            if request != dma_buf::SYNC {
                return errno(ENOTTY);
            }
            let end = *argument::<u64>(bytes)? & dma_buf::END != 0;
            let buffer = state.buffers.get_mut(&handle).ok_or_else(bad)?;
            let len = buffer.len();
            match end {
                true => buffer.clean(0, len),
                false => buffer.invalidate(0, len),
            }
            return Ok(());
        }
        let Some(file) = state.files.get(&fd.0) else {
            return errno(EBADF);
        };
        let (path, locked) = (file.path.clone(), file.locked);
        match request {
            drm::VERSION => {
                let version: &mut Version = argument(bytes)?;
                let name = Self::driver_name(&path).as_bytes();
                let room = (version.name_len as usize).min(name.len());
                // SAFETY: the caller's `name` has room for `name_len` bytes, by the ioctl's contract.
                unsafe {
                    std::ptr::copy_nonoverlapping(name.as_ptr(), version.name as *mut u8, room);
                }
                version.name_len = name.len() as u64;
                Ok(())
            }
            dma_buf::ALLOC => {
                let allocation: &mut Allocation = argument(bytes)?;
                if 16 << 20 < allocation.len {
                    state.violate("one dma-heap allocation above 16 MiB");
                }
                let handle = state.add_buffer(0, 0, allocation.len as usize);
                let fd = state.add_file(PathBuf::from("dma-buf"));
                state.dma_bufs.insert(fd.0, handle);
                allocation.fd = fd.0 as u32;
                Ok(())
            }
            drm::PRIME_FD_TO_HANDLE => {
                let prime: &mut PrimeHandle = argument(bytes)?;
                prime.handle = *state.dma_bufs.get(&prime.fd).ok_or_else(bad)?;
                Ok(())
            }
            _ => match self.config.abi {
                Abi::Rknpu => {
                    if path.to_string_lossy().contains("render") {
                        state.violate("the render node was used");
                    }
                    rknpu::ioctl(self, state, locked, request, bytes)
                }
                Abi::Rocket => rocket::ioctl(self, state, request, bytes),
                Abi::None => errno(ENOTTY),
            },
        }
    }
}

pub(crate) fn bad() -> io::Error {
    io::Error::from_raw_os_error(EINVAL)
}

impl State {
    fn add_file(&mut self, path: PathBuf) -> Fd {
        self.next_fd += 1;
        let locked = false;
        self.files.insert(self.next_fd, File { path, locked });
        Fd(self.next_fd)
    }

    /// A buffer of the CPU's and the device's view; returns its handle.
    pub(crate) fn add_buffer(&mut self, flags: u32, address: u64, bytes: usize) -> u32 {
        let handle = self.next_handle;
        self.next_handle += 1;
        let buffer = crate::Buffer::new(flags, address, bytes);
        self.buffers.insert(handle, buffer);
        self.allocated += bytes as u64;
        handle
    }

    pub(crate) fn violate(&mut self, text: &str) {
        self.violations.push(text.to_string());
    }

    /// Frees a buffer; in use, that is a violation.
    pub(crate) fn free(&mut self, handle: u32) -> io::Result<()> {
        let Some(buffer) = self.buffers.get(&handle) else {
            return errno(EINVAL);
        };
        if buffer.users != 0 {
            let text = format!("buffer {handle} freed while {} jobs use it", buffer.users);
            self.violations.push(text);
            return errno(EBUSY);
        }
        let bytes = buffer.len() as u64;
        self.allocated -= bytes;
        self.ledger.destroyed += bytes;
        self.buffers.remove(&handle);
        Ok(())
    }
}

impl Kernel for Fake {
    fn nodes(&self, folder: &str) -> Vec<PathBuf> {
        self.0.nodes(folder)
    }

    fn open(&self, path: &Path) -> io::Result<Fd> {
        self.0.open(path)
    }

    fn close(&self, fd: Fd) {
        let mut state = self.0.lock();
        if state.files.remove(&fd.0).is_none() {
            state.violate("a file was closed twice");
        }
        state.dma_bufs.remove(&fd.0);
    }

    fn lock(&self, fd: Fd) -> io::Result<Lock> {
        for fault in &self.0.config.faults {
            if let Fault::HeldBy(pid) = fault {
                return Ok(Lock::Busy(Some(*pid)));
            }
        }
        let mut state = self.0.lock();
        if state.files.values().any(|f| f.locked) {
            return Ok(Lock::Busy(Some(std::process::id())));
        }
        state.files.get_mut(&fd.0).ok_or_else(bad)?.locked = true;
        Ok(Lock::Held)
    }

    unsafe fn ioctl(&self, fd: Fd, request: u32, argument: &mut [u8]) -> io::Result<()> {
        self.0.ioctl(fd, request, argument)
    }

    fn map(&self, fd: Fd, offset: u64, len: usize) -> io::Result<NonNull<u8>> {
        let mut state = self.0.lock();
        let handle = match state.dma_bufs.get(&fd.0) {
            Some(handle) => *handle,
            None => (offset >> OFFSET_SHIFT) as u32,
        };
        let buffer = state.buffers.get(&handle).ok_or_else(bad)?;
        if buffer.len() < len {
            return errno(EINVAL);
        }
        let at = buffer.user();
        state.ledger.mapped += len as u64;
        Ok(at)
    }

    unsafe fn unmap(&self, _at: NonNull<u8>, len: usize) {
        self.0.lock().ledger.unmapped += len as u64;
    }

    unsafe fn clean(&self, at: *const u8, len: usize) {
        self.0.cache(at, len, true);
    }

    unsafe fn invalidate(&self, at: *const u8, len: usize) {
        self.0.cache(at, len, false);
    }

    fn now_ns(&self) -> i64 {
        now_ns()
    }
}

impl Inner {
    fn cache(&self, at: *const u8, len: usize, to_device: bool) {
        if self.config.coherent {
            return;
        }
        let mut state = self.lock();
        let mut buffers = state.buffers.values_mut();
        let found = buffers.find_map(|b| Some((b.offset_of(at)?, b)));
        match (found, to_device) {
            (Some((offset, buffer)), true) => buffer.clean(offset, len),
            (Some((offset, buffer)), false) => buffer.invalidate(offset, len),
            (None, _) => state.violate("cache maintenance outside of every buffer"),
        }
    }
}
