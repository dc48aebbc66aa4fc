//! Matmuls on the device: activations in, int32 blocks out, and what to do when an answer is missing.

use super::SENTINEL;
use crate::cpu::linear;
use crate::device::jobs::Jobs;
use crate::device::{Counters, Cpu, Device, Ended};
use crate::error::{Error, Result};
use crate::map::Pack;
use ork_formats::model::{NpuForm, NpuPlan, Place, Program, Region, Slot, TensorId};
use ork_kernels as kernels;
use rayon::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Host time spent around the device, for `--stats`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// Quantising activations.
    pub quantise: Duration,
    /// Copying them into the other cores' buffers.
    pub copy: Duration,
    /// Handing jobs over.
    pub submit: Duration,
    /// Waiting for the device.
    pub wait: Duration,
    /// Summing, scaling and re-seeding results.
    pub dequantise: Duration,
    /// Attention.
    pub attention: Duration,
    /// Norms, activations, rotary embeddings, additions, lookups.
    pub other: Duration,
    /// Activation and result bytes moved.
    pub bytes: u64,
}

/// A job in flight, and what its results need.
pub(super) struct Pending {
    job: u32,
    rows: u32,
    tensor: TensorId,
    /// Scale of each row.
    scales: Arc<Vec<f32>>,
}

/// Quantised activations in the A buffers of one half: q, k and v read the same ones.
struct Fed {
    slot: Slot,
    /// (K, K of a slice, slices, row class): the layout in the buffer.
    layout: (u32, u32, u32, u32),
    scales: Arc<Vec<f32>>,
}

/// The device, with the policy for lost answers: reset and resubmit once, then the CPU for the rest of
/// the request.
pub(crate) struct Engine {
    device: Box<dyn Device>,
    /// Present once the device failed.
    spare: Option<Cpu>,
    on_spare: bool,
    retried: bool,
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) overlap: bool,
    pub(crate) times: Times,
    /// Jobs that the CPU did in the device's place.
    pub(crate) fallbacks: u64,
    /// One line for the person, said once a request.
    pub(crate) warning: Option<String>,
    /// What each half's A buffers hold: (slot, geometry, scales of its rows), while it is current.
    fed: [Option<Fed>; 2],
    /// Scales of a tensor's output channels are read once.
    channel_scales: Vec<Option<Arc<Vec<f32>>>>,
}

impl Engine {
    pub(crate) fn new(
        pack: &Pack,
        device: Box<dyn Device>,
        jobs: Arc<Jobs>,
        overlap: bool,
    ) -> Self {
        let mut out = Self {
            device,
            spare: None,
            on_spare: false,
            retried: false,
            jobs,
            overlap,
            times: Times::default(),
            fallbacks: 0,
            warning: None,
            fed: [None, None],
            channel_scales: vec![None; pack.reader().manifest().tensors.len()],
        };
        if let Some(plan) = &pack.reader().manifest().npu {
            seed(&mut *out.device, plan);
        }
        out
    }

