//! System calls through libc, so that a preloaded library can stand in for the kernel.
#![cfg(target_os = "linux")]

use super::super::kernel::{Fd, Kernel, Lock};
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

pub(super) struct Linux;

fn check(result: i32) -> io::Result<i32> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

/// Repeats a call that a signal interrupted.
fn again(mut call: impl FnMut() -> i32) -> io::Result<i32> {
    loop {
        match check(call()) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

impl Kernel for Linux {
    fn nodes(&self, folder: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut nodes: Vec<PathBuf> = entries.map(|e| e.path()).collect();
        nodes.sort();
        nodes
    }

    fn open(&self, path: &Path) -> io::Result<Fd> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: `name` ends with 0 and outlives the call.
        let fd = again(|| unsafe { libc::open(name.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) })?;
        Ok(Fd(fd))
    }

    fn close(&self, fd: Fd) {
        // SAFETY: `fd` came from open or an ioctl and is closed once, by its owner.
        unsafe { libc::close(fd.0) };
    }

    fn lock(&self, fd: Fd) -> io::Result<Lock> {
        // SAFETY: flock takes any file descriptor.
        match again(|| unsafe { libc::flock(fd.0, libc::LOCK_EX | libc::LOCK_NB) }) {
            Ok(_) => Ok(Lock::Held),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Lock::Busy(holder(fd))),
            Err(e) => Err(e),
        }
    }

    unsafe fn ioctl(&self, fd: Fd, request: u32, argument: &mut [u8]) -> io::Result<()> {
        let at = argument.as_mut_ptr();
        // SAFETY: the caller's promise about `argument` is what the request needs.
        again(|| unsafe { libc::ioctl(fd.0, request as _, at) })?;
        Ok(())
    }

    fn map(&self, fd: Fd, offset: u64, len: usize) -> io::Result<NonNull<u8>> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: no address is asked for, so that no mapping of ours is replaced.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                libc::MAP_SHARED,
                fd.0,
                offset as libc::off_t,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(at.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))
    }

    unsafe fn unmap(&self, at: NonNull<u8>, len: usize) {
        // SAFETY: the caller gives a mapping that nothing refers to.
        unsafe { libc::munmap(at.as_ptr().cast(), len) };
    }

    unsafe fn clean(&self, at: *const u8, len: usize) {
        // SAFETY: the caller's range is mapped.
        unsafe { lines(at, len, false) };
    }

    unsafe fn invalidate(&self, at: *const u8, len: usize) {
        // SAFETY: the caller's range is mapped.
        unsafe { lines(at, len, true) };
    }

    fn now_ns(&self) -> i64 {
        let mut now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `now` is writable; the clock exists on every Linux.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
        now.tv_sec * 1_000_000_000 + now.tv_nsec
    }
}

/// The process that holds the flock of this file, from /proc/locks.
fn holder(fd: Fd) -> Option<u32> {
    let inode = std::fs::metadata(format!("/proc/self/fd/{}", fd.0))
        .ok()?
        .ino();
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    // 1: FLOCK  ADVISORY  WRITE 1234 00:06:567 0 EOF
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let ours = words.next()? == "FLOCK";
        let pid = words.nth(2)?.parse().ok()?;
        let file = words.next()?;
        (ours && file.rsplit(':').next()?.parse() == Ok(inode)).then_some(pid)
    })
}

/// Cleans or cleans and invalidates the cache lines of a range. The instructions are allowed in user
/// space on aarch64 Linux (SCTLR_EL1.UCI); x86 is coherent and needs a fence only.
///
/// # Safety
/// The range is mapped.
#[cfg(target_arch = "aarch64")]
unsafe fn lines(at: *const u8, len: usize, invalidate: bool) {
    /// No core of these SoCs has shorter lines.
    const LINE: usize = 64;
    let mut line = at as usize & !(LINE - 1);
    while line < at as usize + len {
        // SAFETY: cache maintenance by virtual address of a mapped line; no register but the operand.
        unsafe {
            match invalidate {
                true => core::arch::asm!("dc civac, {}", in(reg) line, options(nostack)),
                false => core::arch::asm!("dc cvac, {}", in(reg) line, options(nostack)),
            }
        }
        line += LINE;
    }
    // SAFETY: a barrier.
    unsafe { core::arch::asm!("dsb ish", options(nostack)) };
}

/// Coherent: a fence keeps the compiler and the store buffer in order.
#[cfg(not(target_arch = "aarch64"))]
unsafe fn lines(_at: *const u8, _len: usize, _invalidate: bool) {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}
