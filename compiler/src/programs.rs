//! A pack's command programs for people and other tools: lists, disassembly, raw files.

use crate::error::{Error, Result};
use ork_formats::model::{Manifest, NpuPlan, Place, Program};
use ork_formats::pack::Reader;
use ork_formats::regcmd::{self, A_ENTRY, C_ENTRY, NEXT_ENTRY, W_ENTRY, Word};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// Where the raw files' addresses start: activations, weights, results, programs.
const BASES: [u32; 4] = [0x1000_0000, 0x2000_0000, 0x3000_0000, 0x4000_0000];
/// Spacing of the areas in the raw files' address space.
const AREA_ALIGN: u32 = 64;

/// One program of a pack.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Index in the programs section.
    pub id: u32,
    /// Tensor it multiplies with.
    pub tensor: String,
    /// Rows.
    pub m: u32,
    /// Contracted length.
    pub k: u32,
    /// Output channels.
    pub n: u32,
    /// Core it runs on.
    pub core: u32,
    /// Half-chunk whose buffers it uses.
    pub half: u32,
    /// Rows of its chain.
    pub row_class: u32,
    /// First row, first channel, K slice.
    pub at: (u32, u32, u32),
    /// 64-bit words.
    pub entries: usize,
    /// The program it links to.
    pub next: Option<u32>,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let next = self.next.map_or("-".into(), |n| n.to_string());
        writeln!(
            f,
            "{:>6}  m {:<4} k {:<5} n {:<5} core {} half {} rows {:<4} next {next:<6} {}",
            self.id, self.m, self.k, self.n, self.core, self.half, self.row_class, self.tensor
        )
    }
}

/// Every program, by id.
#[must_use]
pub fn list(manifest: &Manifest) -> Vec<Row> {
    let Some(plan) = &manifest.npu else {
        return Vec::new();
    };
    let mut rows = Vec::with_capacity(plan.programs.len());
    for tensor in &manifest.tensors {
        for chain in tensor.npu.iter().flat_map(|form| &form.chains) {
            let end = chain.first + chain.count;
            for id in chain.first..end {
                let p = &plan.programs[id as usize];
                rows.push(Row {
                    id,
                    tensor: tensor.name.clone(),
                    m: p.m,
                    k: p.k,
                    n: p.n,
                    core: chain.core,
                    half: chain.half,
                    row_class: chain.rows,
                    at: (p.row0, p.n0, p.slice),
                    entries: regcmd::WORDS,
                    next: Some(id + 1).filter(|n| *n < end),
                });
            }
        }
    }
    rows.sort_by_key(|r| r.id);
    rows
}

/// The program and its followers in its chain.
fn tail(manifest: &Manifest, id: u32) -> Result<(&NpuPlan, &[Program], Vec<Row>)> {
    let rows = list(manifest);
    let (Some(plan), true) = (&manifest.npu, (id as usize) < rows.len()) else {
        return Err(Error::Usage(format!(
            "program {id}: the pack has {} programs",
            rows.len()
        )));
    };
    let mut end = id as usize;
    while let Some(next) = rows[end].next {
        end = next as usize;
    }
    let range = id as usize..end + 1;
    Ok((plan, &plan.programs[range.clone()], rows[range].to_vec()))
}

fn words(reader: &Reader, id: u32) -> Vec<Word> {
    let start = id as usize * regcmd::BYTES;
    reader.programs()[start..start + regcmd::BYTES]
        .chunks_exact(8)
        .map(|b| Word(u64::from_le_bytes(b.try_into().expect("8 bytes"))))
        .collect()
}

/// One program as text; its address words are zero until a loader relocates them.
///
/// # Errors
/// [`Error::Usage`] for an id the pack does not have.
pub fn disassemble(reader: &Reader, id: u32) -> Result<String> {
    let (_, _, rows) = tail(reader.manifest(), id)?;
    Ok(format!(
        "{}{}",
        rows[0],
        regcmd::disassemble(&words(reader, id))
    ))
}

/// One memory area of a raw program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Area {
    /// Device address.
    pub addr: u32,
    /// Size.
    pub bytes: u32,
    /// From one row (for weights: one kernel of K bytes) to the next.
    pub row_stride: u32,
}

