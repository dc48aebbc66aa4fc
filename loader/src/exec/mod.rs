//! Walks the op list over activation slots: the only place where device and CPU meet.
//!
//! A prefill chunk is two lanes, its half-chunks. Each lane runs its CPU ops until it has started a
//! matmul on the device, then the other lane has the CPU. Lane 0 is always at or before the ops of lane 1
//! in the same layer, so that keys, values and states are appended in order; rows are independent
//! otherwise, and the numbers are those of the strict order.

mod npu;
mod ops;

pub use npu::Times;
pub(crate) use npu::{Engine, seed};

use crate::error::{Error, Result};
use crate::map::Pack;
use crate::state::State;
use npu::Pending;
use ops::Context;
use ork_formats::model::{Manifest, Op};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Not a possible int32 result (|sum| <= 127 * 127 * K): marks a word the device has not written.
pub(crate) const SENTINEL: i32 = 0x7fff_ffff;

/// Which weights a linear uses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Prompt tokens: W8A8 on the device.
    Prefill,
    /// Generated tokens: the host form.
    Decode,
}

/// Activation slots, reused by every chunk.
pub(crate) struct Slots(Vec<Vec<f32>>);

impl Slots {
    pub(crate) fn new(manifest: &Manifest) -> Self {
        Self(vec![Vec::new(); manifest.model.slots.len()])
    }

    /// The last chunk's rows of one slot.
    pub(crate) fn rows(&self, slot: u32) -> &[f32] {
        &self.0[slot as usize]
    }
}

/// What a chunk works on: the sequence's state and the slots.
type Memory<'a> = (&'a mut State, &'a mut Slots);

/// One half-chunk on its way through the ops.
struct Lane {
    half: u32,
    rows: Range<usize>,
    /// Next op.
    next: usize,
}

/// Runs one chunk of `ids` at positions `position..`. `stop` ends it between two ops.
pub(crate) fn run(
    pack: &Pack,
    engine: &mut Engine,
    (state, slots): Memory<'_>,
    ids: &[u32],
    position: usize,
    phase: Phase,
    stop: Option<&AtomicBool>,
) -> Result<()> {
    let manifest = pack.reader().manifest();
    for (slot, width) in slots.0.iter_mut().zip(&manifest.model.slots) {
        slot.resize(ids.len() * *width as usize, 0.0);
    }
    let mut lanes = lanes(manifest, ids.len(), phase);
    let context = Context::new(pack, ids, position, phase);
    engine.changed(0);
    engine.changed(1);
    let mut flying = [None, None];
    let mut walk = || -> Result<()> {
        while lanes.iter().any(|l| l.next < manifest.model.ops.len()) {
            for lane in &mut lanes {
                if stop.is_some_and(|s| s.load(Ordering::Relaxed)) {
                    return Err(Error::Interrupted);
                }
                advance(&context, engine, (state, slots), lane, &mut flying)?;
            }
        }
        Ok(())
    };
    let done = walk();
    if done.is_err() {
        engine.abandon(pack, &flying);
    }
    done
}

/// Two halves where the device takes part, else everything at once.
fn lanes(manifest: &Manifest, rows: usize, phase: Phase) -> Vec<Lane> {
    let half_rows = match (&manifest.npu, phase) {
        (Some(plan), Phase::Prefill) => plan.half_rows as usize,
        _ => rows,
    };
    (0..rows)
        .step_by(half_rows.max(1))
        .enumerate()
        .map(|(half, first)| Lane {
            half: half as u32,
            rows: first..rows.min(first + half_rows),
            next: 0,
        })
        .collect()
}

/// Takes the lane from its pending matmul to its next one.
fn advance(
    context: &Context<'_>,
    engine: &mut Engine,
    (state, slots): Memory<'_>,
    lane: &mut Lane,
    flying: &mut [Option<Pending>; 2],
) -> Result<()> {
    let manifest = context.manifest;
    let half = lane.half as usize;
    while let Some(op) = manifest.model.ops.get(lane.next) {
        let matmul = match *op {
            Op::Linear { weight, .. } if context.phase == Phase::Prefill => {
                let on_device = manifest.tensors[weight as usize].npu.is_some();
                (on_device && manifest.npu.is_some()).then_some(*op)
            }
            _ => None,
        };
        let Some(Op::Linear {
            x,
            weight,
            bias,
            out,
        }) = matmul
        else {
            ops::apply(context, engine, (state, slots), op, &lane.rows);
            engine.changed(lane.half);
            lane.next += 1;
            continue;
        };
        if flying[half].is_none() {
            let source = &slots.0[x as usize][context.span(x, &lane.rows)];
            flying[half] = Some(engine.start(context.pack, weight, lane.half, (x, source))?);
            if engine.overlap {
                return Ok(());
            }
        }
        let mut target = std::mem::take(&mut slots.0[out as usize]);
        let rows = &mut target[context.span(out, &lane.rows)];
        let finished = engine.finish(context.pack, lane.half, flying, rows);
        if let (Some(bias), Ok(())) = (bias, &finished) {
            context.add_bias(bias, rows);
        }
        slots.0[out as usize] = target;
        finished?;
        flying[half] = None;
        if out == x {
            engine.changed(lane.half);
        }
        lane.next += 1;
    }
    Ok(())
}
