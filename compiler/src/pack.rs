//! Quantises tensor by tensor into the bulk sections, then writes the rest of the pack.

use crate::checkpoint::Checkpoint;
use crate::emit::Emitted;
use crate::error::{Error, Result};
use crate::golden::{self, Answers};
use crate::graph::{Graph, Rows, TensorDecl};
use crate::memory::Memory;
use crate::place::{Host, Placed};
use crate::quantize::{int4, int8, w8a8};
use crate::schedule::{Matrix, Schedule};
use half::{bf16, f16};
use indicatif::ProgressBar;
use ork_formats::golden::Golden;
use ork_formats::model::{
    Block, FloatType, HostForm, Manifest, NpuForm, Place, Span, Tensor, Tiles,
};
use ork_formats::pack::write::{SectionId, WriteError, Writer};
use ork_formats::pack::{Kind, Reader};
use ork_formats::quant::int4::{GROUP, PANEL, bytes as int4_bytes, pack as int4_pack, panel_bytes};
use rayon::prelude::*;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Host spans start on cache lines.
const HOST_ALIGN: u64 = 64;
/// Rows and columns of a native weight tile.
const TILE: usize = 32;

/// What the packer learned on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// BLAKE3 of the header page: names the pack's content.
    pub hash: [u8; 32],
    /// Largest magnitude that any int32 accumulator can reach.
    pub accumulator: u64,
}

impl From<WriteError> for Error {
    fn from(e: WriteError) -> Self {
        match e {
            WriteError::Exists { .. } => Self::Usage(e.to_string()),
            WriteError::Io { path, source } => Self::Io { path, source },
            WriteError::Reserved(..) => Self::Verify(e.to_string()),
        }
    }
}

/// Describes every tensor and gives its host bytes a place. Returns the tensors (with zero source
/// hashes) and the length of the host section.
///
/// # Errors
/// [`Error::Input`] for a tensor that the checkpoint lacks.
pub fn lay_out(
    checkpoint: &Checkpoint,
    graph: &Graph,
    placed: &[Placed],
    schedule: &Schedule,
    memory: Option<&Memory>,
) -> Result<(Vec<Tensor>, u64)> {
    let mut host = Host64::default();
    let mut tensors = Vec::new();
    for (id, (decl, place)) in graph.tensors.iter().zip(placed).enumerate() {
        let (stack, k) = (u64::from(decl.stack), u64::from(decl.k));
        let rows = stack * u64::from(decl.n);
        let float = |host: &mut Host64, ty: FloatType| HostForm::Float {
            ty,
            at: host.span(rows * k * ty.bytes()),
        };
        let form = match place.host {
            Host::Source => float(&mut host, decl.rows(checkpoint)?.float_type()),
            Host::F16 => float(&mut host, FloatType::F16),
            Host::F32 => float(&mut host, FloatType::F32),
            Host::Int8 => HostForm::Int8 {
                at: host.span(rows * k),
                scales: host.span(rows * 4),
            },
            Host::Int4 => HostForm::Int4 {
                at: host.span(stack * int4_bytes(decl.n as usize, decl.k as usize)),
            },
        };
        let batch = place.batch.then(|| {
            let (n, k) = padded(decl);
            Tiles {
                at: host.span(stack * (n * k) as u64),
                scales: host.span(stack * n as u64 * 4),
            }
        });
        let matrix = matrix_of(schedule, id);
        let npu = matrix.zip(memory).map(|((index, m), memory)| NpuForm {
            slice_k: m.tiling.slice_k,
            k_slices: m.tiling.k_slices,
            scales: host.span(u64::from(m.tiling.padded_n) * 4),
            blocks: memory.blocks[index].clone(),
            chains: m.chains.clone(),
        });
        tensors.push(Tensor {
            name: decl.name.clone(),
            stack: decl.stack,
            n: decl.n,
            k: decl.k,
            host: form,
            npu,
            batch,
            source: [0; 32],
        });
    }
    Ok((tensors, host.0))
}

