//! Extents, weight blocks, chains: every output computed once, no result over another.

use super::{Proof, bad, ensure, inside, same};
use crate::model::{Block, Chain, Manifest, NpuForm, NpuPlan, Place, Region, Tensor};
use crate::pack::PackError;
use ork_caps::Caps;
use std::collections::BTreeMap;

pub(super) fn extents(plan: &NpuPlan, caps: &Caps, stream: u64, weights: u64) -> Proof {
    let granule = caps.row_granule.value;
    let whole_rows = |rows: u32| 0 < rows && rows.is_multiple_of(granule);
    ensure((1..=caps.cores.value).contains(&plan.cores), || {
        format!("{} cores, the SoC has {}", plan.cores, caps.cores.value)
    })?;
    ensure(
        whole_rows(plan.chunk)
            && whole_rows(plan.half_rows)
            && plan.chunk <= caps.chunk_max.value
            && plan.half_rows <= plan.chunk
            && plan.chunk - plan.half_rows <= plan.half_rows,
        || format!("chunk {} with half {}", plan.chunk, plan.half_rows),
    )?;
    same(
        plan.a_buffers.len() as u64,
        2 * u64::from(plan.cores),
        "A buffers",
    )?;
    let mut sum = 0u64;
    let mut file = [
        (Region::Weights, 0u64, weights),
        (Region::Programs, 0, stream),
    ];
    let mut last = Region::Weights;
    for (index, extent) in plan.extents.iter().enumerate() {
        ensure(last <= extent.region, || {
            format!("extent {index} is out of order")
        })?;
        last = extent.region;
        ensure(
            0 < extent.bytes
                && extent.bytes <= caps.extent_max.value
                && extent.bytes % caps.page.value == 0,
            || format!("extent {index} has {} bytes", extent.bytes),
        )?;
        sum += extent.bytes;
        if let Some((_, used, _)) = file.iter_mut().find(|f| f.0 == extent.region) {
            same(extent.file_offset, *used, "extent file offset")?;
            *used += extent.bytes;
        }
    }
    let window = caps.iova_budget.value - caps.iova_margin.value;
    ensure(sum <= window, || {
        format!("extents need {sum} bytes, the window has {window}")
    })?;
    let tasks: u64 = plan
        .extents
        .iter()
        .filter(|e| e.region == Region::Tasks)
        .map(|e| e.bytes)
        .sum();
    let descriptors = plan.programs.len() as u64 * u64::from(caps.task_bytes.value);
    // Each chain's array starts on a boundary of its own, hence the slack.
    let most = (2 * descriptors).next_multiple_of(caps.page.value);
    ensure((descriptors..=most).contains(&tasks), || {
        format!("task arrays hold {tasks} bytes, the programs need {descriptors}")
    })?;
    // The last extent of a region is rounded up to a page; the section holds the bytes in use.
    for (region, used, section) in file {
        ensure(
            section <= used && used < section + caps.page.value.max(1),
            || format!("{region:?} extents hold {used} bytes, the section {section}"),
        )?;
    }
    Ok(())
}

