//! Microscaling: mxfp4, mxfp8 and nvfp4, a small float for each value and one for each group's scale.

use super::floats::{E2M1, E4M3, Floats};

/// Width of the codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    /// Four bits, the first of a pair in the low half of its byte.
    E2m1,
    /// A byte.
    E4m3,
}

/// How a second scale over whole matrices enters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Global {
    /// MLX: times the scale over 2688 (448 * 6, the largest product of the small floats).
    Mlx,
    /// modelopt: times the scale.
    Times,
    /// compressed-tensors: divided by the scale.
    Over,
}

/// A stored matrix of small floats; experts are more rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mx<'a> {
    pub(super) code: Code,
    pub(super) codes: &'a [u8],
    pub(super) scales: Floats<'a>,
    pub(super) group: usize,
    /// One for all, or one for each expert, and the rows of an expert.
    pub(super) global: Option<(Global, Floats<'a>, usize)>,
}

impl Mx<'_> {
    /// Row `row`, as long as `out`.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        let global = self.global_of(row);
        let groups = out.len() / self.group;
        for (g, values) in out.chunks_exact_mut(self.group).enumerate() {
            let group = row * groups + g;
            let scale = self.scales.at(group);
            match self.code {
                Code::E2m1 => mxfp4(&self.codes[group * self.group / 2..], scale, values),
                Code::E4m3 => mxfp8(&self.codes[group * self.group..], scale, values),
            }
            if let Some(global) = global {
                values.iter_mut().for_each(|v| *v *= global);
            }
        }
    }

    /// As `config.json` words it.
    pub(super) fn name(&self) -> String {
        match (self.code, self.group) {
            (Code::E4m3, group) => format!("mxfp8 8 bit, group {group}"),
            (Code::E2m1, 16) => "nvfp4 4 bit, group 16".into(),
            (Code::E2m1, group) => format!("mxfp4 4 bit, group {group}"),
        }
    }

    fn global_of(&self, row: usize) -> Option<f32> {
        let (global, scales, rows) = self.global?;
        let scale = scales.at(if scales.len() == 1 { 0 } else { row / rows });
        Some(match global {
            Global::Mlx => scale / 2688.0,
            Global::Times => scale,
            Global::Over => 1.0 / scale,
        })
    }

    /// (groups whose scale is 0 while codes are not, groups): what an underflow of the scales leaves.
    pub(super) fn underflown(&self) -> (usize, usize) {
        if self.code != Code::E2m1 {
            return (0, 0);
        }
        let zero = |code: u8| code & 0x77 == 0;
        let lost = |group: &usize| {
            let codes = &self.codes[group * self.group / 2..][..self.group / 2];
            self.scales.at(*group) == 0.0 && !codes.iter().all(|c| zero(*c))
        };
        let groups = self.scales.len();
        ((0..groups).filter(lost).count(), groups)
    }
}

/// Four-bit floats times `scale`: exact in f32 for any E8M0 or E4M3 scale.
fn mxfp4(codes: &[u8], scale: f32, out: &mut [f32]) {
    for (pair, byte) in out.chunks_exact_mut(2).zip(codes) {
        pair[0] = scale * E2M1[usize::from(byte & 15)];
        pair[1] = scale * E2M1[usize::from(byte >> 4)];
    }
}

/// Eight-bit floats times `scale`.
fn mxfp8(codes: &[u8], scale: f32, out: &mut [f32]) {
    for (v, byte) in out.iter_mut().zip(codes) {
        *v = scale * E4M3[usize::from(*byte)];
    }
}
