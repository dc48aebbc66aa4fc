//! The cores: take jobs, run their streams over the device's view of memory.

use crate::buffer::Buffer;
use crate::{Fault, Inner, State};
use ork_formats::regcmd::{self, Word, reg};
use ork_sim::Memory;
use std::collections::BTreeMap;
use std::sync::Weak;
use std::thread;
use std::time::{Duration, Instant};

/// Programs that a core runs in sequence.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// Number of the job since the start.
    pub(crate) number: u64,
    /// Device address of each program.
    pub(crate) programs: Vec<u32>,
    /// Follow the links in the streams (a vendor chain) instead of the list.
    pub(crate) linked: bool,
    /// Handles to count as used until it ends.
    pub(crate) handles: Vec<u32>,
    /// Reset count at which it was submitted: a later reset cancels it.
    pub(crate) epoch: u64,
}

/// One program as its registers say.
struct Matmul {
    a: (u32, usize),
    c: (u32, usize),
    /// Multiply-accumulates.
    macs: f64,
}

/// A core's life: ends with the fake.
pub(crate) fn core(inner: &Weak<Inner>, index: usize) {
    while let Some(inner) = inner.upgrade() {
        let mut state = inner.lock();
        if state.stopping {
            return;
        }
        let Some(job) = state.queues[index].pop_front() else {
            // Short, so that the weak reference is looked at again.
            let waited = inner.changed.wait_timeout(state, Duration::from_millis(2));
            drop(waited);
            continue;
        };
        drop(state);
        let lost = inner.fault(|f| {
            *f == Fault::LoseJob(job.number) || matches!(f, Fault::LoseFrom(n) if *n <= job.number)
        });
        for fault in &inner.config.faults {
            if let Fault::LateJob(n, delay) = fault
                && *n == job.number
            {
                thread::sleep(*delay);
            }
        }
        if !lost {
            match inner.config.hollow {
                Some(rate) => hollow(&inner, &job, rate),
                None => run(&inner, &job),
            }
        }
        let mut state = inner.lock();
        state.running -= 1;
        for handle in &job.handles {
            if let Some(buffer) = state.buffers.get_mut(handle) {
                buffer.users -= 1;
            }
        }
        drop(state);
        inner.changed.notify_all();
    }
}

fn run(inner: &Inner, job: &Job) {
    let mut guard = inner.lock();
    let state = &mut *guard;
    if job.epoch != state.resets {
        return;
    }
    let matmuls = match decode(state, job) {
        Ok(matmuls) => matmuls,
        Err(fault) => {
            state.violations.push(fault);
            return;
        }
    };
    let imported = state.buffers.values().filter(|b| b.imported);
    let touches = imported.flat_map(|b| matmuls.iter().map(move |m| (b, m)));
    let wedged = touches
        .filter(|(b, m)| inside(b, m.a).is_some() || inside(b, m.c).is_some())
        .count();
    if 1 < matmuls.len() && job.linked && 0 < wedged {
        let text = format!("job {}: a chain over imported buffers", job.number);
        state.violations.push(text);
        return;
    }
    if inner.config.coherent {
        for m in &matmuls {
            move_range(&mut state.buffers, m.a, Buffer::clean);
            move_range(&mut state.buffers, m.c, Buffer::clean);
        }
    }
    let skip = inner.fault(|f| *f == Fault::SkipWords(job.number));
    let kept = skip.then(|| read(&mut state.buffers, (matmuls[0].c.0, 64)));
    let cold = stale(&mut state.buffers, &matmuls);
    let mut memory = Memory::new();
    for buffer in state.buffers.values_mut() {
        let at = buffer.address as u32;
        memory.map(at, buffer.device(), true);
    }
    let words = regcmd::WORDS as u32;
    let caps = inner.config.caps;
    let result = match job.linked {
        true => ork_sim::run(
            &mut memory,
            job.programs[0],
            words,
            job.programs.len() as u32,
            caps,
            1,
        )
        .map(drop),
        false => job
            .programs
            .iter()
            .try_for_each(|p| ork_sim::run(&mut memory, *p, words, 1, caps, 1).map(drop)),
    };
    drop(memory);
    if let Err(fault) = result {
        state
            .violations
            .push(format!("job {}: {fault}", job.number));
        return;
    }
    for (at, bytes) in cold.into_iter().chain(kept.flatten()) {
        write(&mut state.buffers, at, &bytes);
    }
    if inner.config.coherent {
        for m in &matmuls {
            move_range(&mut state.buffers, m.c, Buffer::invalidate);
        }
    }
    state.cold = false;
    state.ledger.jobs += 1;
}