/// Proves every NPU form; returns which program follows which.
pub(super) fn chains(
    manifest: &Manifest,
    plan: &NpuPlan,
    caps: &Caps,
    weights: u64,
) -> Result<Vec<Option<u32>>, PackError> {
    let mut buffers = Vec::new();
    for at in &plan.a_buffers {
        inside(plan, *at, u64::from(plan.a_bytes), Region::A, "A buffer")?;
        buffers.push((*at, u64::from(plan.a_bytes)));
    }
    disjoint(buffers, "A buffers")?;
    let mut walk = Walk {
        next: vec![None; plan.programs.len()],
        claimed: vec![false; plan.programs.len()],
    };
    for tensor in &manifest.tensors {
        if let Some(form) = &tensor.npu {
            npu_form(plan, tensor, form, caps, weights)?;
            let cores = columns(plan, tensor, form)?;
            for chain in &form.chains {
                ensure(chain.count <= caps.max_tasks.value, || {
                    format!(
                        "{}: {} programs in a chain, one commit takes {}",
                        tensor.name, chain.count, caps.max_tasks.value
                    )
                })?;
                walk.chain(plan, tensor, form, chain, &cores)?;
            }
            classes(plan, tensor, form, &cores, caps)?;
        }
    }
    let mut ends = halves_apart(manifest, plan)?;
    for at in &plan.a_buffers {
        let end = u64::from(at.offset) + u64::from(plan.a_bytes);
        let furthest = ends.entry(at.extent).or_default();
        *furthest = end.max(*furthest);
    }
    in_proportion(plan, caps, &ends)?;
    match walk.claimed.iter().position(|c| !c) {
        Some(orphan) => Err(bad(format!("program {orphan} belongs to no chain"))),
        None => Ok(walk.next),
    }
}

fn npu_form(plan: &NpuPlan, t: &Tensor, form: &NpuForm, caps: &Caps, weights: u64) -> Proof {
    let whole = form.slice_k.is_multiple_of(caps.k_granule.value);
    ensure(
        whole && (1..=caps.k_max.value).contains(&form.slice_k),
        || format!("{}: K slices of {}", t.name, form.slice_k),
    )?;
    let covered = u64::from(form.slice_k) * u64::from(form.k_slices);
    ensure(u64::from(t.k) <= covered && 0 < form.k_slices, || {
        format!(
            "{}: {} slices of {} for K {}",
            t.name, form.k_slices, form.slice_k, t.k
        )
    })?;
    // The slices' sum stays inside int32 and short of the sentinel: activations are within +-127, weight
    // bytes of a stranger's pack may be -128.
    ensure(covered < i32::MAX as u64 / (127 * 128), || {
        format!("{}: K {covered} overflows int32", t.name)
    })?;
    ensure(
        covered * u64::from(plan.half_rows) <= u64::from(plan.a_bytes),
        || {
            format!(
                "{}: {} rows of {covered} exceed the A buffer's {}",
                t.name, plan.half_rows, plan.a_bytes
            )
        },
    )?;
    let padded = t.n.next_multiple_of(32);
    for block in &form.blocks {
        let Block {
            core,
            n0,
            cols,
            slice,
            at,
        } = *block;
        ensure(
            core < plan.cores
                && slice < form.k_slices
                && n0 % 32 == 0
                && cols % 32 == 0
                && 0 < cols
                && u64::from(n0) + u64::from(cols) <= u64::from(padded),
            || format!("{}: weight block {block:?}", t.name),
        )?;
        inside(
            plan,
            at,
            u64::from(cols) * u64::from(form.slice_k),
            Region::Weights,
            &t.name,
        )?;
        let bytes = u64::from(cols) * u64::from(form.slice_k);
        let start = plan.extents[at.extent as usize].file_offset + u64::from(at.offset);
        ensure(start + bytes <= weights, || {
            format!(
                "{}: a weight block ends past the section's {weights} bytes",
                t.name
            )
        })?;
    }
    Ok(())
}

/// Each core's blocks by (channel, slice). Together they cover every channel of every slice once.
fn columns<'a>(
    plan: &NpuPlan,
    t: &Tensor,
    form: &'a NpuForm,
) -> Result<Vec<Vec<&'a Block>>, PackError> {
    let mut cores = vec![Vec::new(); plan.cores as usize];
    for block in &form.blocks {
        cores[block.core as usize].push(block);
    }
    let mut n = 0;
    for blocks in &mut cores {
        blocks.sort_by_key(|b| (b.n0, b.slice));
        for slices in blocks.chunks(form.k_slices as usize) {
            let cols = slices[0].cols;
            let whole = slices.len() == form.k_slices as usize
                && slices
                    .iter()
                    .zip(0..)
                    .all(|(b, slice)| (b.n0, b.cols, b.slice) == (n, cols, slice));
            ensure(whole, || {
                format!("{}: weight blocks at channel {n} are {slices:?}", t.name)
            })?;
            n += cols;
        }
    }
    let padded = u64::from(t.n.next_multiple_of(32));
    same(
        u64::from(n),
        padded,
        &format!("{}: channels covered", t.name),
    )?;
    Ok(cores)
}

