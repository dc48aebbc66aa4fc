//! Checks a finished plan and its command streams, by other means than those that made them. On
//! this hardware a bad stream costs a power cycle.

use crate::emit::Emitted;
use crate::error::{Error, Result};
use crate::memory::{Memory, window};
use crate::schedule::Schedule;
use ork_caps::Caps;
use ork_formats::lint;
use ork_formats::model::{Chain, NpuPlan, Place, Region};
use ork_formats::regcmd::{self, Word, reg};

/// Checks everything.
///
/// # Errors
/// [`Error::Verify`] with the first fault.
pub fn verify(schedule: &Schedule, memory: &Memory, emitted: &Emitted, caps: &Caps) -> Result<()> {
    layout(schedule, memory, caps)?;
    streams(schedule, memory, emitted, caps)
}

/// Checks that nothing overlaps, leaves its extent or its region, or exceeds the window.
///
/// # Errors
/// [`Error::Verify`] with the first fault.
pub fn layout(schedule: &Schedule, memory: &Memory, caps: &Caps) -> Result<()> {
    let plan = &memory.plan;
    let total: u64 = plan.extents.iter().map(|e| e.bytes).sum();
    ensure(total <= window(caps), || {
        format!("extents of {total} bytes in a window of {}", window(caps))
    })?;
    for (i, e) in plan.extents.iter().enumerate() {
        ensure(
            e.bytes <= caps.extent_max.value && e.bytes.is_multiple_of(caps.page.value),
            || format!("extent {i} has {} bytes", e.bytes),
        )?;
    }
    let mut fixed = Vec::new();
    for (matrix, blocks) in schedule.matrices.iter().zip(&memory.blocks) {
        let k = u64::from(matrix.tiling.slice_k);
        for b in blocks {
            fixed.push(span(plan, b.at, u64::from(b.cols) * k, Region::Weights)?);
        }
    }
    for a in &plan.a_buffers {
        fixed.push(span(plan, *a, u64::from(plan.a_bytes), Region::A)?);
    }
    disjoint(fixed, "buffers")?;
    results(schedule, plan)
}

/// C blocks of one chain are disjoint; so are those of chains that may run at the same time.
fn results(schedule: &Schedule, plan: &NpuPlan) -> Result<()> {
    // Extent and byte range that each (half, core) ever writes.
    let mut owners: Vec<((u32, u32), Span)> = Vec::new();
    for chain in schedule.matrices.iter().flat_map(|m| &m.chains) {
        let mut blocks = Vec::new();
        for p in &plan.programs[range(chain)] {
            let bytes = u64::from(p.m) * u64::from(p.n) * 4;
            blocks.push(span(plan, p.c, bytes, Region::Ring)?);
        }
        for block in &blocks {
            let key = (chain.half, chain.core);
            match owners.iter_mut().find(|(k, s)| *k == key && s.0 == block.0) {
                Some((_, s)) => *s = (s.0, s.1.min(block.1), s.2.max(block.2)),
                None => owners.push((key, *block)),
            }
        }
        disjoint(blocks, "result blocks of a chain")?;
    }
    let areas = owners.into_iter().map(|(_, s)| s).collect();
    disjoint(areas, "result areas of two cores or halves")
}

/// Lints every program, then relocates a copy to invented addresses and follows every chain the
/// way the hardware does.
fn streams(schedule: &Schedule, memory: &Memory, emitted: &Emitted, caps: &Caps) -> Result<()> {
    let plan = &memory.plan;
    let mut words = emitted.words.clone();
    ensure(words.len() == plan.programs.len() * regcmd::WORDS, || {
        format!("{} words for {} programs", words.len(), plan.programs.len())
    })?;
    let bases = invented_bases(plan);
    regcmd::apply(&mut words, &emitted.relocs, &bases);
    let address = |at: Place| bases[at.extent as usize] + at.offset;
    for chain in schedule.matrices.iter().flat_map(|m| &m.chains) {
        for index in range(chain) {
            let last = index + 1 == range(chain).end;
            lint_program(&emitted.words, index, !last, caps)?;
            let at = |entry| Word(words[index * regcmd::WORDS + entry]);
            let p = &plan.programs[index];
            for (entry, register, want) in [
                (regcmd::A_ENTRY, reg::FEATURE_DATA_ADDR, p.a),
                (regcmd::W_ENTRY, reg::DCOMP_ADDR0, p.w),
                (regcmd::C_ENTRY, reg::DST_BASE_ADDR, p.c),
            ] {
                let word = at(entry);
                ensure(word.is(register) && word.value() == address(want), || {
                    format!("program {index}: {} is {:#x}", register.name, word.value())
                })?;
            }
            let link = at(regcmd::NEXT_ENTRY);
            if last {
                ensure(link.0 == 0, || {
                    format!("program {index} ends a chain but links on")
                })?;
            } else {
                let follows = load_address(plan, &bases, index + 1);
                ensure(Some(link.value()) == follows, || {
                    format!(
                        "program {index} links to {:#x}, not {follows:x?}",
                        link.value()
                    )
                })?;
            }
        }
    }
    Ok(())
}