    pub(crate) fn name(&self) -> &'static str {
        self.device.name()
    }

    pub(crate) fn is_hardware(&self) -> bool {
        self.device.is_hardware()
    }

    pub(crate) fn counters(&self) -> Counters {
        self.device.counters()
    }

    /// A new request trusts the device again.
    pub(crate) fn begin(&mut self) {
        self.on_spare = false;
        self.retried = false;
        self.fed = [None, None];
    }

    fn device(&mut self) -> &mut dyn Device {
        match (&mut self.spare, self.on_spare) {
            (Some(spare), true) => spare,
            _ => &mut *self.device,
        }
    }

    /// The rows of a half have changed somewhere: its A buffers may be stale.
    pub(super) fn changed(&mut self, half: u32) {
        self.fed[half as usize] = None;
    }

    /// Quantises `x` `[rows, k]`, the half's rows of `slot`, into the A buffers of `half` where they are
    /// not there yet, and starts the job.
    pub(super) fn start(
        &mut self,
        pack: &Pack,
        tensor: TensorId,
        half: u32,
        (slot, x): (Slot, &[f32]),
    ) -> Result<Pending> {
        let manifest = pack.reader().manifest();
        let plan = manifest.npu.as_ref().expect("asked for by the caller");
        let t = &manifest.tensors[tensor as usize];
        let form = t.npu.as_ref().expect("asked for by the caller");
        let rows = (x.len() / t.k as usize) as u32;
        let job = self.jobs.find(tensor, half, rows).ok_or_else(|| {
            Error::Failed(format!(
                "{}: the pack has no chain for {rows} rows of half {half}",
                t.name
            ))
        })?;
        let class = self.jobs.get(job).rows;
        let layout = (t.k, form.slice_k, form.k_slices, class);
        let current = self.fed[half as usize].as_ref();
        let current = current.filter(|fed| fed.slot == slot && fed.layout == layout);
        let scales = match current {
            Some(fed) => Arc::clone(&fed.scales),
            None => {
                let sizes = (t.k as usize, class as usize);
                let mut times = self.times;
                let device = self.device();
                let scales = feed(device, plan, form, half as usize, x, sizes, &mut times);
                self.times = times;
                Arc::new(scales)
            }
        };
        self.fed[half as usize] = Some(Fed {
            slot,
            layout,
            scales: Arc::clone(&scales),
        });
        let pending = Pending {
            job,
            rows,
            tensor,
            scales,
        };
        let began = Instant::now();
        let jobs = Arc::clone(&self.jobs);
        self.device().start(pack, &jobs, job, rows)?;
        self.times.submit += began.elapsed();
        Ok(pending)
    }

    /// Waits for the job of `half` and writes its results `[rows, n]`. `flying` are the jobs of both
    /// halves, this one included: a reset takes them all.
    pub(super) fn finish(
        &mut self,
        pack: &Pack,
        half: u32,
        flying: &[Option<Pending>; 2],
        out: &mut [f32],
    ) -> Result<()> {
        loop {
            let began = Instant::now();
            let ended = self.device().wait(half)?;
            self.times.wait += began.elapsed();
            let pending = flying[half as usize].as_ref().expect("in flight");
            let whole = ended == Ended::Done && self.collect(pack, pending, out)?;
            if whole {
                self.device().release(half);
                return Ok(());
            }
            self.recover(pack, flying)?;
        }
    }

    /// After a lost answer: every job in flight runs again, on the reset device the first time, on the
    /// CPU from then on.
    fn recover(&mut self, pack: &Pack, flying: &[Option<Pending>; 2]) -> Result<()> {
        let manifest = pack.reader().manifest();
        let plan = manifest.npu.as_ref().expect("a job was in flight");
        for half in [0, 1] {
            if flying[half as usize].is_some() {
                self.device().wait(half)?;
                self.device().release(half);
            }
        }
        let name = self.device.name();
        self.device.reset()?;
        seed(&mut *self.device, plan);
        if self.retried && !self.on_spare {
            self.on_spare = true;
            self.warning = Some(format!(
                "{name}: a job was lost twice; the CPU does the rest of this request"
            ));
            let mut spare = Cpu::new(pack);
            seed(&mut spare, plan);
            for at in plan.a_buffers.iter() {
                let len = plan.a_bytes as usize;
                spare
                    .bytes_mut(*at, len)
                    .copy_from_slice(self.device.bytes(*at, len));
            }
            self.spare = Some(spare);
        }
        self.retried = true;
        let jobs = Arc::clone(&self.jobs);
        for pending in flying.iter().flatten() {
            self.device()
                .start(pack, &jobs, pending.job, pending.rows)?;
        }
        Ok(())
    }

    /// Ends whatever is in flight without reading it, after an error elsewhere.
    pub(super) fn abandon(&mut self, pack: &Pack, flying: &[Option<Pending>; 2]) {
        for half in [0, 1] {
            if flying[half as usize].is_some() {
                // The first error is the one to report.
                let _ = self.device().wait(half);
                self.device().release(half);
            }
        }
        if let Some(plan) = &pack.reader().manifest().npu {
            seed(self.device(), plan);
        }
    }

    fn channel_scales(&mut self, pack: &Pack, tensor: TensorId) -> Arc<Vec<f32>> {
        let slot = &mut self.channel_scales[tensor as usize];
        let read = || {
            let form = pack.reader().manifest().tensors[tensor as usize]
                .npu
                .as_ref();
            let (words, _) =
                linear::bytes(pack.host(), form.expect("in flight").scales).as_chunks();
            Arc::new(words.iter().map(|b| f32::from_le_bytes(*b)).collect())
        };
        Arc::clone(slot.get_or_insert_with(read))
    }

    /// Sums K slices in int32, scales into `out` `[rows, n]`, checks every word and puts the sentinel
    /// back in the same pass. False when a word was never written; the block it is in is left as it was.
    fn collect(&mut self, pack: &Pack, pending: &Pending, out: &mut [f32]) -> Result<bool> {
        let began = Instant::now();
        let manifest = pack.reader().manifest();
        let plan = manifest.npu.as_ref().expect("in flight");
        let n = manifest.tensors[pending.tensor as usize].n as usize;
        let scales = self.channel_scales(pack, pending.tensor);
        let jobs = Arc::clone(&self.jobs);
        let job = jobs.get(pending.job);
        if self.on_spare {
            self.fallbacks += 1;
        }
        let programs = job.programs(plan, pending.rows);
        let mut moved = 0;
        let device = self.device();
        for first in programs.iter().filter(|p| p.slice == 0) {
            let rows = first.m.min(pending.rows - first.row0) as usize;
            let same = |p: &&&Program| p.row0 == first.row0 && p.n0 == first.n0;
            let slices: Vec<&Program> = programs.iter().filter(same).copied().collect();
            if !add_up(
                device,
                &slices,
                rows,
                first,
                &pending.scales,
                &scales,
                n,
                out,
            ) {
                return Ok(false);
            }
            moved += slices.len() as u64 * u64::from(first.m * first.n * 4);
        }
        // Surplus rows too: other tensors lay their blocks over the same ring, and no stale word of this
        // one may pass for a result of theirs.
        for p in job
            .parts
            .iter()
            .flat_map(|p| crate::device::jobs::programs(plan, &p.chain))
        {
            let kept = pending.rows.saturating_sub(p.row0).min(p.m) * p.n * 4;
            let at = Place {
                offset: p.c.offset + kept,
                ..p.c
            };
            fill(device.bytes_mut(at, (p.m * p.n * 4 - kept) as usize));
        }
        self.times.bytes += moved;
        self.times.dequantise += began.elapsed();
        Ok(true)
    }
}

