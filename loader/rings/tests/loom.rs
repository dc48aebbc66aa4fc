//! Every interleaving of a producer and a consumer: `RUSTFLAGS="--cfg loom" cargo test -p ork-rings --release`.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use ork_rings::{Descriptor, Egress, TaskRing, Timeline};

fn descriptor(i: u64) -> Descriptor {
    Descriptor {
        buffer: i as u32,
        offset: i as u32 + 10,
        tokens: i as u32 + 20,
        flags: 0,
        timeline: i,
    }
}

/// Descriptors arrive whole, once, in order, though there are more than the ring holds.
#[test]
fn descriptors_arrive_whole_and_in_order() {
    loom::model(|| {
        let ring = Arc::new(TaskRing::default());
        let consumer = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                let mut next = 1;
                while next <= 3 {
                    match ring.pop() {
                        Some(d) => {
                            assert_eq!(d, descriptor(next));
                            next += 1;
                        }
                        None => thread::yield_now(),
                    }
                }
            })
        };
        for i in 1..=3 {
            while !ring.push(descriptor(i)) {
                thread::yield_now();
            }
        }
        consumer.join().unwrap();
    });
}

/// The input is visible to whoever takes the descriptor, the result to whoever sees the timeline, and
/// a half is never written while its last result is unread.
#[test]
fn halves_are_never_overwritten() {
    loom::model(|| {
        let ring = Arc::new(TaskRing::default());
        let timeline = Arc::new(Timeline::default());
        let egress = Arc::new(Egress::default());
        // Plain memory to the model: relaxed, ordered by the rings alone.
        let input = Arc::new(AtomicU32::new(0));
        let output = Arc::new(AtomicU32::new(0));
        let device = {
            let (ring, timeline, egress) = (ring.clone(), timeline.clone(), egress.clone());
            let (input, output) = (input.clone(), output.clone());
            thread::spawn(move || {
                for _ in 0..2 {
                    let d = loop {
                        match ring.pop() {
                            Some(d) => break d,
                            None => thread::yield_now(),
                        }
                    };
                    while !egress.acquire(0) {
                        thread::yield_now();
                    }
                    assert_eq!(output.load(Ordering::Relaxed), 0, "an unread result");
                    output.store(input.load(Ordering::Relaxed) * 2, Ordering::Relaxed);
                    timeline.signal(d.timeline);
                }
            })
        };
        for i in 1..=2u32 {
            input.store(i, Ordering::Relaxed);
            assert!(ring.push(descriptor(u64::from(i))));
            while !timeline.reached(u64::from(i)) {
                thread::yield_now();
            }
            assert_eq!(output.load(Ordering::Relaxed), i * 2);
            output.store(0, Ordering::Relaxed);
            egress.release(0);
        }
        device.join().unwrap();
    });
}
