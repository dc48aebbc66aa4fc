//! Gives every weight block, program, task array, A buffer and C block a place in the IOVA window.

use crate::error::{Error, Result};
use crate::schedule::{Schedule, Step};
use ork_caps::Caps;
use ork_formats::model::{Block, Extent, NpuPlan, Place, Program, Region};
use ork_formats::regcmd;

/// The plan with every address decided.
#[derive(Clone, Debug)]
pub struct Memory {
    /// Extents, buffers and programs.
    pub plan: NpuPlan,
    /// Weight blocks of each scheduled matrix, in file order.
    pub blocks: Vec<Vec<Block>>,
    /// Bytes of the weights section: the weight extents, one after the other.
    pub weight_bytes: u64,
}

/// The five regions in allocation order.
pub const REGIONS: [Region; 5] = [
    Region::Weights,
    Region::Programs,
    Region::Tasks,
    Region::A,
    Region::Ring,
];

/// Lays out `schedule` for `cores` cores, `chunk` rows in halves of `half_rows`.
///
/// # Errors
/// [`Error::Fit`] with the ledger where the window is too small, or where a single buffer exceeds
/// one allocation.
pub fn plan(
    schedule: &Schedule,
    cores: u32,
    chunk: u32,
    half_rows: u32,
    caps: &Caps,
) -> Result<Memory> {
    let mut map = Extents::new(caps);
    let blocks = place_weights(schedule, &mut map)?;
    let weight_bytes = map.region_bytes(Region::Weights);
    place_programs(schedule.steps.len() as u64, &mut map);
    place_tasks(schedule, caps, &mut map)?;
    let a_bytes =
        (u64::from(half_rows) * u64::from(schedule.widest_k)).next_multiple_of(caps.page.value);
    let a_buffers: Vec<Place> = (0..2 * cores)
        .map(|_| map.own(Region::A, a_bytes, "an A buffer"))
        .collect::<Result<_>>()?;
    let ring = place_ring(schedule, &mut map)?;
    fit(&map.extents, caps)?;
    let program = |step: &Step| place_step(schedule, step, &blocks, &a_buffers, &ring, half_rows);
    let programs = schedule.steps.iter().map(program).collect();
    Ok(Memory {
        plan: NpuPlan {
            cores,
            chunk,
            half_rows,
            extents: map.extents,
            a_buffers,
            a_bytes: a_bytes as u32,
            programs,
        },
        blocks,
        weight_bytes,
    })
}

/// Where program `index` is, given the extents of the programs region.
#[must_use]
pub fn program_place(extents: &[Extent], index: usize) -> Option<Place> {
    let at = (index * regcmd::BYTES) as u64;
    (0..)
        .zip(extents)
        .filter(|(_, e)| matches!(e.region, Region::Programs))
        .find(|(_, e)| at < e.file_offset + e.bytes)
        .map(|(extent, e)| Place {
            extent,
            offset: (at - e.file_offset) as u32,
        })
}

/// Bytes of one region.
#[must_use]
pub fn region_bytes(extents: &[Extent], region: Region) -> u64 {
    extents
        .iter()
        .filter(|e| e.region == region)
        .map(|e| e.bytes)
        .sum()
}

/// Bytes that a plan may use of the window.
#[must_use]
pub fn window(caps: &Caps) -> u64 {
    caps.iova_budget.value - caps.iova_margin.value
}

fn place_weights(schedule: &Schedule, map: &mut Extents) -> Result<Vec<Vec<Block>>> {
    let mut blocks = Vec::new();
    for matrix in &schedule.matrices {
        let slice_k = u64::from(matrix.tiling.slice_k);
        let placed: Result<Vec<Block>> = matrix
            .tiling
            .pieces
            .iter()
            .map(|p| {
                let bytes = u64::from(p.cols) * slice_k;
                Ok(Block {
                    core: p.core,
                    n0: p.n0,
                    cols: p.cols,
                    slice: p.slice,
                    at: map.pack(Region::Weights, bytes, "a weight block")?,
                })
            })
            .collect();
        blocks.push(placed?);
    }
    map.round(Region::Weights);
    Ok(blocks)
}

