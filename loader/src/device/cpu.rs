//! The same int32 blocks on the CPU, reading the native tiles from the map.

use super::jobs::Jobs;
use super::{Device, allocate, copy};
use crate::error::Result;
use crate::map::Pack;
use ork_formats::model::{Place, Region};
use rayon::prelude::*;

/// Host memory for A and ring; weights stay in the mapping.
pub struct Cpu {
    extents: Vec<Vec<u8>>,
}

impl Cpu {
    /// Allocates A buffers and ring.
    #[must_use]
    pub fn new(pack: &Pack) -> Self {
        let plan = pack.reader().manifest().npu.as_ref();
        Self {
            extents: plan.map_or_else(Vec::new, |plan| {
                allocate(plan, |region| matches!(region, Region::A | Region::Ring))
            }),
        }
    }
}

impl Device for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn bytes(&self, at: Place, len: usize) -> &[u8] {
        &self.extents[at.extent as usize][at.offset as usize..][..len]
    }

    fn bytes_mut(&mut self, at: Place, len: usize) -> &mut [u8] {
        &mut self.extents[at.extent as usize][at.offset as usize..][..len]
    }

    fn copy(&mut self, from: Place, to: Place, len: usize) {
        copy(&mut self.extents, from, to, len);
    }

    fn start(&mut self, pack: &Pack, jobs: &Jobs, id: u32, rows: u32) -> Result<()> {
        let plan = pack.reader().manifest().npu.as_ref();
        let plan = plan.expect("jobs come from a plan");
        let weights = pack.reader().npu_weights(pack.bytes());
        let programs = jobs.get(id).programs(plan, rows);
        let blocks: Vec<Vec<i32>> = programs
            .par_iter()
            .map(|p| {
                let m = p.m.min(rows - p.row0) as usize;
                let (k, n) = (p.k as usize, p.n as usize);
                let a = &self.extents[p.a.extent as usize][p.a.offset as usize..][..m * k];
                let at = plan.extents[p.w.extent as usize].file_offset + u64::from(p.w.offset);
                let mut c = vec![0; m * n];
                ork_kernels::gemm_i8_tiles(
                    bytemuck::cast_slice(a),
                    m,
                    k,
                    &weights[at as usize..][..n * k],
                    n,
                    &mut c,
                );
                c
            })
            .collect();
        for (p, block) in programs.iter().zip(&blocks) {
            let target = &mut self.extents[p.c.extent as usize][p.c.offset as usize..];
            for (bytes, value) in target.chunks_exact_mut(4).zip(block) {
                bytes.copy_from_slice(&value.to_le_bytes());
            }
        }
        Ok(())
    }
}
