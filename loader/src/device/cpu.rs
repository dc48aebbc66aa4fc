//! The plan's programs as plain int8 GEMMs, weights read in place from the mapping.

use super::Device;
use crate::error::Result;
use crate::map::{Pack, signed};
use ork_formats::model::{Chain, NpuPlan, Program, Region};
use rayon::prelude::*;
use std::sync::Arc;

/// Columns of one unit of parallel work; a multiple of the 32-column weight tile.
const COLUMNS: u32 = 256;

/// CPU stand-in for the NPU.
#[derive(Debug)]
pub struct Cpu {
    pack: Arc<Pack>,
    plan: Arc<NpuPlan>,
    /// Indexed by extent; empty where the device needs no copy (weights, programs, tasks).
    extents: Vec<Vec<u8>>,
}

impl Cpu {
    /// Allocates the A and ring extents of `plan`.
    #[must_use]
    pub fn new(pack: Arc<Pack>, plan: Arc<NpuPlan>) -> Self {
        let extents = plan
            .extents
            .iter()
            .map(|e| match e.region {
                Region::A | Region::Ring => vec![0; e.bytes as usize],
                Region::Weights | Region::Programs | Region::Tasks => Vec::new(),
            })
            .collect();
        Self {
            pack,
            plan,
            extents,
        }
    }

    /// Columns `[from, from + cols)` of a program for its first `rows` rows: `[rows][cols]`.
    fn block(&self, program: &Program, from: u32, cols: u32, rows: usize) -> Vec<i32> {
        let k = program.k as usize;
        let a = program.a.offset as usize;
        let a = signed(&self.extents[program.a.extent as usize][a..a + rows * k]);
        // Native tiles of 32 columns follow each other, so a column offset is `from * k` bytes.
        let w = self.plan.extents[program.w.extent as usize].file_offset as usize
            + program.w.offset as usize
            + from as usize * k;
        let weights = self.pack.reader().npu_weights(self.pack.bytes());
        let w = &weights[w..w + cols as usize * k];
        let mut c = vec![0; rows * cols as usize];
        ork_kernels::gemm_i8_tiles(a, rows, k, w, cols as usize, &mut c);
        c
    }
}

impl Device for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn bytes(&self, extent: u32) -> &[u8] {
        &self.extents[extent as usize]
    }

    fn bytes_mut(&mut self, extent: u32) -> &mut [u8] {
        &mut self.extents[extent as usize]
    }

    fn run(&mut self, chains: &[Chain], rows: u32) -> Result<()> {
        let mut tasks = Vec::new();
        for chain in chains {
            for index in chain.first..chain.first + chain.count {
                let program = self.plan.programs[index as usize];
                let needed = program.m.min(rows.saturating_sub(program.row0)) as usize;
                if needed == 0 {
                    continue;
                }
                for from in (0..program.n).step_by(COLUMNS as usize) {
                    tasks.push((program, from, COLUMNS.min(program.n - from), needed));
                }
            }
        }
        let blocks: Vec<Vec<i32>> = tasks
            .par_iter()
            .map(|(program, from, cols, rows)| self.block(program, *from, *cols, *rows))
            .collect();
        for ((program, from, cols, _), block) in tasks.iter().zip(blocks) {
            let ring = &mut self.extents[program.c.extent as usize][program.c.offset as usize..];
            for (row, values) in block.chunks_exact(*cols as usize).enumerate() {
                let at = (row * program.n as usize + *from as usize) * 4;
                let (words, _) = ring[at..at + values.len() * 4].as_chunks_mut::<4>();
                for (word, value) in words.iter_mut().zip(values) {
                    *word = value.to_le_bytes();
                }
            }
        }
        Ok(())
    }
}
