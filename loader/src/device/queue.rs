//! A driver behind a worker thread: the engine pushes descriptors and goes on, the worker submits them,
//! polls doorbells in bounded time and counts the timeline.

use super::jobs::{Job, Jobs};
use super::uapi::memory::Mapping;
use super::{Counters, Device, Ended};
use crate::error::{Error, Result};
use crate::map::Pack;
use ork_formats::model::Place;
use ork_rings::{Descriptor, Egress, TaskRing, Timeline};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// What a kernel driver does for a job; called from the worker only.
pub(super) trait Driver: Send {
    /// Name for reports.
    fn name(&self) -> &'static str;
    /// Hands the job to the hardware, one submit per core, and returns how many submits that took.
    fn submit(&mut self, job: &Job) -> Result<u64>;
    /// Whether every core answered; when so, the results are visible to the CPU. May submit what follows.
    fn poll(&mut self, job: &Job) -> Result<bool>;
    /// Resets the hardware and warms its buffers.
    fn reset(&mut self) -> Result<()>;
}

/// Flag of a descriptor that asks for a reset.
const RESET: u32 = 2;
/// Jobs handed to the hardware at most: one per half.
const IN_FLIGHT: usize = 2;
/// How long a thread spins before it sleeps between looks.
const SPIN: Duration = Duration::from_micros(50);
/// Sleep between looks.
const NAP: Duration = Duration::from_micros(20);
/// Sleep of a worker without work; a push wakes it.
const IDLE: Duration = Duration::from_millis(5);

#[derive(Default)]
struct Shared {
    ring: TaskRing,
    timeline: Timeline,
    egress: Egress,
    /// Whether the last job of each half was lost, written before the timeline.
    lost: [AtomicBool; 2],
    failure: Mutex<Option<Error>>,
    submits: AtomicU64,
    misses: AtomicU64,
    resets: AtomicU64,
    busy_ns: AtomicU64,
}

impl Shared {
    fn fail(&self, error: Error) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(error);
    }

    fn failed(&self) -> Option<Error> {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.take()
    }
}

/// The device that the engine sees.
pub(super) struct Queue {
    name: &'static str,
    memory: Arc<Vec<Mapping>>,
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
    /// Timeline value of the last descriptor.
    last: u64,
    /// Timeline value of each half's last job.
    halves: [u64; 2],
}

impl Queue {
    /// Starts the worker. `timeout` bounds a job.
    pub(super) fn new(
        driver: impl Driver + 'static,
        memory: Arc<Vec<Mapping>>,
        jobs: Arc<Jobs>,
        timeout: Duration,
    ) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let name = driver.name();
        let theirs = Arc::clone(&shared);
        let worker = thread::Builder::new()
            .name(format!("ork-{name}"))
            .spawn(move || work(driver, &theirs, &jobs, timeout))
            .map_err(|e| Error::Failed(format!("cannot start the {name} worker: {e}")))?;
        Ok(Self {
            name,
            memory,
            shared,
            worker: Some(worker),
            last: 0,
            halves: [0; 2],
        })
    }

    fn push(&mut self, buffer: u32, half: u32, tokens: u32, flags: u32) -> Result<u64> {
        let descriptor = Descriptor {
            buffer,
            offset: half,
            tokens,
            flags,
            timeline: self.last + 1,
        };
        let mut waited = Waiting::new();
        while !self.shared.ring.push(descriptor) {
            self.alive()?;
            waited.nap();
        }
        self.last += 1;
        if let Some(worker) = &self.worker {
            worker.thread().unpark();
        }
        Ok(self.last)
    }

    fn reach(&self, value: u64) -> Result<()> {
        let mut waited = Waiting::new();
        while !self.shared.timeline.reached(value) {
            self.alive()?;
            waited.nap();
        }
        match self.shared.failed() {
            None => Ok(()),
            Some(error) => Err(error),
        }
    }

    fn alive(&self) -> Result<()> {
        match self.worker.as_ref().is_some_and(|w| !w.is_finished()) {
            true => Ok(()),
            false => Err(self.shared.failed().unwrap_or_else(|| {
                Error::Failed(format!("the {} worker ended unexpectedly", self.name))
            })),
        }
    }
}

impl Device for Queue {
    fn name(&self) -> &'static str {
        self.name
    }

    fn bytes(&self, at: Place, len: usize) -> &[u8] {
        let memory = &self.memory[at.extent as usize];
        // SAFETY: A and ring bytes of a half are written by a job of that half only, and the engine asks
        // for them between its end (the timeline) and the next start.
        unsafe { memory.slice(at.offset as usize, len) }
    }

    fn bytes_mut(&mut self, at: Place, len: usize) -> &mut [u8] {
        let memory = &self.memory[at.extent as usize];
        // SAFETY: as above; `&mut self` keeps other slices away.
        unsafe { memory.slice_mut(at.offset as usize, len) }
    }

    fn copy(&mut self, from: Place, to: Place, len: usize) {
        let memory = Arc::clone(&self.memory);
        let source = &memory[from.extent as usize];
        // SAFETY: both are A buffers of one half, between its jobs, and no two of them overlap: the plan is
        // proven.
        let from = unsafe { source.slice(from.offset as usize, len) };
        self.bytes_mut(to, len).copy_from_slice(from);
    }

    fn is_hardware(&self) -> bool {
        true
    }

    fn start(&mut self, _pack: &Pack, jobs: &Jobs, id: u32, rows: u32) -> Result<()> {
        let half = jobs.get(id).half;
        self.halves[half as usize] = self.push(id, half, rows, 0)?;
        Ok(())
    }

    fn wait(&mut self, half: u32) -> Result<Ended> {
        self.reach(self.halves[half as usize])?;
        match self.shared.lost[half as usize].load(Ordering::Acquire) {
            false => Ok(Ended::Done),
            true => Ok(Ended::Lost),
        }
    }

    fn release(&mut self, half: u32) {
        self.shared.egress.release(half);
    }

    fn reset(&mut self) -> Result<()> {
        let value = self.push(0, 0, 0, RESET)?;
        self.reach(value)
    }

    fn counters(&self) -> Counters {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counters {
            submits: load(&self.shared.submits),
            misses: load(&self.shared.misses),
            resets: load(&self.shared.resets),
            busy_ns: load(&self.shared.busy_ns),
        }
    }
}