fn matrix_of(schedule: &Schedule, tensor: usize) -> Option<(usize, &Matrix)> {
    let find = |m: &Matrix| m.tensor as usize == tensor;
    let index = schedule.matrices.iter().position(find)?;
    Some((index, &schedule.matrices[index]))
}

#[derive(Default)]
struct Host64(u64);

impl Host64 {
    fn span(&mut self, bytes: u64) -> Span {
        let offset = self.0.next_multiple_of(HOST_ALIGN);
        self.0 = offset + bytes;
        Span { offset, bytes }
    }
}

/// Lengths of the two bulk sections.
#[derive(Clone, Copy, Debug)]
pub struct Bulk {
    /// Bytes of native weight tiles, extents included.
    pub npu: u64,
    /// Bytes of host tensors.
    pub host: u64,
}

/// Writes the whole pack; fills the source hashes of `manifest` on the way. Same bytes whatever the
/// size of the rayon pool it runs in.
///
/// # Errors
/// [`Error::Input`] for values that cannot be quantised, [`Error::Interrupted`], [`Error::Io`].
pub fn write(
    mut writer: Writer,
    checkpoint: &Checkpoint,
    graph: &Graph,
    manifest: &mut Manifest,
    (emitted, tokenizer): (&Emitted, &[u8]),
    bulk: Bulk,
    (progress, stop): (&ProgressBar, &AtomicBool),
) -> Result<Written> {
    let mut npu = Sink::begin(&mut writer, Kind::NpuWeights, bulk.npu)?;
    let mut host = Sink::begin(&mut writer, Kind::HostWeights, bulk.host)?;
    let extents: Vec<u64> = manifest
        .npu
        .iter()
        .flat_map(|plan| plan.extents.iter().map(|e| e.file_offset))
        .collect();
    let mut accumulator = 0;
    let mut answers = Answers::default();
    for (decl, tensor) in graph.tensors.iter().zip(&mut manifest.tensors) {
        if stop.load(Ordering::Relaxed) {
            // Dropping the writer removes its temporary file.
            return Err(Error::Interrupted);
        }
        let rows = decl.rows(checkpoint)?;
        tensor.source = rows.hash();
        rows.check_finite()?;
        rows.tensors()
            .filter_map(|t| t.suspicion())
            .for_each(|text| checkpoint.warn(text));
        write_host(&mut writer, &mut host, decl, &rows, &tensor.host)?;
        if let Some(tiles) = tensor.batch {
            let bound = write_tiles(&mut writer, &mut host, decl, &rows, tiles)?;
            accumulator = accumulator.max(bound);
        }
        if let Some(form) = &tensor.npu {
            let codes = quantize_npu(decl, &rows, form);
            accumulator = accumulator.max(codes.bound);
            let scales: Vec<u8> = codes.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
            host.put(&mut writer, form.scales.offset, &scales)?;
            for block in &form.blocks {
                let at = extents[block.at.extent as usize] + u64::from(block.at.offset);
                let bytes = codes.block(block, form.slice_k as usize);
                npu.put(&mut writer, at, &bytes)?;
                answers.consider(manifest.npu.as_ref(), form, block, &bytes);
            }
        }
        progress.inc(rows.bytes());
        for piece in &decl.pieces {
            checkpoint.release(&piece.of);
        }
    }
    npu.pad(&mut writer, bulk.npu)?;
    host.pad(&mut writer, bulk.host)?;
    for (kind, bytes) in [
        (Kind::Programs, emitted.program_bytes()),
        (Kind::Relocs, emitted.reloc_bytes()),
    ] {
        let id = writer.begin(kind, bytes.len() as u64)?;
        writer.write(id, &bytes)?;
    }
    writer.tokenizer(tokenizer)?;
    writer.golden(&Golden {
        texts: golden::texts(tokenizer, &manifest.text)?,
        blocks: answers.into_blocks(),
    })?;
    writer.manifest(manifest)?;
    let hash = writer.seal()?;
    // The loader's own proofs, before anybody can see the file.
    prove(writer.temp())?;
    writer.publish()?;
    Ok(Written { hash, accumulator })
}