fn lint_program(words: &[u64], index: usize, chained: bool, caps: &Caps) -> Result<()> {
    let program: Vec<Word> = words[index * regcmd::WORDS..][..regcmd::WORDS]
        .iter()
        .map(|w| Word(*w))
        .collect();
    match lint::program(&program, caps, chained).first() {
        Some(finding) => fault(format!("program {index}: {finding}")),
        None => Ok(()),
    }
}

/// Extents side by side above a page that stays unmapped.
fn invented_bases(plan: &NpuPlan) -> Vec<u32> {
    let mut next = 1u64 << 16;
    plan.extents
        .iter()
        .map(|e| {
            let base = next;
            next += e.bytes;
            base as u32
        })
        .collect()
}

/// Where the loader's copy of program `index` is: section bytes land extent after extent.
fn load_address(plan: &NpuPlan, bases: &[u32], index: usize) -> Option<u32> {
    let at = (index * regcmd::BYTES) as u64;
    let programs = plan.extents.iter().zip(bases);
    programs
        .filter(|(e, _)| e.region == Region::Programs)
        .find(|(e, _)| e.file_offset <= at && at + regcmd::BYTES as u64 <= e.file_offset + e.bytes)
        .map(|(e, base)| base + (at - e.file_offset) as u32)
}

/// (extent, first byte, end)
type Span = (u32, u64, u64);

fn span(plan: &NpuPlan, at: Place, bytes: u64, region: Region) -> Result<Span> {
    let start = u64::from(at.offset);
    let extent = plan.extents.get(at.extent as usize);
    ensure(
        extent.is_some_and(|e| e.region == region && start + bytes <= e.bytes),
        || format!("{bytes} bytes at {at:?} are outside {region:?} extent {extent:?}"),
    )?;
    Ok((at.extent, start, start + bytes))
}

fn disjoint(mut spans: Vec<Span>, what: &str) -> Result<()> {
    spans.sort_unstable();
    for pair in spans.windows(2) {
        ensure(pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1, || {
            format!("{what} overlap: {:?} and {:?}", pair[0], pair[1])
        })?;
    }
    Ok(())
}

fn range(chain: &Chain) -> std::ops::Range<usize> {
    chain.first as usize..(chain.first + chain.count) as usize
}

fn ensure(holds: bool, text: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { fault(text()) }
}

fn fault<T>(text: String) -> Result<T> {
    Err(Error::Verify(format!(
        "the plan failed its check, which is a fault of orkc: {text}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emit::emit;
    use crate::memory::plan;
    use crate::schedule::schedule;
    use crate::tile::{halves, tile};
    use ork_caps::RK3588;

    fn compiled() -> (Schedule, Memory, Emitted) {
        let halves = halves(192, &RK3588);
        let tiles = [(96, 9728), (700, 600), (33, 512)]
            .map(|(n, k)| tile(n, k, 3, &RK3588).unwrap())
            .into_iter();
        let s = schedule((0..).zip(tiles).collect(), &halves, 3, &RK3588).unwrap();
        let m = plan(&s, 3, 192, halves.rows, &RK3588).unwrap();
        let e = emit(&s, &m.plan, &RK3588);
        (s, m, e)
    }

    #[test]
    fn an_honest_plan_passes() {
        let (s, m, e) = compiled();
        verify(&s, &m, &e, &RK3588).unwrap();
    }

    #[test]
    fn a_wrong_relocation_is_found() {
        let (s, m, e) = compiled();
        for i in 0..8 {
            let mut bad = e.clone();
            bad.relocs[i].offset += 16;
            assert_eq!(verify(&s, &m, &bad, &RK3588).unwrap_err().exit_code(), 7);
            let mut bad = e.clone();
            bad.relocs.remove(i);
            assert!(verify(&s, &m, &bad, &RK3588).is_err());
        }
    }

    #[test]
    fn overlaps_are_found() {
        let (s, m, _) = compiled();
        let mut bad = m.clone();
        bad.plan.a_buffers[1] = bad.plan.a_buffers[0];
        assert!(layout(&s, &bad, &RK3588).is_err());
        let mut bad = m.clone();
        bad.blocks[1][0].at = bad.blocks[0][0].at;
        assert!(layout(&s, &bad, &RK3588).is_err());
        let mut bad = m;
        bad.plan.programs[1].c = bad.plan.programs[0].c;
        assert!(layout(&s, &bad, &RK3588).is_err());
    }
}