/// One block of outputs: the sum of its K slices. Reads first and seeds after, so that a missing word
/// leaves everything as it was.
#[expect(
    clippy::too_many_arguments,
    reason = "one pass over everything it names"
)]
fn add_up(
    device: &mut dyn Device,
    slices: &[&Program],
    rows: usize,
    first: &Program,
    row_scales: &[f32],
    scales: &[f32],
    n: usize,
    out: &mut [f32],
) -> bool {
    let width = first.n as usize;
    let (row0, n0) = (first.row0 as usize, first.n0 as usize);
    let columns = width.min(n - n0);
    let blocks: Vec<&[u8]> = slices
        .iter()
        .map(|p| device.bytes(p.c, rows * width * 4))
        .collect();
    let whole = out[row0 * n..]
        .par_chunks_exact_mut(n)
        .take(rows)
        .with_min_len(4)
        .enumerate()
        .map_init(
            || vec![0i32; width],
            |acc, (row, out)| {
                acc.fill(0);
                let mut whole = true;
                for block in &blocks {
                    let (words, _) = block[row * width * 4..][..width * 4].as_chunks::<4>();
                    for (acc, word) in acc.iter_mut().zip(words) {
                        let value = i32::from_le_bytes(*word);
                        whole &= value != SENTINEL;
                        *acc = acc.wrapping_add(value);
                    }
                }
                let target = &mut out[n0..n0 + columns];
                kernels::dequantize_row(acc, row_scales[row0 + row], &scales[n0..], target);
                whole
            },
        )
        .reduce(|| true, |a, b| a && b);
    if whole {
        for p in slices {
            device
                .bytes_mut(p.c, rows * width * 4)
                .par_chunks_mut(1 << 14)
                .for_each(fill);
        }
    }
    whole
}