/// Places of `bytes` each must not overlap.
fn disjoint(mut places: Vec<(Place, u64)>, what: &str) -> Proof {
    places.sort();
    for pair in places.windows(2) {
        let ((a, bytes), (b, _)) = (pair[0], pair[1]);
        let apart = a.extent != b.extent || u64::from(a.offset) + bytes <= u64::from(b.offset);
        ensure(apart, || {
            format!("{what} overlap: {a:?} of {bytes} bytes and {b:?}")
        })?;
    }
    Ok(())
}

/// Every row class has exactly one chain on each core that owns channels, and chains that run together
/// write to different places.
fn classes(
    plan: &NpuPlan,
    t: &Tensor,
    form: &NpuForm,
    cores: &[Vec<&Block>],
    caps: &Caps,
) -> Proof {
    let granule = caps.row_granule.value;
    let owners = cores.iter().filter(|blocks| !blocks.is_empty()).count();
    let mut order: Vec<&Chain> = form.chains.iter().collect();
    order.sort_by_key(|c| (c.half, c.rows, c.core));
    let mut want = Vec::new();
    for (half, rows) in [plan.half_rows, plan.chunk - plan.half_rows]
        .into_iter()
        .enumerate()
    {
        want.extend((1..=rows.div_ceil(granule)).map(|class| (half as u32, class * granule)));
    }
    let mut groups = order.chunk_by(|a, b| (a.half, a.rows) == (b.half, b.rows));
    for (half, rows) in want {
        let group = groups.next().unwrap_or_default();
        let complete = group.len() == owners
            && group.iter().all(|c| (c.half, c.rows) == (half, rows))
            && group.windows(2).all(|pair| pair[0].core < pair[1].core);
        ensure(complete, || {
            format!(
                "{}: {rows} rows of half {half} need {owners} chains, found {group:?}",
                t.name
            )
        })?;
        let mut results = Vec::new();
        for chain in group {
            let range = chain.first as usize..(chain.first + chain.count) as usize;
            results.extend(
                plan.programs[range]
                    .iter()
                    .map(|p| (p.c, u64::from(p.m) * u64::from(p.n) * 4)),
            );
        }
        disjoint(results, "C blocks")?;
    }
    ensure(groups.next().is_none(), || {
        format!("{}: chains beyond the chunk's row classes", t.name)
    })
}

/// Buffers are in proportion to what the programs use of them (a chunk of one half leaves the other's
/// unused), so that a small pack cannot make a loader allocate the whole window. `ends` maps extent
/// to furthest use.
fn in_proportion(plan: &NpuPlan, caps: &Caps, ends: &BTreeMap<u32, u64>) -> Proof {
    let buffers = plan
        .extents
        .iter()
        .filter(|e| matches!(e.region, Region::A | Region::Ring));
    let (bytes, count) = buffers.fold((0, 0), |(bytes, n), e| (bytes + e.bytes, n + 1));
    let used: u64 = ends.values().sum();
    ensure(bytes <= 2 * used + count * caps.page.value, || {
        format!("A buffers and ring have {bytes} bytes, the programs use {used}")
    })
}