/// Takes the time that hardware would, and leaves zeros.
fn hollow(inner: &Inner, job: &Job, rate: f64) {
    let began = Instant::now();
    let matmuls = decode(&mut inner.lock(), job).expect("benchmarks run clean streams");
    let operations: f64 = matmuls.iter().map(|m| 2.0 * m.macs).sum();
    let service = Duration::from_secs_f64(operations / (rate * 1e9));
    thread::sleep(service.saturating_sub(began.elapsed()));
    let mut guard = inner.lock();
    let state = &mut *guard;
    for m in &matmuls {
        for buffer in state.buffers.values_mut() {
            if let Some(offset) = inside(buffer, m.c) {
                buffer.device()[offset..offset + m.c.1].fill(0);
                buffer.cold = false;
                if inner.config.coherent {
                    buffer.invalidate(offset, m.c.1);
                }
            }
        }
    }
    state.cold = false;
    state.ledger.jobs += 1;
}

/// Reads the programs as the device sees them.
fn decode(state: &mut State, job: &Job) -> Result<Vec<Matmul>, String> {
    let mut out = Vec::new();
    let mut at = job.programs[0];
    for i in 0..job.programs.len() {
        if !job.linked {
            at = job.programs[i];
        }
        let bytes = read(&mut state.buffers, (at, regcmd::BYTES))
            .map(|(_, bytes)| bytes)
            .ok_or_else(|| format!("job {}: no program at {at:#x}", job.number))?;
        let (words, _) = bytes.as_chunks::<8>();
        let get = |wanted| {
            words
                .iter()
                .map(|b| Word(u64::from_le_bytes(*b)))
                .filter(|w| w.is(wanted))
                .map(|w| w.value())
                .next_back()
                .unwrap_or(0)
        };
        let rows = get(reg::DATA_SIZE3) as usize;
        let channels = get(reg::FC_DATA_SIZE1) as usize;
        let columns = get(reg::CORE_DATAOUT_SIZE_1) as usize + 1;
        out.push(Matmul {
            a: (get(reg::FEATURE_DATA_ADDR), rows * channels),
            c: (get(reg::DST_BASE_ADDR), rows * columns * 4),
            macs: rows as f64 * channels as f64 * columns as f64,
        });
        if job.linked && i + 1 < job.programs.len() {
            at = get(reg::PC_NEXT_ADDR);
            if at != job.programs[i + 1] {
                return Err(format!(
                    "job {}: program {i} links to {at:#x}, its task array says {:#x}",
                    job.number,
                    job.programs[i + 1]
                ));
            }
        }
    }
    Ok(out)
}

/// The first job into a cold buffer leaves it as it was; returns what to put back.
fn stale(buffers: &mut BTreeMap<u32, Buffer>, matmuls: &[Matmul]) -> Vec<(u32, Vec<u8>)> {
    let mut out = Vec::new();
    for m in matmuls {
        for buffer in buffers.values_mut() {
            if let Some(offset) = inside(buffer, m.c)
                && buffer.cold
            {
                let bytes = buffer.device()[offset..offset + m.c.1].to_vec();
                out.push((m.c.0, bytes));
            }
        }
    }
    for m in matmuls {
        for buffer in buffers.values_mut() {
            if inside(buffer, m.c).is_some() {
                buffer.cold = false;
            }
        }
    }
    out
}

/// Offset of a device range inside a buffer.
pub(crate) fn inside(buffer: &Buffer, (at, bytes): (u32, usize)) -> Option<usize> {
    let offset = u64::from(at).checked_sub(buffer.address)? as usize;
    (offset + bytes <= buffer.len()).then_some(offset)
}

fn read(buffers: &mut BTreeMap<u32, Buffer>, range: (u32, usize)) -> Option<(u32, Vec<u8>)> {
    buffers.values_mut().find_map(|buffer| {
        let offset = inside(buffer, range)?;
        Some((range.0, buffer.device()[offset..offset + range.1].to_vec()))
    })
}

fn write(buffers: &mut BTreeMap<u32, Buffer>, at: u32, bytes: &[u8]) {
    for buffer in buffers.values_mut() {
        if let Some(offset) = inside(buffer, (at, bytes.len())) {
            buffer.device()[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
    }
}

fn move_range(
    buffers: &mut BTreeMap<u32, Buffer>,
    range: (u32, usize),
    how: fn(&mut Buffer, usize, usize),
) {
    for buffer in buffers.values_mut() {
        if let Some(offset) = inside(buffer, range) {
            how(buffer, offset, range.1);
        }
    }
}
