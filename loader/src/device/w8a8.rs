//! One linear layer on a device: quantise rows, run the chains, check and dequantise the blocks.

use super::Device;
use crate::error::{Error, Result};
use ork_formats::model::{Chain, NpuForm, NpuPlan, Place, Program, Tensor};
use rayon::prelude::*;

/// Seeded into the result before a run. No int8 product sum reaches it: 4096 * 128 * 128 < 2^27.
const SENTINEL: i32 = i32::MAX;

/// Computes `out[rows, n] = x[rows, k] W^T` through `device`, for at most `plan.chunk` rows.
/// `scales` has one f32 per padded output channel.
///
/// # Errors
/// [`Error::Failed`] when the device faults or leaves a result unwritten, [`Error::Input`] when the
/// pack has no chain for a half.
pub(crate) fn linear(
    device: &mut dyn Device,
    plan: &NpuPlan,
    tensor: &Tensor,
    form: &NpuForm,
    scales: &[f32],
    x: &[f32],
    out: &mut [f32],
) -> Result<()> {
    let (n, k) = (tensor.n as usize, tensor.k as usize);
    let half_rows = plan.half_rows as usize;
    let halves = x.chunks(half_rows * k).zip(out.chunks_mut(half_rows * n));
    for (half, (x, out)) in halves.enumerate() {
        let rows = (x.len() / k) as u32;
        let chains = select(form, tensor, half as u32, rows)?;
        let class = chains[0].rows as usize;
        let row_scales = upload(device, plan, form, half, class, k, x);
        let programs: Vec<Program> = chains
            .iter()
            .flat_map(|c| &plan.programs[c.first as usize..(c.first + c.count) as usize])
            .copied()
            .collect();
        for program in &programs {
            seed(device, program);
        }
        device.run(&chains, rows)?;
        collect(&*device, programs, tensor, &row_scales, scales, out)?;
    }
    Ok(())
}

/// The chains of the smallest row class that holds `rows` rows.
fn select(form: &NpuForm, tensor: &Tensor, half: u32, rows: u32) -> Result<Vec<Chain>> {
    let fits = |c: &&Chain| c.half == half && c.rows >= rows;
    let class = form.chains.iter().filter(fits).map(|c| c.rows).min();
    let class = class.ok_or_else(|| {
        Error::Input(format!(
            "tensor {}: no chain of half {half} holds {rows} rows; recompile the pack",
            tensor.name
        ))
    })?;
    let wanted = |c: &&Chain| c.half == half && c.rows == class;
    Ok(form.chains.iter().filter(wanted).copied().collect())
}

/// Quantises the rows of `x` into every core's A buffer of this half; returns the row scales.
/// The buffer is K-sliced: slice s at `s * half_rows * slice_k`, its rows contiguous.
fn upload(
    device: &mut dyn Device,
    plan: &NpuPlan,
    form: &NpuForm,
    half: usize,
    class: usize,
    k: usize,
    x: &[f32],
) -> Vec<f32> {
    let slice_k = form.slice_k as usize;
    let padded = slice_k * form.k_slices as usize;
    let rows = x.len() / k;
    let mut codes = vec![0i8; rows * padded];
    let row_scales = codes
        .par_chunks_mut(padded)
        .zip(x.par_chunks(k))
        .map(|(codes, x)| ork_kernels::quantize_row(x, codes))
        .collect();
    let cores = plan.cores as usize;
    for place in &plan.a_buffers[half * cores..(half + 1) * cores] {
        let extent = device.bytes_mut(place.extent);
        let buffer = &mut extent[place.offset as usize..][..plan.a_bytes as usize];
        for slice in 0..form.k_slices as usize {
            let block = &mut buffer[slice * plan.half_rows as usize * slice_k..];
            let (used, surplus) = block[..class * slice_k].split_at_mut(rows * slice_k);
            for (to, from) in used
                .chunks_exact_mut(slice_k)
                .zip(codes.chunks_exact(padded))
            {
                for (to, from) in to.iter_mut().zip(&from[slice * slice_k..]) {
                    *to = from.cast_unsigned();
                }
            }
            surplus.fill(0);
        }
    }
    row_scales
}

/// Marks the last word of every row of a C block as unwritten.
fn seed(device: &mut dyn Device, program: &Program) {
    let row = program.n as usize * 4;
    let block = &mut device.bytes_mut(program.c.extent)[program.c.offset as usize..];
    for row in block[..program.m as usize * row].chunks_exact_mut(row) {
        let last = row.len() - 4;
        row[last..].copy_from_slice(&SENTINEL.to_le_bytes());
    }
}

/// One output tile: the C blocks of all its K slices.
struct Tile {
    row0: usize,
    m: usize,
    n0: usize,
    n: usize,
    slices: Vec<Place>,
}

fn tiles(mut programs: Vec<Program>) -> Vec<Tile> {
    programs.sort_by_key(|p| (p.row0, p.n0, p.slice));
    let mut tiles: Vec<Tile> = Vec::new();
    for p in programs {
        match tiles.last_mut() {
            Some(t) if (t.row0, t.n0) == (p.row0 as usize, p.n0 as usize) => t.slices.push(p.c),
            _ => tiles.push(Tile {
                row0: p.row0 as usize,
                m: p.m as usize,
                n0: p.n0 as usize,
                n: p.n as usize,
                slices: vec![p.c],
            }),
        }
    }
    tiles
}

/// Sums the K slices in int32 (exact, so their order is free), then dequantises row by row.
fn collect(
    device: &dyn Device,
    programs: Vec<Program>,
    tensor: &Tensor,
    row_scales: &[f32],
    scales: &[f32],
    out: &mut [f32],
) -> Result<()> {
    let tiles = tiles(programs);
    let columns = tensor.n as usize;
    out.par_chunks_mut(columns)
        .zip(row_scales)
        .enumerate()
        .try_for_each_init(Vec::new, |acc: &mut Vec<i32>, (row, (out, scale))| {
            let covers = |t: &&Tile| (t.row0..t.row0 + t.m).contains(&row);
            for tile in tiles.iter().filter(covers) {
                acc.clear();
                acc.resize(tile.n, 0);
                for at in &tile.slices {
                    let from = at.offset as usize + (row - tile.row0) * tile.n * 4;
                    let bytes = &device.bytes(at.extent)[from..from + tile.n * 4];
                    let (words, _) = bytes.as_chunks::<4>();
                    let mut unwritten = false;
                    for (acc, word) in acc.iter_mut().zip(words) {
                        let word = i32::from_le_bytes(*word);
                        unwritten |= word == SENTINEL;
                        *acc = acc.wrapping_add(word);
                    }
                    if unwritten {
                        return Err(Error::Failed(format!(
                            "tensor {}: the {} device left row {row} of columns {}..{} unwritten; run it again or use another backend",
                            tensor.name,
                            device.name(),
                            tile.n0,
                            tile.n0 + tile.n
                        )));
                    }
                }
                let used = tile.n.min(columns.saturating_sub(tile.n0));
                let to = tile.n0.min(columns)..tile.n0.min(columns) + used;
                ork_kernels::dequantize_row(&acc[..used], *scale, &scales[to.clone()], &mut out[to]);
            }
            Ok(())
        })
}
