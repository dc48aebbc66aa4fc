//! Checks a pack on this machine against the answers it carries.

use crate::device::jobs::Jobs;
use crate::device::{self, Cpu, Device, Ended, Sim};
use crate::error::{Error, Result};
use crate::exec;
use crate::map::Pack;
use crate::session::{Backend, Config, Hardware, Session};
use crate::tokenizer::Tokenizer;
use ork_formats::golden::{Answer, ROWS, activation};
use ork_formats::model::NpuPlan;
use std::path::Path;
use std::sync::Arc;

/// What was compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    /// Sections hashed.
    pub sections: usize,
    /// Texts tokenised.
    pub texts: usize,
    /// int32 blocks compared, over all backends.
    pub blocks: usize,
    /// Logits of a short prompt that agree bit for bit between the backends.
    pub logits: usize,
}

/// Hashes the file, tokenises, runs programs in the simulator, on the CPU and on the NPU where `backend`
/// is one, and compares.
///
/// # Errors
/// [`Error::Verify`] naming the first difference; [`Error::Mismatch`] for a pack without answers.
pub fn run(path: &Path, backend: Backend, threads: usize) -> Result<Checked> {
    let pack = Pack::open(path)?;
    let reader = pack.reader();
    reader
        .verify(pack.bytes())
        .map_err(|e| Error::Verify(e.to_string()))?;
    let golden = reader.golden().ok_or_else(|| {
        Error::Mismatch(format!(
            "{}: format version {} carries no answers; recompile the checkpoint",
            path.display(),
            reader.version()
        ))
    })?;
    let tokenizer = Tokenizer::new(reader.tokenizer(), &reader.manifest().text)?;
    for (text, want) in &golden.texts {
        let have = tokenizer.encode(text)?;
        if have != *want {
            return Err(Error::Verify(format!(
                "tokenizer: {text:?} gives {have:?}, the pack says {want:?}"
            )));
        }
    }
    let mut blocks = 0;
    if let Some(plan) = &reader.manifest().npu {
        let jobs = Arc::new(Jobs::new(reader));
        let mut devices: Vec<Box<dyn Device>> = vec![
            Box::new(Sim::new(&pack, threads)),
            Box::new(Cpu::new(&pack)),
        ];
        if matches!(backend, Backend::Rknpu | Backend::Rocket) {
            let Hardware {
                kernel, options, ..
            } = Hardware::default();
            devices.push(device::open(&kernel, &pack, &jobs, backend, &options)?.0);
        }
        for mut device in devices {
            for answer in &golden.blocks {
                block(&pack, plan, &mut *device, &jobs, answer)?;
                blocks += 1;
            }
        }
    }
    let logits = golden
        .texts
        .first()
        .map_or(Ok(0), |(_, ids)| agree(path, backend, threads, ids))?;
    Ok(Checked {
        sections: reader.sections().len(),
        texts: golden.texts.len(),
        blocks,
        logits,
    })
}

/// Runs the job of one answer's program on the pattern and compares its block.
fn block(
    pack: &Pack,
    plan: &NpuPlan,
    device: &mut dyn Device,
    jobs: &Jobs,
    answer: &Answer,
) -> Result<()> {
    let p = &plan.programs[answer.program as usize];
    let id = jobs
        .with_program(answer.program)
        .expect("the reader proved that every program is in a chain");
    let half = jobs.get(id).half;
    let rows = ROWS.min(p.m as usize);
    exec::seed(device, plan);
    let (k, n) = (p.k as usize, p.n as usize);
    let a = device.bytes_mut(p.a, p.m as usize * k);
    a.fill(0);
    for (i, byte) in a[..rows * k].iter_mut().enumerate() {
        *byte = activation(i) as u8;
    }
    device.start(pack, jobs, id, jobs.get(id).rows)?;
    let ended = device.wait(half)?;
    let hash = *blake3::hash(device.bytes(p.c, rows * n * 4)).as_bytes();
    device.release(half);
    match hash == answer.hash && ended == Ended::Done {
        true => Ok(()),
        false => Err(Error::Verify(format!(
            "{}: program {} ({} x {k} x {n}) computes another block than the pack says",
            device.name(),
            answer.program,
            p.m
        ))),
    }
}

/// Prefills `ids` in the simulator and on the CPU, or on the NPU instead; the logits must be the same bits.
fn agree(path: &Path, backend: Backend, threads: usize, ids: &[u32]) -> Result<usize> {
    let logits = |backend| {
        let config = Config {
            backend,
            threads,
            ctx: None,
        };
        Session::open(path, config)?.prefill(ids)
    };
    let other = match backend {
        Backend::Rknpu | Backend::Rocket => backend,
        Backend::Auto | Backend::Sim | Backend::Cpu => Backend::Cpu,
    };
    let (sim, cpu) = (logits(Backend::Sim)?, logits(other)?);
    match sim
        .iter()
        .zip(&cpu)
        .position(|(a, b)| a.to_bits() != b.to_bits())
    {
        None => Ok(sim.len()),
        Some(id) => Err(Error::Verify(format!(
            "logit of id {id}: {} in the simulator, {} on {other:?}",
            sim[id], cpu[id]
        ))),
    }
}