/// While one half computes, the other half's results are still being read: no result of one may lie
/// over a result of the other, whatever the tensors. Returns the furthest use of each ring extent.
fn halves_apart(manifest: &Manifest, plan: &NpuPlan) -> Result<BTreeMap<u32, u64>, PackError> {
    let mut furthest = BTreeMap::new();
    let mut results = Vec::new();
    for chain in manifest
        .tensors
        .iter()
        .flat_map(|t| &t.npu)
        .flat_map(|form| &form.chains)
    {
        let range = chain.first as usize..(chain.first + chain.count) as usize;
        results.extend(plan.programs[range].iter().map(|p| {
            let start = u64::from(p.c.offset);
            let end = start + u64::from(p.m) * u64::from(p.n) * 4;
            (p.c.extent, start, end, chain.half as usize)
        }));
    }
    results.sort_unstable();
    // Furthest end so far, per half, in the extent being swept.
    let (mut extent, mut ends) = (0, [0u64; 2]);
    for (at, start, end, half) in results {
        if at != extent {
            (extent, ends) = (at, [0; 2]);
        }
        ensure(ends[1 - half] <= start, || {
            format!("results of both halves share extent {at} at {start}")
        })?;
        ends[half] = ends[half].max(end);
        furthest.insert(at, ends[0].max(ends[1]));
    }
    Ok(furthest)
}

struct Walk {
    next: Vec<Option<u32>>,
    claimed: Vec<bool>,
}

impl Walk {
    /// A chain computes row tiles in order, each over its core's blocks in order: so every
    /// (row, channel, slice) once.
    fn chain(
        &mut self,
        plan: &NpuPlan,
        t: &Tensor,
        form: &NpuForm,
        chain: &Chain,
        cores: &[Vec<&Block>],
    ) -> Proof {
        let Chain {
            core,
            half,
            rows,
            first,
            count,
        } = *chain;
        let end = first
            .checked_add(count)
            .filter(|e| *e as usize <= plan.programs.len());
        let holds = core < plan.cores && half < 2 && 0 < rows && rows <= plan.half_rows;
        ensure(holds && 0 < count && end.is_some(), || {
            format!("{}: chain {chain:?}", t.name)
        })?;
        let blocks = &cores[core as usize];
        let a = plan.a_buffers[(half * plan.cores + core) as usize];
        let (mut row0, mut m, mut column) = (0, 0, 0);
        for index in first..first + count {
            let p = &plan.programs[index as usize];
            let fresh = !std::mem::replace(&mut self.claimed[index as usize], true);
            ensure(fresh, || format!("program {index} is in two chains"))?;
            if index + 1 < first + count {
                self.next[index as usize] = Some(index + 1);
            }
            if column == 0 {
                m = p.m;
            }
            let block = blocks
                .get(column)
                .filter(|b| (b.at, b.n0, b.cols, b.slice) == (p.w, p.n0, p.n, p.slice));
            ensure(
                block.is_some() && p.row0 == row0 && p.m == m && 0 < m,
                || {
                    format!(
                        "{}: program {index} computes {p:?} where block {column} of row {row0} is due",
                        t.name
                    )
                },
            )?;
            ensure(p.k == form.slice_k, || {
                format!("program {index} has K {}, its tensor {}", p.k, form.slice_k)
            })?;
            let offset = u64::from(a.offset)
                + u64::from(p.slice) * u64::from(plan.half_rows) * u64::from(form.slice_k)
                + u64::from(p.row0) * u64::from(form.slice_k);
            ensure(
                p.a.extent == a.extent && u64::from(p.a.offset) == offset,
                || format!("program {index} reads A at {:?}, not {offset}", p.a),
            )?;
            let (m64, n64) = (u64::from(p.m), u64::from(p.n));
            inside(plan, p.a, m64 * u64::from(p.k), Region::A, "A rows")?;
            inside(plan, p.c, m64 * n64 * 4, Region::Ring, "C block")?;
            column += 1;
            if column == blocks.len() {
                column = 0;
                row0 = row0.saturating_add(m);
            }
        }
        ensure(column == 0 && row0 == rows, || {
            format!("{}: {chain:?} ends at row {row0}, block {column}", t.name)
        })
    }
}