fn prove(path: &Path) -> Result<()> {
    let io = |source| Error::Io {
        path: path.to_path_buf(),
        source,
    };
    let file = File::open(path).map_err(io)?;
    // SAFETY: read-only mapping of a temporary file that this process alone has written and still owns.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
    Reader::parse(&map)
        .map(drop)
        .map_err(|e| Error::Verify(format!("the loader would refuse this pack: {e}")))
}

/// A reserved section written front to back, gaps filled with zeros.
struct Sink {
    id: SectionId,
    at: u64,
}

impl Sink {
    fn begin(writer: &mut Writer, kind: Kind, len: u64) -> Result<Self> {
        let id = writer.begin(kind, len)?;
        Ok(Self { id, at: 0 })
    }

    fn put(&mut self, writer: &mut Writer, at: u64, bytes: &[u8]) -> Result<()> {
        self.pad(writer, at)?;
        writer.write(self.id, bytes)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn pad(&mut self, writer: &mut Writer, to: u64) -> Result<()> {
        let gap = to.checked_sub(self.at).ok_or_else(|| {
            Error::Verify(format!(
                "bytes for offset {to} after {} were written",
                self.at
            ))
        })?;
        writer.write(self.id, &vec![0; gap as usize])?;
        self.at = to;
        Ok(())
    }
}

fn shape(decl: &TensorDecl) -> (usize, usize) {
    (decl.n as usize, decl.k as usize)
}

/// One matrix in whole native tiles.
fn padded(decl: &TensorDecl) -> (usize, usize) {
    let (n, k) = shape(decl);
    (n.next_multiple_of(TILE), k.next_multiple_of(TILE))
}

fn quantize_npu(decl: &TensorDecl, rows: &Rows<'_>, form: &NpuForm) -> w8a8::Codes {
    let padded = (
        form.scales.bytes as usize / 4,
        form.slice_k as usize * form.k_slices as usize,
    );
    w8a8::quantize(shape(decl), padded, |row, out| rows.row_f32(row, out))
}

fn write_host(
    writer: &mut Writer,
    host: &mut Sink,
    decl: &TensorDecl,
    rows: &Rows<'_>,
    form: &HostForm,
) -> Result<()> {
    let (n, k) = shape(decl);
    let matrices = 0..decl.stack as usize;
    match *form {
        HostForm::Float { ty, mut at } if rows.plain() == Some(ty) => {
            for chunk in rows.chunks() {
                host.put(writer, at.offset, chunk)?;
                at.offset += chunk.len() as u64;
            }
            Ok(())
        }
        HostForm::Float { ty, at } => {
            let bytes = (n * k) as u64 * ty.bytes();
            for m in matrices {
                let values = float_matrix(decl, rows, ty, m)?;
                host.put(writer, at.offset + m as u64 * bytes, &values)?;
            }
            Ok(())
        }
        HostForm::Int8 { at, scales } => {
            let mut row_scales = Vec::new();
            for m in matrices {
                let (codes, scales) = int8_matrix(rows, m * n, (n, k));
                host.put(writer, at.offset + (m * n * k) as u64, &codes)?;
                row_scales.extend(scales);
            }
            host.put(writer, scales.offset, &row_scales)
        }
        HostForm::Int4 { at } => {
            for m in matrices {
                let panels = int4_matrix(rows, m * n, (n, k));
                let offset = m as u64 * int4_bytes(n, k);
                host.put(writer, at.offset + offset, &panels)?;
            }
            Ok(())
        }
    }
}

/// Matrix `m` of the stack in `ty`.
fn float_matrix(decl: &TensorDecl, rows: &Rows<'_>, ty: FloatType, m: usize) -> Result<Vec<u8>> {
    let (n, k) = shape(decl);
    let mut bytes = Vec::with_capacity(n * k * ty.bytes() as usize);
    let mut values = vec![0f32; k];
    for row in 0..n {
        rows.row_f32(m * n + row, &mut values);
        match ty {
            FloatType::F16 => {
                let halves: Vec<f16> = values.iter().map(|v| f16::from_f32(*v)).collect();
                if let Some(at) = halves.iter().position(|v| !v.is_finite()) {
                    return Err(Error::Input(format!(
                        "tensor {}: {} at row {row}, column {at} exceeds {}, the largest float16; pass --lossless",
                        decl.name,
                        values[at],
                        f16::MAX
                    )));
                }
                bytes.extend(halves.iter().flat_map(|v| v.to_le_bytes()));
            }
            // Chosen only where every value is exact in it.
            FloatType::Bf16 => {
                let halves = values.iter().map(|v| bf16::from_f32(*v));
                bytes.extend(halves.flat_map(bf16::to_le_bytes));
            }
            FloatType::F32 => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        }
    }
    Ok(bytes)
}

/// Every matrix of a stack in native tiles; returns the bound on their accumulators.
fn write_tiles(
    writer: &mut Writer,
    host: &mut Sink,
    decl: &TensorDecl,
    rows: &Rows<'_>,
    tiles: Tiles,
) -> Result<u64> {
    let (n, k) = shape(decl);
    let (padded_n, padded_k) = padded(decl);
    let block = Block {
        core: 0,
        n0: 0,
        cols: padded_n as u32,
        slice: 0,
        at: Place {
            extent: 0,
            offset: 0,
        },
    };
    let mut scales = Vec::new();
    let mut bound = 0;
    for m in 0..decl.stack as usize {
        let codes = w8a8::quantize((n, k), (padded_n, padded_k), |row, out| {
            rows.row_f32(m * n + row, out);
        });
        let bytes = codes.block(&block, padded_k);
        host.put(writer, tiles.at.offset + (m * bytes.len()) as u64, &bytes)?;
        scales.extend(codes.scales.iter().flat_map(|s| s.to_le_bytes()));
        bound = bound.max(codes.bound);
    }
    host.put(writer, tiles.scales.offset, &scales)?;
    Ok(bound)
}

/// Codes and scales of `n` rows from row `first`.
fn int8_matrix(rows: &Rows<'_>, first: usize, (n, k): (usize, usize)) -> (Vec<u8>, Vec<u8>) {
    let mut codes = vec![0u8; n * k];
    let mut scales = vec![0u8; n * 4];
    codes
        .par_chunks_exact_mut(k)
        .zip(scales.par_chunks_exact_mut(4))
        .enumerate()
        .for_each_init(
            || vec![0f32; k],
            |values, (row, (line, scale))| {
                rows.row_f32(first + row, values);
                scale.copy_from_slice(&int8::row(values, line).to_le_bytes());
            },
        );
    (codes, scales)
}

/// Panels of `n` rows from row `first`. They are independent, so each is quantised and packed as a small
/// matrix of its own.
fn int4_matrix(rows: &Rows<'_>, first: usize, (n, k): (usize, usize)) -> Vec<u8> {
    let groups = k.div_ceil(GROUP);
    let mut out = vec![0u8; int4_bytes(n, k) as usize];
    out.par_chunks_exact_mut(panel_bytes(k))
        .enumerate()
        .for_each_init(
            || {
                (
                    vec![0f32; k],
                    vec![0i8; PANEL * k],
                    vec![0u16; PANEL * groups],
                )
            },
            |(values, codes, scales), (panel, bytes)| {
                let count = PANEL.min(n - panel * PANEL);
                for r in 0..count {
                    rows.row_f32(first + panel * PANEL + r, values);
                    let scales = &mut scales[r * groups..][..groups];
                    int4::row(values, &mut codes[r * k..][..k], scales);
                }
                let packed = int4_pack(&codes[..count * k], &scales[..count * groups], count, k);
                bytes.copy_from_slice(&packed);
            },
        );
    out
}
