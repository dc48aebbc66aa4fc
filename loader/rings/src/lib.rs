//! What the CPU engine and the NPU's worker thread share: a ring of task descriptors, a timeline of
//! finished ones, and the two halves of the egress ring.
//!
//! One producer and one consumer each. Atomics only: no lock, no unsafe. `tests/loom.rs` runs every
//! interleaving of small cases.
#![forbid(unsafe_code)]

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Descriptors in flight at most.
#[cfg(not(loom))]
pub const CAPACITY: usize = 256;
/// Small, so that model checking reaches the wrap.
#[cfg(loom)]
pub const CAPACITY: usize = 2;

/// One piece of work for the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// What to run: the index of a job resolved at load.
    pub buffer: u32,
    /// Half of A buffers and egress ring that it uses.
    pub offset: u32,
    /// Rows that matter.
    pub tokens: u32,
    /// [`Descriptor::STOP`] and the like.
    pub flags: u32,
    /// Value of the timeline once it is done.
    pub timeline: u64,
}

impl Descriptor {
    /// No work: the consumer ends.
    pub const STOP: u32 = 1;
}

/// One descriptor as three words, so that a slot needs no lock.
#[derive(Default)]
struct Slot([AtomicU64; 3]);

/// A bounded queue of descriptors, one producer, one consumer; a full ring refuses, nothing is
/// overwritten.
pub struct TaskRing {
    slots: Vec<Slot>,
    /// Descriptors ever pushed; written by the producer.
    pushed: AtomicU64,
    /// Descriptors ever taken; written by the consumer.
    taken: AtomicU64,
}

impl Default for TaskRing {
    fn default() -> Self {
        Self {
            slots: (0..CAPACITY).map(|_| Slot::default()).collect(),
            pushed: AtomicU64::new(0),
            taken: AtomicU64::new(0),
        }
    }
}

impl TaskRing {
    /// Producer: appends, or returns false when the ring is full.
    pub fn push(&self, d: Descriptor) -> bool {
        let at = self.pushed.load(Ordering::Relaxed);
        // Acquire: the consumer has read the slot before it counted it as taken.
        if at - self.taken.load(Ordering::Acquire) == CAPACITY as u64 {
            return false;
        }
        let [a, b, c] = &self.slots[at as usize % CAPACITY].0;
        a.store(pair(d.buffer, d.offset), Ordering::Relaxed);
        b.store(pair(d.tokens, d.flags), Ordering::Relaxed);
        c.store(d.timeline, Ordering::Relaxed);
        // Release: whoever sees the count sees the slot, and the A buffer written before it.
        self.pushed.store(at + 1, Ordering::Release);
        true
    }

    /// Consumer: the oldest descriptor.
    pub fn pop(&self) -> Option<Descriptor> {
        let at = self.taken.load(Ordering::Relaxed);
        if self.pushed.load(Ordering::Acquire) == at {
            return None;
        }
        let [a, b, c] = &self.slots[at as usize % CAPACITY].0;
        let (buffer, offset) = split(a.load(Ordering::Relaxed));
        let (tokens, flags) = split(b.load(Ordering::Relaxed));
        let timeline = c.load(Ordering::Relaxed);
        self.taken.store(at + 1, Ordering::Release);
        Some(Descriptor {
            buffer,
            offset,
            tokens,
            flags,
            timeline,
        })
    }
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn split(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Counts finished descriptors, in order; one writer.
#[derive(Default)]
pub struct Timeline(AtomicU64);

impl Timeline {
    /// Writer: everything up to `value` is done, its results are in memory.
    pub fn signal(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }

    /// Whether `value` is done; if so, its results are visible.
    #[must_use]
    pub fn reached(&self, value: u64) -> bool {
        value <= self.0.load(Ordering::Acquire)
    }
}

/// Who owns each half of the egress ring: the device may write a half only after the engine has read
/// what was there.
#[derive(Default)]
pub struct Egress([AtomicU32; 2]);

/// The engine has read the half, or never used it.
const FREE: u32 = 0;
/// The device writes it, or its results wait to be read.
const FULL: u32 = 1;

impl Egress {
    /// Device side: takes a half to write to; false while its last results are unread.
    pub fn acquire(&self, half: u32) -> bool {
        self.0[half as usize]
            .compare_exchange(FREE, FULL, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// Engine side: the half's results are read and its sentinels are back.
    pub fn release(&self, half: u32) {
        self.0[half as usize].store(FREE, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_full_ring_refuses_and_keeps_order() {
        let ring = TaskRing::default();
        let d = |i: u64| Descriptor {
            buffer: i as u32,
            offset: 1,
            tokens: u32::MAX,
            flags: 7,
            timeline: u64::MAX - i,
        };
        for round in 0..3u64 {
            for i in 0..CAPACITY as u64 {
                assert!(ring.push(d(round + i)));
            }
            assert!(!ring.push(d(0)));
            for i in 0..CAPACITY as u64 {
                assert_eq!(ring.pop(), Some(d(round + i)));
            }
            assert_eq!(ring.pop(), None);
        }
    }
}
