//! Matrix products and row look-ups over the host forms.

use crate::map::{Pack, signed};
use ork_formats::model::{FloatType, HostForm, Tensor};
use ork_formats::quant::int4;
use rayon::prelude::*;

/// Output columns of one unit of parallel work; one int4 panel.
const PANEL: usize = int4::PANEL;
/// Activations per scale.
const GROUP: usize = int4::GROUP;

/// Rows quantised per group of 32 along K, which is padded with zeros to whole groups.
struct Quantized {
    padded: usize,
    groups: usize,
    codes: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
}

impl Quantized {
    fn new(x: &[f32], k: usize) -> Self {
        let (rows, groups) = (x.len() / k, k.div_ceil(GROUP));
        let padded = groups * GROUP;
        let mut this = Self {
            padded,
            groups,
            codes: vec![0; rows * padded],
            scales: vec![0.0; rows * groups],
            sums: vec![0; rows * groups],
        };
        this.codes
            .par_chunks_mut(padded)
            .zip(this.scales.par_chunks_mut(groups))
            .zip(this.sums.par_chunks_mut(groups))
            .zip(x.par_chunks(k))
            .for_each(|(((codes, scales), sums), x)| {
                ork_kernels::quantize_groups(x, codes, scales, sums);
            });
        this
    }

    fn row(&self, row: usize) -> (&[i8], &[f32], &[i32]) {
        let groups = row * self.groups..(row + 1) * self.groups;
        (
            &self.codes[row * self.padded..(row + 1) * self.padded],
            &self.scales[groups.clone()],
            &self.sums[groups],
        )
    }
}

/// `out[rows, n] = x[rows, k] W^T` from the host form. `row_scales` are the decoded scales of an
/// int8 form, empty otherwise.
pub fn linear(pack: &Pack, tensor: &Tensor, row_scales: &[f32], x: &[f32], out: &mut [f32]) {
    let (n, k) = (tensor.n as usize, tensor.k as usize);
    match tensor.host {
        HostForm::Int4 { at } => {
            let x = Quantized::new(x, k);
            let bytes = pack.host(at);
            let panel_bytes = bytes.len() / n.div_ceil(PANEL);
            columns(n, out, |panel, row, out| {
                let (codes, scales, sums) = x.row(row);
                let bytes = &bytes[panel * panel_bytes..(panel + 1) * panel_bytes];
                ork_kernels::int4_panel(bytes, x.padded, codes, scales, sums, out);
            });
        }
        HostForm::Int8 { at, .. } => {
            let x = Quantized::new(x, k);
            let weights = signed(pack.host(at));
            columns(n, out, |panel, row, out| {
                let (codes, scales, _) = x.row(row);
                for (i, out) in out.iter_mut().enumerate().take(n - panel * PANEL) {
                    let column = panel * PANEL + i;
                    let w = &weights[column * k..(column + 1) * k];
                    *out = ork_kernels::int8_row(w, &codes[..k], scales) * row_scales[column];
                }
            });
        }
        HostForm::Float { ty, at } => {
            let bytes = pack.host(at);
            let stride = k * ty.bytes() as usize;
            let dot = match ty {
                FloatType::F32 => ork_kernels::dot_f32_bytes,
                FloatType::F16 => ork_kernels::dot_f16,
                FloatType::Bf16 => ork_kernels::dot_bf16,
            };
            columns(n, out, |panel, row, out| {
                let x = &x[row * k..(row + 1) * k];
                for (i, out) in out.iter_mut().enumerate().take(n - panel * PANEL) {
                    let column = panel * PANEL + i;
                    *out = dot(&bytes[column * stride..(column + 1) * stride], x);
                }
            });
        }
    }
}

/// Fills `out[rows, n]` by panels of 16 columns in parallel; each panel's weights are read once for
/// all rows. `panel(p, row, out)` computes columns `16 p ..` of one row.
fn columns(n: usize, out: &mut [f32], panel: impl Fn(usize, usize, &mut [f32; PANEL]) + Sync) {
    let rows = out.len() / n;
    // [panel][row][16]: contiguous per task, put in row order afterwards.
    let mut tiles = vec![[0f32; PANEL]; n.div_ceil(PANEL) * rows];
    tiles.par_chunks_mut(rows).enumerate().for_each(|(p, tile)| {
        for (row, out) in tile.iter_mut().enumerate() {
            panel(p, row, out);
        }
    });
    out.par_chunks_mut(n).enumerate().for_each(|(row, out)| {
        for (p, out) in out.chunks_mut(PANEL).enumerate() {
            out.copy_from_slice(&tiles[p * rows + row][..out.len()]);
        }
    });
}

/// Decodes row `row` of the host form into `out[k]`.
pub fn row(pack: &Pack, tensor: &Tensor, row_scales: &[f32], row: usize, out: &mut [f32]) {
    let k = tensor.k as usize;
    match tensor.host {
        HostForm::Int4 { at } => int4::unpack_row(pack.host(at), k, row, out),
        HostForm::Int8 { at, .. } => {
            let codes = &signed(pack.host(at))[row * k..(row + 1) * k];
            for (out, code) in out.iter_mut().zip(codes) {
                *out = f32::from(*code) * row_scales[row];
            }
        }
        HostForm::Float { ty, at } => {
            let size = ty.bytes() as usize;
            let bytes = &pack.host(at)[row * k * size..(row + 1) * k * size];
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(size)) {
                *out = match ty {
                    FloatType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
                    FloatType::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f32(),
                    FloatType::Bf16 => half::bf16::from_le_bytes([b[0], b[1]]).to_f32(),
                };
            }
        }
    }
}
