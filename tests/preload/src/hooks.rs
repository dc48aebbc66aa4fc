//! The symbols. Each finds libc's own with `dlsym(RTLD_NEXT)`.
#![cfg(target_os = "linux")]
#![allow(
    clippy::print_stderr,
    reason = "the only channel of a preloaded library"
)]

use ork_fakenpu::{Abi, Config, Fake, Fault};
use ork_loader::device::uapi::kernel::{Fd, Kernel, Lock};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_ulong, c_void};
use std::path::Path;
use std::sync::{LazyLock, Mutex, PoisonError};

/// Files of the fake kernel start here; no process has so many real ones.
const FIRST: c_int = 1000;
const LAST: c_int = 100_000;

static FAKE: LazyLock<Fake> = LazyLock::new(|| {
    let abi = match std::env::var("ORK_FAKE").as_deref() {
        Ok("rocket") => Abi::Rocket,
        Ok("rknpu") => Abi::Rknpu,
        _ => Abi::None,
    };
    let mut config = Config::new(abi);
    // This process has no cache maintenance.
    config.coherent = true;
    if let Some(n) = std::env::var("ORK_FAKE_LOSE")
        .ok()
        .and_then(|n| n.parse().ok())
    {
        config.faults.push(Fault::LoseJob(n));
    }
    Fake::new(config)
});

/// Addresses that the fake mapped.
static MAPPED: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

fn mapped() -> std::sync::MutexGuard<'static, BTreeSet<usize>> {
    MAPPED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fail(error: &std::io::Error) -> c_int {
    let code = error.raw_os_error().unwrap_or(libc::ETIMEDOUT);
    // SAFETY: errno of this thread.
    unsafe { *libc::__errno_location() = code };
    -1
}

/// libc's own symbol.
macro_rules! next {
    ($name:literal, $type:ty) => {{
        static NEXT: LazyLock<usize> = LazyLock::new(|| {
            // SAFETY: the name ends with 0.
            unsafe { libc::dlsym(libc::RTLD_NEXT, concat!($name, "\0").as_ptr().cast()) as usize }
        });
        assert!(*NEXT != 0, concat!("libc has no ", $name));
        // SAFETY: libc's function of this name has this type.
        unsafe { std::mem::transmute::<usize, $type>(*NEXT) }
    }};
}

fn node(path: *const c_char) -> Option<String> {
    // SAFETY: the caller of open gives a string.
    let path = unsafe { CStr::from_ptr(path) }.to_str().ok()?;
    let ours = ["/dev/dri/", "/dev/accel/", "/dev/dma_heap/"];
    ours.iter()
        .any(|f| path.starts_with(f))
        .then(|| path.to_string())
}

type Open = unsafe extern "C" fn(*const c_char, c_int, c_int) -> c_int;

fn open_with(real: Open, path: *const c_char, flags: c_int, mode: c_int) -> c_int {
    match node(path) {
        Some(name) => match FAKE.open(Path::new(&name)) {
            Ok(fd) => fd.0,
            Err(e) => fail(&e),
        },
        // SAFETY: the caller's arguments.
        None => unsafe { real(path, flags, mode) },
    }
}

/// open(2)
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: c_int) -> c_int {
    open_with(next!("open", Open), path, flags, mode)
}

/// open64
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: c_int) -> c_int {
    open_with(next!("open64", Open), path, flags, mode)
}

/// close(2)
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn close(fd: c_int) -> c_int {
    if (FIRST..LAST).contains(&fd) {
        FAKE.close(Fd(fd));
        for violation in FAKE.violations() {
            eprintln!("fake kernel: violation: {violation}");
        }
        return 0;
    }
    let real = next!("close", unsafe extern "C" fn(c_int) -> c_int);
    // SAFETY: the caller's argument.
    unsafe { real(fd) }
}

/// flock(2)
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn flock(fd: c_int, how: c_int) -> c_int {
    if (FIRST..LAST).contains(&fd) {
        return match FAKE.lock(Fd(fd)) {
            Ok(Lock::Held) => 0,
            Ok(Lock::Busy(_)) => fail(&std::io::Error::from_raw_os_error(libc::EWOULDBLOCK)),
            Err(e) => fail(&e),
        };
    }
    let real = next!("flock", unsafe extern "C" fn(c_int, c_int) -> c_int);
    // SAFETY: the caller's arguments.
    unsafe { real(fd, how) }
}

/// ioctl(2)
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if (FIRST..LAST).contains(&fd) {
        // The request carries its argument's size.
        let size = (request >> 16 & 0x3fff) as usize;
        // SAFETY: the caller gives a struct of that size.
        let bytes = unsafe { std::slice::from_raw_parts_mut(argument.cast::<u8>(), size) };
        // SAFETY: the caller's promise to the kernel.
        return match unsafe { FAKE.ioctl(Fd(fd), request as u32, bytes) } {
            Ok(()) => 0,
            Err(e) => fail(&e),
        };
    }
    type Ioctl = unsafe extern "C" fn(c_int, c_ulong, *mut c_void) -> c_int;
    let real = next!("ioctl", Ioctl);
    // SAFETY: the caller's arguments.
    unsafe { real(fd, request, argument) }
}

type Mmap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;

/// mmap(2)
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mmap(
    at: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    if (FIRST..LAST).contains(&fd) {
        return match FAKE.map(Fd(fd), offset as u64, len) {
            Ok(at) => {
                mapped().insert(at.as_ptr() as usize);
                at.as_ptr().cast()
            }
            Err(e) => {
                fail(&e);
                libc::MAP_FAILED
            }
        };
    }
    let real = next!("mmap", Mmap);
    // SAFETY: the caller's arguments.
    unsafe { real(at, len, protection, flags, fd, offset) }
}

/// munmap(2)
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn munmap(at: *mut c_void, len: usize) -> c_int {
    if mapped().remove(&(at as usize)) {
        if let Some(at) = std::ptr::NonNull::new(at.cast()) {
            // SAFETY: the fake mapped it.
            unsafe { FAKE.unmap(at, len) };
        }
        return 0;
    }
    type Munmap = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
    let real = next!("munmap", Munmap);
    // SAFETY: the caller's arguments.
    unsafe { real(at, len) }
}

type OpenDir = unsafe extern "C" fn(*const c_char) -> *mut c_void;

/// opendir(3): the names of nodes come from files in the folder `ORK_FAKE_NODES`.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn opendir(path: *const c_char) -> *mut c_void {
    let real = next!("opendir", OpenDir);
    // SAFETY: the caller gives a string.
    let name = unsafe { CStr::from_ptr(path) }.to_str().unwrap_or("");
    let nodes = std::env::var("ORK_FAKE_NODES");
    let copy = match (name, nodes) {
        ("/dev/dri" | "/dev/accel", Ok(folder)) => CString::new(folder + &name[4..]).ok(),
        _ => None,
    };
    let path = copy.as_ref().map_or(path, |copy| copy.as_ptr());
    // SAFETY: the caller's string, or ours, which ends with 0 and outlives the call.
    unsafe { real(path) }
}