impl Drop for Queue {
    /// Lets what is in flight end: no buffer goes away under a running job.
    fn drop(&mut self) {
        let stopped = self.push(0, 0, 0, Descriptor::STOP);
        if let (Ok(_), Some(worker)) = (stopped, self.worker.take()) {
            // A worker that panicked has nothing to say here.
            let _ = worker.join();
        }
    }
}

/// Spins for a moment, then sleeps between looks.
struct Waiting(Instant);

impl Waiting {
    fn new() -> Self {
        Self(Instant::now())
    }

    fn nap(&mut self) {
        match self.0.elapsed() < SPIN {
            true => std::hint::spin_loop(),
            false => thread::sleep(NAP),
        }
    }
}

struct Flying {
    descriptor: Descriptor,
    since: Instant,
}

fn work(mut driver: impl Driver, shared: &Shared, jobs: &Jobs, timeout: Duration) {
    let mut flying: VecDeque<Flying> = VecDeque::new();
    let mut idle = Instant::now();
    // A reset or the end waits until nothing flies.
    let mut held: Option<Descriptor> = None;
    loop {
        if held.is_none() && flying.len() < IN_FLIGHT {
            held = shared.ring.pop();
        }
        let mut moved = false;
        match held {
            Some(d) if d.flags != 0 && !flying.is_empty() => {}
            Some(d) if d.flags & Descriptor::STOP != 0 => return,
            Some(d) if d.flags & RESET != 0 => {
                shared.resets.fetch_add(1, Ordering::Relaxed);
                if let Err(error) = driver.reset() {
                    shared.fail(error);
                }
                shared.timeline.signal(d.timeline);
                held = None;
                moved = true;
            }
            // Backpressure: the half's last results are unread.
            Some(d) if shared.egress.acquire(d.offset) => {
                held = None;
                moved = true;
                shared.lost[d.offset as usize].store(false, Ordering::Relaxed);
                match driver.submit(jobs.get(d.buffer)) {
                    Ok(submits) => {
                        shared.submits.fetch_add(submits, Ordering::Relaxed);
                        flying.push_back(Flying {
                            descriptor: d,
                            since: Instant::now(),
                        });
                    }
                    Err(error) => {
                        shared.fail(error);
                        // Whatever flies must land before its timeline may pass.
                        land(&mut driver, shared, jobs, &mut flying, timeout);
                        shared.timeline.signal(d.timeline);
                    }
                }
            }
            _ => {}
        }
        moved |= step(&mut driver, shared, jobs, &mut flying, timeout);
        if moved || !flying.is_empty() {
            idle = Instant::now();
        }
        if !moved {
            match (flying.is_empty(), idle.elapsed() < SPIN) {
                (_, true) => std::hint::spin_loop(),
                (true, false) if held.is_none() => thread::park_timeout(IDLE),
                _ => thread::sleep(NAP),
            }
        }
    }
}

/// Looks at the oldest job in flight once; true when it ended.
fn step(
    driver: &mut impl Driver,
    shared: &Shared,
    jobs: &Jobs,
    flying: &mut VecDeque<Flying>,
    timeout: Duration,
) -> bool {
    let Some(job) = flying.front() else {
        return false;
    };
    let d = job.descriptor;
    let since = job.since;
    let answer = driver.poll(jobs.get(d.buffer));
    let spent = since.elapsed();
    let lost = match answer {
        Ok(true) => false,
        Ok(false) if spent < timeout => return false,
        Ok(false) => true,
        Err(error) => {
            shared.fail(error);
            true
        }
    };
    if lost {
        shared.misses.fetch_add(1, Ordering::Relaxed);
        shared.lost[d.offset as usize].store(true, Ordering::Release);
    }
    shared
        .busy_ns
        .fetch_add(spent.as_nanos() as u64, Ordering::Relaxed);
    flying.pop_front();
    // The next one has had the hardware to itself from now on.
    if let Some(next) = flying.front_mut() {
        next.since = Instant::now();
    }
    shared.timeline.signal(d.timeline);
    true
}

fn land(
    driver: &mut impl Driver,
    shared: &Shared,
    jobs: &Jobs,
    flying: &mut VecDeque<Flying>,
    timeout: Duration,
) {
    while !flying.is_empty() {
        if !step(driver, shared, jobs, flying, timeout) {
            thread::sleep(NAP);
        }
    }
}
