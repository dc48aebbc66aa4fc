//! Host-form matmuls: decode's weights, and both phases of float packs.

use ork_formats::model::{FloatType, HostForm, Span, Tensor};
use ork_formats::quant::int4;
use ork_kernels as kernels;
use rayon::prelude::*;

/// The bytes of a span of the host section.
pub(crate) fn bytes(host: &[u8], at: Span) -> &[u8] {
    &host[at.offset as usize..][..at.bytes as usize]
}

/// Element `i` of little-endian f32 bytes.
fn f32_at(bytes: &[u8], i: usize) -> f32 {
    f32::from_le_bytes(bytes[i * 4..][..4].try_into().expect("4 bytes"))
}

/// A vector or table `[n, k]`, widened.
pub(crate) fn vector(host: &[u8], tensor: &Tensor) -> Vec<f32> {
    let mut out = vec![0.0; tensor.n as usize * tensor.k as usize];
    for (i, line) in out.chunks_exact_mut(tensor.k as usize).enumerate() {
        row(host, tensor, i, line);
    }
    out
}

/// Row `index` of a tensor, widened into `out` `[k]`.
pub(crate) fn row(host: &[u8], tensor: &Tensor, index: usize, out: &mut [f32]) {
    let k = tensor.k as usize;
    match tensor.host {
        HostForm::Float { ty, at } => {
            let width = ty.bytes() as usize;
            let row = &bytes(host, at)[index * k * width..][..k * width];
            for (out, b) in out.iter_mut().zip(row.chunks_exact(width)) {
                *out = match ty {
                    FloatType::F32 => f32::from_le_bytes(b.try_into().expect("4 bytes")),
                    FloatType::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f32(),
                    FloatType::Bf16 => half::bf16::from_le_bytes([b[0], b[1]]).to_f32(),
                };
            }
        }
        HostForm::Int8 { at, scales } => {
            let scale = f32_at(bytes(host, scales), index);
            let codes = &bytes(host, at)[index * k..][..k];
            for (out, code) in out.iter_mut().zip(codes) {
                *out = f32::from(*code as i8) * scale;
            }
        }
        HostForm::Int4 { at } => int4::unpack_row(bytes(host, at), k, index, out),
    }
}

/// One row of quantised activations.
struct Quantised {
    q: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
}

fn quantise(x: &[f32]) -> Quantised {
    let groups = x.len().div_ceil(kernels::GROUP);
    let mut out = Quantised {
        q: vec![0; groups * kernels::GROUP],
        scales: vec![0.0; groups],
        sums: vec![0; groups],
    };
    kernels::quantize_groups(x, &mut out.q, &mut out.scales, &mut out.sums);
    out
}

/// The host form of one matrix.
#[derive(Clone, Copy)]
enum Form<'a> {
    Float { ty: FloatType, rows: &'a [u8] },
    Int8 { codes: &'a [u8], scales: &'a [u8] },
    Int4 { panels: &'a [u8] },
}

/// One matrix `[n, k]` of a tensor in its host form.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    n: usize,
    k: usize,
    form: Form<'a>,
}

impl<'a> Matrix<'a> {
    /// Matrix `index` of the tensor's stack.
    pub(crate) fn of(host: &'a [u8], tensor: &Tensor, index: usize) -> Self {
        let (n, k) = (tensor.n as usize, tensor.k as usize);
        let part = |at, len: usize| &bytes(host, at)[index * len..][..len];
        let form = match tensor.host {
            HostForm::Float { ty, at } => Form::Float {
                ty,
                rows: part(at, n * k * ty.bytes() as usize),
            },
            HostForm::Int8 { at, scales } => Form::Int8 {
                codes: part(at, n * k),
                scales: part(scales, n * 4),
            },
            HostForm::Int4 { at } => Form::Int4 {
                panels: part(at, int4::bytes(n, k) as usize),
            },
        };
        Self { n, k, form }
    }

    /// `out[rows, n] = x[rows, k] W^T`. Each output is one fixed-order sum.
    pub(crate) fn times(&self, x: &[f32], out: &mut [f32]) {
        let (n, k) = (self.n, self.k);
        for (x, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(n)) {
            match self.form {
                Form::Float { ty, rows } => {
                    let rows = rows.par_chunks_exact(k * ty.bytes() as usize);
                    let dot = match ty {
                        FloatType::F32 => kernels::dot_f32_bytes,
                        FloatType::F16 => kernels::dot_f16,
                        FloatType::Bf16 => kernels::dot_bf16,
                    };
                    out.par_iter_mut()
                        .zip(rows)
                        .with_min_len(32)
                        .for_each(|(out, w)| *out = dot(w, x));
                }
                Form::Int8 { codes, scales } => {
                    let activations = quantise(x);
                    let rows = codes.par_chunks_exact(k).enumerate();
                    out.par_iter_mut()
                        .zip(rows)
                        .with_min_len(32)
                        .for_each(|(out, (i, w))| {
                            let codes = bytemuck::cast_slice(w);
                            let sum = kernels::int8_row(codes, &activations.q, &activations.scales);
                            *out = sum * f32_at(scales, i);
                        });
                }
                Form::Int4 { panels } => {
                    let a = quantise(x);
                    let panels = panels.par_chunks_exact(int4::panel_bytes(k));
                    out.par_chunks_mut(int4::PANEL)
                        .zip(panels)
                        .for_each(|(out, panel)| {
                            let mut rows = [0.0; int4::PANEL];
                            kernels::int4_panel(
                                panel,
                                a.q.len(),
                                &a.q,
                                &a.scales,
                                &a.sums,
                                &mut rows,
                            );
                            out.copy_from_slice(&rows[..out.len()]);
                        });
                }
            }
        }
    }
}

/// `out[rows, n] = x[rows, k] W^T` with the tensor's host form.
pub(crate) fn matmul(host: &[u8], tensor: &Tensor, x: &[f32], out: &mut [f32]) {
    Matrix::of(host, tensor, 0).times(x, out);
}
