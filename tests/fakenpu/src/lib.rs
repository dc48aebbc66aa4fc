//! A kernel that is not there: both drivers' device nodes at the seam of `ork-loader`.
//!
//! Streams are executed by the simulator on threads of the fake's own. CPU and device see two copies of
//! every buffer, as on a board without coherent caches: what is not synced is stale. What would wedge a
//! board, corrupt a result or upset a driver is recorded as a violation; a test asserts that there are
//! none. Shares the uABI's types with its subject and no logic.

mod buffer;
mod engine;
mod kernel;
mod rknpu;
mod rocket;

use buffer::Buffer;
use engine::Job;
use ork_caps::Caps;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Which driver's nodes exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abi {
    /// /dev/dri/card1 and a render node.
    Rknpu,
    /// /dev/accel/accel0.
    Rocket,
    /// Neither.
    None,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// ENOMEM once this many bytes would be exceeded.
    NoMemoryAt(u64),
    /// EINVAL for the n-th submit, from 0.
    RefuseSubmit(u64),
    /// The n-th job is accepted and never runs.
    LoseJob(u64),
    /// Every job from the n-th on is lost.
    LoseFrom(u64),
    /// The n-th job runs this much later.
    LateJob(u64, Duration),
    /// The n-th job leaves the first words of its result as they were.
    SkipWords(u64),
    /// Another process holds the node.
    HeldBy(u32),
    /// ACT_RESET fails.
    ResetFails,
    /// The second buffer gets the address of the first.
    OverlappingAddresses,
    /// Device addresses start above 4 GiB.
    HighAddresses,
}

/// How the fake behaves.
#[derive(Clone, Debug)]
pub struct Config {
    /// Nodes.
    pub abi: Abi,
    /// Limits of the simulated SoC.
    pub caps: &'static Caps,
    /// Vendor driver version.
    pub version: u32,
    /// CPU and device see the same memory (a PC), instead of needing syncs.
    pub coherent: bool,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// Instead of computing, take as long as hardware of this many 10^9 operations a second and core
    /// would, and write zeros: for benchmarks of the host side.
    pub hollow: Option<f64>,
}

impl Config {
    /// A well-behaved board.
    #[must_use]
    pub fn new(abi: Abi) -> Self {
        Self {
            abi,
            caps: ork_caps::DEFAULT,
            version: 908,
            coherent: false,
            faults: Vec::new(),
            hollow: None,
        }
    }

    /// The same with something that goes wrong.
    #[must_use]
    pub fn with(mut self, fault: Fault) -> Self {
        self.faults.push(fault);
        self
    }
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Bytes of buffers ever created.
    pub created: u64,
    /// Bytes destroyed by request.
    pub destroyed: u64,
    /// Bytes ever mapped.
    pub mapped: u64,
    /// Bytes unmapped.
    pub unmapped: u64,
    /// Files open now.
    pub open: u64,
    /// Submit ioctls.
    pub submits: u64,
    /// Jobs that ran.
    pub jobs: u64,
}

struct File {
    path: PathBuf,
    locked: bool,
}

#[derive(Default)]
struct State {
    files: BTreeMap<i32, File>,
    next_fd: i32,
    /// By GEM handle.
    buffers: BTreeMap<u32, Buffer>,
    next_handle: u32,
    /// dma-bufs by file.
    dma_bufs: BTreeMap<i32, u32>,
    /// Lowest (vendor) or highest (mainline) address handed out.
    edge: u64,
    allocated: u64,
    queues: Vec<VecDeque<Job>>,
    /// Jobs taken and not finished.
    running: u64,
    /// Since the last reset nothing has run.
    cold: bool,
    resets: u64,
    stopping: bool,
    violations: Vec<String>,
    ledger: Ledger,
}

struct Inner {
    config: Config,
    state: Mutex<State>,
    changed: Condvar,
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fault(&self, matches: impl Fn(&Fault) -> bool) -> bool {
        self.config.faults.iter().any(matches)
    }
}

/// The fake kernel; clone to keep a view of it.
#[derive(Clone)]
pub struct Fake(Arc<Inner>);

impl Fake {
    /// Starts its cores.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let cores = config.caps.cores.value as usize;
        let state = State {
            next_fd: 1000,
            next_handle: 1,
            edge: match config.abi {
                Abi::Rocket => 0x1000,
                Abi::Rknpu | Abi::None => 0xffff_f000,
            },
            queues: vec![VecDeque::new(); cores],
            cold: true,
            ..State::default()
        };
        let inner = Arc::new(Inner {
            config,
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        for core in 0..cores {
            let inner = Arc::downgrade(&inner);
            std::thread::spawn(move || engine::core(&inner, core));
        }
        Self(inner)
    }

    /// What a board or a driver would not have forgiven.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.0.lock().violations.clone()
    }

    /// Counts so far.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        let state = self.0.lock();
        Ledger {
            open: state.files.len() as u64,
            ..state.ledger
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.lock().stopping = true;
        self.changed.notify_all();
    }
}