/// Writes sentinels over whole words.
fn fill(bytes: &mut [u8]) {
    let (words, _) = bytes.as_chunks_mut::<4>();
    words.fill(SENTINEL.to_le_bytes());
}

/// Marks every word of the ring, so that one the device missed is seen.
pub(crate) fn seed(device: &mut dyn Device, plan: &NpuPlan) {
    for (extent, e) in plan.extents.iter().enumerate() {
        if e.region == Region::Ring {
            let at = Place {
                extent: extent as u32,
                offset: 0,
            };
            fill(device.bytes_mut(at, e.bytes as usize));
        }
    }
}

/// Quantises `x` `[rows, k]` straight into core 0's A buffer of `half`, slice by slice, surplus rows
/// zero, and copies it to the other cores. Returns each row's scale.
fn feed(
    device: &mut dyn Device,
    plan: &NpuPlan,
    form: &NpuForm,
    half: usize,
    x: &[f32],
    (k, class): (usize, usize),
    times: &mut Times,
) -> Vec<f32> {
    let (slice_k, slices) = (form.slice_k as usize, form.k_slices as usize);
    let stride = plan.half_rows as usize * slice_k;
    let used = (slices - 1) * stride + class * slice_k;
    let began = Instant::now();
    let first = plan.a_buffers[half * plan.cores as usize];
    let image = device.bytes_mut(first, used);
    let rows = x.len() / k;
    let mut scales = vec![0.0; rows];
    match slices {
        1 => {
            let (filled, surplus) = image.split_at_mut(rows * slice_k);
            filled
                .par_chunks_exact_mut(slice_k)
                .zip(x.par_chunks_exact(k))
                .zip(&mut scales)
                .with_min_len(16)
                .for_each(|((row, x), scale)| {
                    *scale = kernels::quantize_row(x, bytemuck::cast_slice_mut(row));
                });
            surplus.fill(0);
        }
        _ => {
            let quantised: Vec<(f32, Vec<i8>)> = x
                .par_chunks_exact(k)
                .map(|row| {
                    let mut q = vec![0; slice_k * slices];
                    (kernels::quantize_row(row, &mut q), q)
                })
                .collect();
            for slice in 0..slices {
                let part = &mut image[slice * stride..][..class * slice_k];
                let (filled, surplus) = part.split_at_mut(rows * slice_k);
                for (to, (_, q)) in filled.chunks_exact_mut(slice_k).zip(&quantised) {
                    to.copy_from_slice(bytemuck::cast_slice(&q[slice * slice_k..][..slice_k]));
                }
                surplus.fill(0);
            }
            for (scale, (s, _)) in scales.iter_mut().zip(&quantised) {
                *scale = *s;
            }
        }
    }
    times.quantise += began.elapsed();
    let began = Instant::now();
    for core in 1..plan.cores as usize {
        device.copy(
            first,
            plan.a_buffers[half * plan.cores as usize + core],
            used,
        );
    }
    times.copy += began.elapsed();
    times.bytes += u64::from(plan.cores) * used as u64;
    scales
}