/// Programs are contiguous in the file, so every extent but the last holds a whole number of both
/// programs and pages.
fn place_programs(count: u64, map: &mut Extents) {
    let bytes = regcmd::BYTES as u64;
    let page = map.caps.page.value;
    let unit = bytes * page / gcd(bytes, page);
    let full = map.caps.extent_max.value / unit * unit;
    let mut left = count * bytes;
    while left != 0 {
        let take = left.min(full);
        map.push(Region::Programs, take.next_multiple_of(page));
        left -= take;
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Room for a descriptor of every program.
fn place_tasks(schedule: &Schedule, caps: &Caps, map: &mut Extents) -> Result<()> {
    let task = u64::from(caps.task_bytes.value);
    for matrix in &schedule.matrices {
        for chain in &matrix.chains {
            map.pack(Region::Tasks, u64::from(chain.count) * task, "a task array")?;
        }
    }
    map.round(Region::Tasks);
    Ok(())
}

/// One allocation per half and core; index `half * cores + core`. Cores without work get none.
fn place_ring(schedule: &Schedule, map: &mut Extents) -> Result<Vec<Option<Place>>> {
    let mut starts = Vec::new();
    for _half in 0..2 {
        for bytes in &schedule.ring {
            starts.push(match bytes {
                0 => None,
                _ => Some(map.own(Region::Ring, *bytes, "a ring half")?),
            });
        }
    }
    Ok(starts)
}

fn place_step(
    schedule: &Schedule,
    step: &Step,
    blocks: &[Vec<Block>],
    a_buffers: &[Place],
    ring: &[Option<Place>],
    half_rows: u32,
) -> Program {
    let tiling = &schedule.matrices[step.matrix as usize].tiling;
    let block = blocks[step.matrix as usize][step.piece as usize];
    let cores = schedule.ring.len() as u32;
    let buffer = (step.half * cores + block.core) as usize;
    let a = a_buffers[buffer];
    let c = ring[buffer].expect("a core with a program has ring bytes");
    Program {
        m: step.m,
        k: tiling.slice_k,
        n: block.cols,
        row0: step.row0,
        n0: block.n0,
        slice: block.slice,
        // A holds one [half_rows][slice_k] plane per K slice.
        a: Place {
            offset: a.offset + (block.slice * half_rows + step.row0) * tiling.slice_k,
            ..a
        },
        w: block.at,
        c: Place {
            offset: c.offset + step.c_offset as u32,
            ..c
        },
    }
}

/// Checks the sum of all extents against the window.
fn fit(extents: &[Extent], caps: &Caps) -> Result<()> {
    let need: u64 = extents.iter().map(|e| e.bytes).sum();
    let have = window(caps);
    if need <= have {
        return Ok(());
    }
    let ledger: Vec<String> = REGIONS
        .iter()
        .map(|r| {
            format!("{r:?} {} MiB", region_bytes(extents, *r).div_ceil(1 << 20)).to_lowercase()
        })
        .collect();
    Err(Error::Fit(format!(
        "the NPU part needs {need} bytes, the window has {have} ({}); use a smaller --chunk or a smaller model",
        ledger.join(", ")
    )))
}

/// Extents in allocation order.
struct Extents<'a> {
    caps: &'a Caps,
    extents: Vec<Extent>,
}

impl<'a> Extents<'a> {
    fn new(caps: &'a Caps) -> Self {
        Self {
            caps,
            extents: Vec::new(),
        }
    }

    fn region_bytes(&self, region: Region) -> u64 {
        region_bytes(&self.extents, region)
    }

    fn push(&mut self, region: Region, bytes: u64) {
        let file_offset = match region {
            Region::Weights | Region::Programs => self.region_bytes(region),
            Region::Tasks | Region::A | Region::Ring => 0,
        };
        self.extents.push(Extent {
            region,
            bytes,
            file_offset,
        });
    }

    fn refuse(&self, bytes: u64, what: &str) -> Error {
        Error::Fit(format!(
            "{what} needs {bytes} bytes, one allocation may have {}; use a smaller --chunk or more --cores",
            self.caps.extent_max.value
        ))
    }

    /// An extent of its own.
    fn own(&mut self, region: Region, bytes: u64, what: &str) -> Result<Place> {
        let bytes = bytes.next_multiple_of(self.caps.page.value);
        if self.caps.extent_max.value < bytes {
            return Err(self.refuse(bytes, what));
        }
        self.push(region, bytes);
        Ok(Place {
            extent: self.extents.len() as u32 - 1,
            offset: 0,
        })
    }

    /// Appends to the region's last extent, or opens another where it would overflow. Call
    /// [`Extents::round`] when the region is complete.
    fn pack(&mut self, region: Region, bytes: u64, what: &str) -> Result<Place> {
        let align = u64::from(self.caps.address_align.value);
        let limit = self.caps.extent_max.value;
        if limit < bytes {
            return Err(self.refuse(bytes, what));
        }
        let room = self.extents.last().filter(|e| e.region == region);
        if room.is_none_or(|e| limit < e.bytes.next_multiple_of(align) + bytes) {
            self.round(region);
            self.push(region, 0);
        }
        let extent = self.extents.len() as u32 - 1;
        let last = &mut self.extents[extent as usize];
        let offset = last.bytes.next_multiple_of(align);
        last.bytes = offset + bytes;
        Ok(Place {
            extent,
            offset: offset as u32,
        })
    }

    /// Rounds the region's open extent up to a page.
    fn round(&mut self, region: Region) {
        if let Some(last) = self.extents.last_mut().filter(|e| e.region == region) {
            last.bytes = last.bytes.next_multiple_of(self.caps.page.value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::schedule;
    use crate::tile::{halves, tile};
    use ork_caps::{Fact, RK3588};

    fn layout(shapes: &[(u32, u32)], chunk: u32, caps: &Caps) -> Result<(Schedule, Memory)> {
        let halves = halves(chunk, caps);
        let tiles: Result<Vec<_>> = shapes.iter().map(|(n, k)| tile(*n, *k, 3, caps)).collect();
        let s = schedule((0..).zip(tiles?).collect(), &halves, 3, caps)?;
        let m = plan(&s, 3, chunk, halves.rows, caps)?;
        Ok((s, m))
    }

    #[test]
    fn nothing_overlaps_and_nothing_leaves_its_extent() {
        // Small extents force several per region.
        let caps = Caps {
            extent_max: Fact {
                value: 1 << 20,
                ..RK3588.extent_max
            },
            ..RK3588
        };
        let (s, m) = layout(&[(2560, 512), (700, 5000), (33, 100)], 192, &caps).unwrap();
        assert!(
            2 < m
                .plan
                .extents
                .iter()
                .filter(|e| e.region == Region::Weights)
                .count()
        );
        let mut spans: Vec<(u32, u64, u64)> = Vec::new();
        for (matrix, blocks) in s.matrices.iter().zip(&m.blocks) {
            for b in blocks {
                let bytes = u64::from(b.cols) * u64::from(matrix.tiling.slice_k);
                spans.push((b.at.extent, b.at.offset.into(), bytes));
            }
        }
        for a in &m.plan.a_buffers {
            spans.push((a.extent, a.offset.into(), m.plan.a_bytes.into()));
        }
        spans.sort_unstable();
        for pair in spans.windows(2) {
            assert!(
                pair[0].0 < pair[1].0 || pair[0].1 + pair[0].2 <= pair[1].1,
                "{pair:?}"
            );
        }
        for (extent, offset, bytes) in spans {
            assert!(offset + bytes <= m.plan.extents[extent as usize].bytes);
        }
        crate::verify::layout(&s, &m, &caps).unwrap();
    }

    #[test]
    fn program_extents_hold_whole_programs() {
        let mut map = Extents::new(&RK3588);
        place_programs(100_000, &mut map);
        assert_eq!(map.extents.len(), 2);
        assert_eq!(map.extents[0].bytes % 896, 0);
        let last = program_place(&map.extents, 99_999).unwrap();
        assert_eq!(last.extent, 1);
        assert!(u64::from(last.offset) + 896 <= map.extents[1].bytes);
    }

    #[test]
    fn too_large_a_model_is_refused_with_the_ledger() {
        let shapes = vec![(8192, 4096); 130];
        let error = layout(&shapes, 64, &RK3588).unwrap_err();
        assert_eq!(error.exit_code(), 4);
        assert!(error.to_string().contains("weights 4160 mib"), "{error}");
    }
}
