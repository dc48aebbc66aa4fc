//! Checks a pack on this machine against the answers it carries.

use crate::device::{Cpu, Device, Sim};
use crate::error::{Error, Result};
use crate::exec;
use crate::map::Pack;
use crate::session::{Backend, Config, Session};
use crate::tokenizer::Tokenizer;
use ork_formats::golden::{Answer, ROWS, activation};
use ork_formats::model::{Chain, NpuPlan};
use std::path::Path;

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

/// Hashes the file, tokenises, runs programs in the simulator and on the CPU, and compares.
///
/// # Errors
/// [`Error::Verify`] naming the first difference; [`Error::Mismatch`] for a pack without answers.
pub fn run(path: &Path, threads: usize) -> Result<Checked> {
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
        let devices: [Box<dyn Device>; 2] = [
            Box::new(Sim::new(&pack, threads)),
            Box::new(Cpu::new(&pack)),
        ];
        for mut device in devices {
            for answer in &golden.blocks {
                block(&pack, plan, &mut *device, answer)?;
                blocks += 1;
            }
        }
    }
    let logits = golden
        .texts
        .first()
        .map_or(Ok(0), |(_, ids)| agree(path, threads, ids))?;
    Ok(Checked {
        sections: reader.sections().len(),
        texts: golden.texts.len(),
        blocks,
        logits,
    })
}

/// Runs the chain of one answer's program on the pattern and compares its block.
fn block(pack: &Pack, plan: &NpuPlan, device: &mut dyn Device, answer: &Answer) -> Result<()> {
    let p = &plan.programs[answer.program as usize];
    let chain: Chain = *pack
        .reader()
        .manifest()
        .tensors
        .iter()
        .flat_map(|t| &t.npu)
        .flat_map(|form| &form.chains)
        .find(|c| (c.first..c.first + c.count).contains(&answer.program))
        .expect("the reader proved that every program is in a chain");
    let rows = ROWS.min(p.m as usize);
    exec::seed(device, plan);
    let (k, n) = (p.k as usize, p.n as usize);
    let a = &mut device.bytes_mut(p.a.extent)[p.a.offset as usize..][..p.m as usize * k];
    a.fill(0);
    for (i, byte) in a[..rows * k].iter_mut().enumerate() {
        *byte = activation(i) as u8;
    }
    device.run(pack, &[chain], chain.rows)?;
    let c = &device.bytes(p.c.extent)[p.c.offset as usize..][..rows * n * 4];
    match *blake3::hash(c).as_bytes() == answer.hash {
        true => Ok(()),
        false => Err(Error::Verify(format!(
            "{}: program {} ({} x {k} x {n}) computes another block than the pack says",
            device.name(),
            answer.program,
            p.m
        ))),
    }
}

/// Prefills `ids` on both backends; their logits must be the same bits.
fn agree(path: &Path, threads: usize, ids: &[u32]) -> Result<usize> {
    let logits = |backend| {
        let config = Config {
            backend,
            threads,
            ctx: None,
        };
        Session::open(path, config)?.prefill(ids)
    };
    let (sim, cpu) = (logits(Backend::Sim)?, logits(Backend::Cpu)?);
    match sim
        .iter()
        .zip(&cpu)
        .position(|(a, b)| a.to_bits() != b.to_bits())
    {
        None => Ok(sim.len()),
        Some(id) => Err(Error::Verify(format!(
            "logit of id {id}: {} in the simulator, {} on the CPU",
            sim[id], cpu[id]
        ))),
    }
}