/// What `program.json` says.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Description {
    /// Index in the pack.
    pub id: u32,
    /// Tensor it multiplies with.
    pub tensor: String,
    /// Rows.
    pub m: u32,
    /// Contracted length.
    pub k: u32,
    /// Output channels.
    pub n: u32,
    /// 64-bit words.
    pub entries: usize,
    /// Where the program itself is.
    pub regcmd: u32,
    /// int8 activations, row-major.
    pub a: Area,
    /// int8 weights, native tiles.
    pub w: Area,
    /// int32 results, row-major.
    pub c: Area,
    /// Programs that it links to, in order.
    pub followers: Vec<Description>,
}

/// A program, relocated, with all it needs but its activations.
#[derive(Clone, Debug, PartialEq)]
pub struct Raw {
    /// The program and its followers, 896 bytes each.
    pub regcmd: Vec<u8>,
    /// Weight blocks, each once, the program's own first.
    pub weights: Vec<u8>,
    /// Sizes and addresses.
    pub description: Description,
}

/// Hands out addresses: each distinct place once, in order of first use.
struct Areas {
    next: u32,
    given: BTreeMap<Place, u32>,
}

impl Areas {
    fn new(base: u32) -> Self {
        Self {
            next: base,
            given: BTreeMap::new(),
        }
    }

    /// The address, and whether it is new.
    fn address(&mut self, place: Place, bytes: u32) -> (u32, bool) {
        match self.given.get(&place) {
            Some(address) => (*address, false),
            None => {
                let address = self.next;
                self.given.insert(place, address);
                self.next = (address + bytes).next_multiple_of(AREA_ALIGN);
                (address, true)
            }
        }
    }
}

/// Program `id` relocated to fixed addresses, its links pointing into the same file.
///
/// # Errors
/// [`Error::Usage`] for an id the pack does not have.
pub fn raw(reader: &Reader, file: &[u8], id: u32) -> Result<Raw> {
    let (plan, programs, rows) = tail(reader.manifest(), id)?;
    let [mut a, mut w, mut c] = [BASES[0], BASES[1], BASES[2]].map(Areas::new);
    let (mut regcmd, mut weights, mut described) = (Vec::new(), Vec::new(), Vec::new());
    for (index, (p, row)) in programs.iter().zip(&rows).enumerate() {
        let [a_bytes, w_bytes, c_bytes] = [p.m * p.k, p.n * p.k, p.m * p.n * 4];
        let (a_at, _) = a.address(p.a, a_bytes);
        let (w_at, fresh) = w.address(p.w, w_bytes);
        let (c_at, _) = c.address(p.c, c_bytes);
        if fresh {
            weights.resize((w_at - BASES[1]) as usize, 0);
            let extent = &plan.extents[p.w.extent as usize];
            let start = (extent.file_offset + u64::from(p.w.offset)) as usize;
            weights.extend_from_slice(&reader.npu_weights(file)[start..start + w_bytes as usize]);
        }
        let at = BASES[3] + (index * regcmd::BYTES) as u32;
        let mut program = words(reader, row.id);
        for (entry, address) in [(A_ENTRY, a_at), (W_ENTRY, w_at), (C_ENTRY, c_at)] {
            program[entry] = program[entry].with_value(address);
        }
        if row.next.is_some() {
            let next = at + regcmd::BYTES as u32;
            program[NEXT_ENTRY] = program[NEXT_ENTRY].with_value(next);
        }
        regcmd.extend(program.iter().flat_map(|word| word.0.to_le_bytes()));
        let area = |addr, bytes, row_stride| Area {
            addr,
            bytes,
            row_stride,
        };
        described.push(Description {
            id: row.id,
            tensor: row.tensor.clone(),
            m: p.m,
            k: p.k,
            n: p.n,
            entries: regcmd::WORDS,
            regcmd: at,
            a: area(a_at, a_bytes, p.k),
            w: area(w_at, w_bytes, p.k),
            c: area(c_at, c_bytes, p.n * 4),
            followers: Vec::new(),
        });
    }
    let mut description = described.remove(0);
    description.followers = described;
    Ok(Raw {
        regcmd,
        weights,
        description,
    })
}
